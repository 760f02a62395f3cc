//! Experts on three levels: the disk, the host's memory, the GPU's (HybriMoE §IV-D for the two upper ones).
//!
//! Two caches, one inside of the other: what the GPU holds is in the host's memory, too. So an expert that leaves the GPU needs no
//! way back, and an idle CPU can compute what the GPU holds, as §IV-B wants it. The price is the GPU's share of the host's
//! memory, which is the larger one. What leaves the host leaves the GPU.
//!
//! The host's cache hears of every expert that is used. The GPU's hears of those that it held or that were transferred for a layer: the
//! scheduler says which, and what the CPU computes does not come by itself.

use moec_runtime::offload::cache::{Cache, CacheError, Event, ExpertIndex, Key, Setting};

/// Level of the nearest copy of an expert.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Level {
    /// On the disk alone.
    Disk,
    /// In the host's memory.
    Host,
    /// In the GPU's memory, and in the host's.
    Gpu,
}

/// Fate of an expert's bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Moved {
    /// Read from disk into the host's memory, where it stays.
    Read(Key),
    /// Read from disk for this step alone.
    Streamed(Key),
    /// Copied to the GPU, where it stays.
    Transferred(Key),
    /// Leaves the GPU.
    LeavesGpu(Key),
    /// Leaves the host's memory.
    LeavesHost(Key),
}

/// Keeps count of three levels.
pub struct Levels {
    host: Cache,
    gpu: Cache,
}

impl Levels {
    /// Empty memories of so many bytes for these experts. `pinned` never leave the GPU, nor the host's memory.
    ///
    /// # Errors
    /// As [`Cache::with_pinned`], of either memory.
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

    /// Bytes that are resident: host, GPU.
    pub fn used(&self) -> [u64; 2] {
        [self.host.used(), self.gpu.used()]
    }

    /// One layer of one token, or of a batch: `chosen` are used, and of those that the GPU does not hold `transferred` went
    /// there. `ranked` as in [`Cache::step`]. Reports what moves, in an order in which it can: what leaves before what comes,
    /// and what is read before it is transferred.
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
        // Who does not stay in the host's memory cannot stay on the GPU.
        let comes = |e: &u16| gpu.contains(key(*e)) || transferred.contains(e) && host.contains(key(*e));
        let comes: Vec<u16> = chosen.iter().copied().filter(comes).collect();
        gpu.step(layer, &comes, ranked, |event| match event {
            Event::Load(key) => on(Moved::Transferred(key)),
            Event::Evict(key) => on(Moved::LeavesGpu(key)),
            Event::Hit(_) | Event::Stream(_) => {}
        })
    }

    /// Brings an expert to the GPU that may be wanted soon, from disk if it must be. Whether the GPU holds it then.
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

/// Leaves the host's memory, and the GPU's before.
fn leave(gpu: &mut Cache, key: Key, on: &mut impl FnMut(Moved)) {
    if gpu.release(key).unwrap_or(false) {
        on(Moved::LeavesGpu(key));
    }
    on(Moved::LeavesHost(key));
}
