//! Simulation of a run without computation and reads: recorded routing on modelled units, under virtual time.
//!
//! The I/O executor, the decider, the cache and its policy, and the scheduler of the disk are those of a run;
//! the models are the device after the scheduler ([`crate::disk::Modelled`]) and the unit that computes
//! ([`Units`]). A run of one thread under virtual time ([`Observed`]) takes the same turns, so that both
//! decide the same.

mod journal;
mod observed;

use crate::disk::{Link, VirtualDisk};
use moec_ir::plan;
use moec_runtime::offload::cache::Key;
use moec_runtime::offload::disk::{
    self, BLOCK, Buffers, Class, Disk, Extent, ExtentTable, FileEntry, Options, Priority,
};
use moec_runtime::offload::paging::decider::{
    Counts, Decider, DeciderOptions, Decision, DiskProgress, Event, ExpertRequest, FrameEvent,
};
use moec_runtime::offload::paging::io_executor::{IoExecutor, Watch};
use moec_runtime::platform::memory::Addr;
use moec_runtime::{Error, Result};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

pub use journal::{Journal, JournalEvent, Line, RecordedRequest};
pub use observed::Observed;

/// Modelled units: a disk that experts come from, and one that computes, whose threads work together as one.
pub trait Units: Sync + std::fmt::Debug {
    /// Link to the disk.
    fn link(&self) -> Link;

    /// Time from the last expert of the layer before to the moment when a layer requests its own, in a call
    /// of so many rows. For the first layer: from the last expert of the call before.
    fn between(&self, layer: usize, rows: usize) -> Duration;

    /// Time to compute a part (0: gate and up; 1: down) of an expert of a layer for this many rows, which may
    /// be a mean.
    fn expert(&self, layer: usize, part: usize, rows: f64) -> Duration;
}

/// Rows that each of the active experts of a call has on average.
fn rows_each(rows: usize, k: usize, active: usize) -> f64 {
    (rows * k) as f64 / active.max(1) as f64
}

/// Input of a simulation.
#[derive(Clone, Copy, Debug)]
pub struct Scene<'a> {
    /// Experts, frames and policy of the plan.
    pub paging: &'a plan::Paging,
    /// Experts that another memory holds permanently.
    pub elsewhere: &'a [(u32, u32)],
    /// Bytes of the two matrices of an expert, by layer.
    pub matrices: &'a [[u64; 2]],
    /// Layers ahead whose experts are read before they are requested.
    pub ahead: usize,
    /// Whether the cache begins with the experts that recorded routing used most.
    pub preload: bool,
    /// Journal of events and decisions.
    pub journal: Option<&'a Journal>,
}

/// Work of a unit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum UnitWork {
    /// Computed the work between the experts of two layers.
    Between {
        /// The layer whose request follows.
        layer: usize,
    },
    /// Waited for a part of an expert.
    Wait(Key),
    /// Computed a part of an expert.
    Expert(Key),
    /// Read an expert, or a part of it, over the link.
    Read {
        /// Expert.
        key: Key,
        /// Whether it was requested before it was needed.
        ahead: bool,
    },
}

/// Result of a simulation.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct SimulatedRun {
    /// Counters of decisions.
    pub counts: Counts,
    /// Statistics of the disk.
    pub disk: disk::Stats,
    /// Time until the last expert was computed.
    pub wall: Duration,
    /// Time without computation because an expert was missing.
    pub stalled: Duration,
}

/// Runs recorded routing on modelled units. Reports their work with start and end, ordered by end.
///
/// # Errors
/// [`Error::Bundle`] for a plan without experts or with an unknown policy; refused memory for the frames (it
/// is never accessed).
pub fn simulate<'a>(
    scene: Scene<'_>,
    units: &dyn Units,
    requests: impl IntoIterator<Item = &'a RecordedRequest>,
    on: &mut dyn FnMut(UnitWork, Duration, Duration),
) -> Result<SimulatedRun> {
    let Scene { paging, elsewhere, matrices, ahead, preload, journal } = scene;
    let bytes: Vec<u64> = matrices.iter().map(|&m| expert_bytes(m)).collect();
    let decider = Decider::new(paging, DeciderOptions { bytes: &bytes, elsewhere, ahead, preload })?;
    let count = paging.frames.saturating_add(paging.staging);
    let buffers = Buffers::new(&[Class { bytes: paging.frame_bytes, count }])?;
    let options = Options { block_bytes: paging.block_bytes, ..Options::default() };
    let table = Arc::new(table(paging, matrices)?);
    let disk = VirtualDisk::new(table, buffers, &options, units.link(), false)?;
    let mut executor = IoExecutor::new(decider, count as usize);
    let mut watch = Reads { on, journal };
    let mut run = SimulatedRun::default();
    executor.publish_frame_event(&disk, FrameEvent::Began, &mut watch)?;
    for request in requests {
        let begin = disk.now();
        disk.pass(units.between(request.layer, request.rows));
        (watch.on)(UnitWork::Between { layer: request.layer }, begin, disk.now());
        executor.handle_disk_events(&disk, &mut watch)?;
        executor.request(
            &disk,
            ExpertRequest { ..request.at(run.stalled, DiskProgress::default()) },
            &mut watch,
        )?;
        let rows = rows_each(request.rows, request.k, request.active.len());
        for part in 0..2 {
            for at in 0..executor.decider.order().len() {
                let expert = executor.decider.order()[at];
                let key = executor.decider.keys()[expert.id];
                let begin = disk.now();
                while !executor.decider.is_ready(expert.id, part) {
                    if !disk.wait_for_event(None) {
                        return Err(Error::plan(format!(
                            "expert {} of layer {} is never read",
                            key.expert, key.layer
                        )));
                    }
                    executor.handle_disk_events(&disk, &mut watch)?;
                }
                let there = disk.now();
                run.stalled += there.saturating_sub(begin);
                if there > begin {
                    (watch.on)(UnitWork::Wait(key), begin, there);
                }
                disk.pass(units.expert(request.layer, part, rows));
                (watch.on)(UnitWork::Expert(key), there, disk.now());
                if expert.bypasses && (executor.decider.split() || part == 1) {
                    executor.publish_frame_event(
                        &disk,
                        FrameEvent::Computed { at, part: part as u8 },
                        &mut watch,
                    )?;
                }
            }
        }
    }
    run.wall = disk.now();
    (run.counts, run.disk) = (executor.decider.counts(), disk.stats());
    Ok(run)
}

/// Reports of reads, and writes down the rest.
struct Reads<'a> {
    on: &'a mut dyn FnMut(UnitWork, Duration, Duration),
    journal: Option<&'a Journal>,
}

impl Watch for Reads<'_> {
    fn handled(&mut self, now: Duration, event: &Event<'_>) {
        if let Some(journal) = self.journal {
            journal.handled(now, event);
        }
    }

    fn decided(&mut self, decision: &Decision, _: Option<Addr>) {
        if let Some(journal) = self.journal {
            journal.decided(decision);
        }
    }

    fn read(&mut self, key: Key, priority: Priority, since: Duration, now: Duration) {
        (self.on)(UnitWork::Read { key, ahead: priority == Priority::Prefetch }, since, now);
    }
}

/// Bytes of an expert in its file: the down matrix begins at a multiple of [`BLOCK`].
fn expert_bytes([first, second]: [u64; 2]) -> u64 {
    first.next_multiple_of(BLOCK).saturating_add(second)
}

/// Extents as in a bundle, of a file that does not exist.
fn table(paging: &plan::Paging, matrices: &[[u64; 2]]) -> Result<ExtentTable> {
    let (mut at, mut extents) = (0_u64, Vec::new());
    for (layer, sizes) in paging.layers.iter().zip(matrices) {
        for _ in 0..layer.experts {
            for bytes in *sizes {
                extents.push(Extent { file: 0, offset: at, bytes, crc32c: None });
                at = at.saturating_add(bytes).next_multiple_of(BLOCK);
            }
        }
    }
    ExtentTable::new(
        vec![FileEntry { path: PathBuf::new(), bytes: at, cached: false, identity: None }],
        extents,
    )
}
