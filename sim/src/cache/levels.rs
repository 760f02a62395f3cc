//! Experts on three levels: the disk, the host's memory, the GPU's (HybriMoE §IV-D for the two upper ones).
//!
//! Two inclusive caches: experts on the GPU are in the host's memory, too. So an expert that is evicted from
//! the GPU need not be copied back, and an idle CPU can compute experts that the GPU holds, as §IV-B
//! requires. The cost is the GPU's share of the host's memory, which is larger. An expert that is evicted
//! from the host is evicted from the GPU.
//!
//! The host's cache sees every use of an expert. The GPU's cache sees uses of experts that it held or that
//! were transferred for a layer. The scheduler chooses the transfers; experts that the CPU computes are not
//! transferred automatically.

use moec_runtime::offload::cache::{Cache, CacheError, Event, ExpertIndex, Key, Setting};

/// Level of the nearest copy of an expert.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Level {
    /// Only on disk.
    Disk,
    /// In the host's memory.
    Host,
    /// In the GPU's memory, and in the host's.
    Gpu,
}

/// Movement of an expert's bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Moved {
    /// Read from disk into the host's memory, where it stays.
    Read(Key),
    /// Read from disk for this step only.
    Streamed(Key),
    /// Copied to the GPU, where it stays.
    Transferred(Key),
    /// Evicted from the GPU.
    LeavesGpu(Key),
    /// Evicted from the host's memory.
    LeavesHost(Key),
}

/// Caches of the host's and the GPU's memory over a disk.
pub struct Levels {
    host: Cache,
    gpu: Cache,
}

impl Levels {
    /// Creates empty memories of these sizes. `pinned` experts are never evicted from the GPU or the host's
    /// memory.
    ///
    /// # Errors
    /// As [`Cache::with_pinned`], for either memory.
    pub fn new(
        experts: &ExpertIndex,
        [host, gpu]: [u64; 2],
        [host_setting, gpu_setting]: [&Setting; 2],
        pinned: &[Key],
    ) -> Result<Self, CacheError> {
        Ok(Self {
            host: Cache::with_pinned(experts, host, host_setting, pinned)?,
            gpu: Cache::with_pinned(experts, gpu.min(host), gpu_setting, pinned)?,
        })
    }

    /// Level of an expert; [`Level::Disk`] for one that does not exist.
    pub fn level(&self, key: Key) -> Level {
        match (self.gpu.contains(key), self.host.contains(key)) {
            (true, _) => Level::Gpu,
            (_, true) => Level::Host,
            _ => Level::Disk,
        }
    }

    /// Resident bytes: host, GPU.
    pub fn used(&self) -> [u64; 2] {
        [self.host.used(), self.gpu.used()]
    }

    /// One layer of one token, or of a batch: `chosen` are used, and `transferred` are those of the missing
    /// ones that were transferred to the GPU. `ranked` is as in [`Cache::step`]. Reports movements in a
    /// feasible order: evictions before loads, and a read before its transfer.
    ///
    /// # Errors
    /// [`CacheError::NoExpert`].
    pub fn step(
        &mut self,
        layer: usize,
        chosen: &[u16],
        transferred: &[u16],
        ranked: &[(u16, f32)],
        mut on: impl FnMut(Moved),
    ) -> Result<(), CacheError> {
        let key = |expert: u16| Key { layer: layer as u16, expert };
        let Self { host, gpu } = self;
        host.step(layer, chosen, ranked, |event| match event {
            Event::Hit(_) => {}
            Event::Load(key) => on(Moved::Read(key)),
            Event::Stream(key) => on(Moved::Streamed(key)),
            Event::Evict(key) => leave(gpu, key, &mut on),
        })?;
        // An expert that does not stay in the host's memory cannot stay on the GPU.
        let comes = |e: &u16| gpu.contains(key(*e)) || transferred.contains(e) && host.contains(key(*e));
        let comes: Vec<u16> = chosen.iter().copied().filter(comes).collect();
        gpu.step(layer, &comes, ranked, |event| match event {
            Event::Load(key) => on(Moved::Transferred(key)),
            Event::Evict(key) => on(Moved::LeavesGpu(key)),
            Event::Hit(_) | Event::Stream(_) => {}
        })
    }

    /// Transfers an expert to the GPU that may be needed soon, from disk if necessary. Returns whether the
    /// GPU then holds it.
    ///
    /// # Errors
    /// [`CacheError::NoExpert`].
    pub fn ahead(&mut self, key: Key, mut on: impl FnMut(Moved)) -> Result<bool, CacheError> {
        let Self { host, gpu } = self;
        host.ahead(key, |event| match event {
            Event::Load(key) => on(Moved::Read(key)),
            Event::Evict(key) => leave(gpu, key, &mut on),
            Event::Hit(_) | Event::Stream(_) => {}
        })?;
        if host.contains(key) {
            gpu.ahead(key, |event| match event {
                Event::Load(key) => on(Moved::Transferred(key)),
                Event::Evict(key) => on(Moved::LeavesGpu(key)),
                Event::Hit(_) | Event::Stream(_) => {}
            })?;
        }
        Ok(gpu.contains(key))
    }
}

/// Reports that an expert is evicted from the GPU, and then from the host's memory.
fn leave(gpu: &mut Cache, key: Key, on: &mut impl FnMut(Moved)) {
    if gpu.release(key).unwrap_or(false) {
        on(Moved::LeavesGpu(key));
    }
    on(Moved::LeavesHost(key));
}
