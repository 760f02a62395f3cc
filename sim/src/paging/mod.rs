//! A run that computes nothing and reads nothing: recorded routing on modelled units, under virtual time.
//!
//! The desk, the decider, the cache and its policy, and the scheduler of flash are those of a run; modelled are the device
//! after the scheduler ([`crate::flash::Modelled`]) and the unit that computes ([`Units`]). A run of one lane under virtual time
//! ([`Observed`]) takes the same turns, so that both decide the same.

mod journal;
mod observed;

use crate::flash::{Link, VirtualDisk};
use moec_ir::plan;
use moec_runtime::offload::cache::Key;
use moec_runtime::offload::flash::{
    self, BLOCK, Buffers, Class, Disk, Extent, ExtentTable, FileEntry, Options, Priority,
};
use moec_runtime::offload::paging::decider::{Asked, Counts, Decider, Decision, Event, How, News, Seen};
use moec_runtime::offload::paging::desk::{Desk, Watch};
use moec_runtime::platform::memory::Addr;
use moec_runtime::{Error, Result};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

pub use journal::{Ask, Heard, Journal, Line};
pub use observed::Observed;

/// Modelled units: a disk that experts come from, and one that computes, whose lanes work together as one.
pub trait Units: Sync + std::fmt::Debug {
    /// Scheduler that the disk serves.
    fn link(&self) -> Link;

    /// Time from the last expert of the layer before to the moment when a layer asks for its own, in a call of so many rows.
    /// For the first layer: from the last expert of the call before.
    fn between(&self, layer: usize, rows: usize) -> Duration;

    /// Time to compute a part (0: gate and up; 1: down) of an expert of a layer for so many rows, which may be a mean.
    fn expert(&self, layer: usize, part: usize, rows: f64) -> Duration;
}

/// Rows that each of the active experts of a call has on average.
fn rows_each(rows: usize, k: usize, active: usize) -> f64 {
    (rows * k) as f64 / active.max(1) as f64
}

/// What is simulated.
#[derive(Clone, Copy, Debug)]
pub struct Scene<'a> {
    /// Experts, frames and policy of the plan.
    pub paging: &'a plan::Paging,
    /// Experts that another memory holds for good.
    pub elsewhere: &'a [(u32, u32)],
    /// Bytes of the two matrices of an expert, by layer.
    pub matrices: &'a [[u64; 2]],
    /// Layers ahead whose experts are read before they are asked for.
    pub ahead: usize,
    /// Whether the cache begins with what recorded routing used most.
    pub preload: bool,
    /// Where events and decisions are written down.
    pub journal: Option<&'a Journal>,
}

/// Work of a unit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Did {
    /// Computed what lies between the experts of two layers.
    Between {
        /// The layer that asks then.
        layer: usize,
    },
    /// Waited for a part of an expert.
    Wait(Key),
    /// Computed a part of an expert.
    Expert(Key),
    /// Read an expert, or a part of it: on the link.
    Read {
        /// Expert.
        key: Key,
        /// Whether it was asked for before it was needed.
        ahead: bool,
    },
}

/// Result.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct SimulatedRun {
    /// Counters of decisions.
    pub counts: Counts,
    /// Statistics of flash.
    pub flash: flash::Stats,
    /// Time until the last expert was computed.
    pub wall: Duration,
    /// Time in which no thread computed since an expert was missing.
    pub stalled: Duration,
}

/// Runs recorded routing on modelled units. Tells what they did, in the order in which it ended: from, to.
///
/// # Errors
/// [`Error::Bundle`] for a plan without experts or with a policy that is not known; memory for the frames refused (none of it is
/// touched).
pub fn simulate<'a>(
    scene: Scene<'_>,
    units: &dyn Units,
    asks: impl IntoIterator<Item = &'a Ask>,
    on: &mut dyn FnMut(Did, Duration, Duration),
) -> Result<SimulatedRun> {
    let Scene { paging, elsewhere, matrices, ahead, preload, journal } = scene;
    let bytes: Vec<u64> = matrices.iter().map(|&m| expert_bytes(m)).collect();
    let decider = Decider::new(paging, How { bytes: &bytes, elsewhere, ahead, preload })?;
    let count = paging.frames.saturating_add(paging.spare);
    let buffers = Buffers::new(&[Class { bytes: paging.frame_bytes, count }])?;
    let options = Options { block_bytes: paging.block_bytes, ..Options::default() };
    let table = Arc::new(table(paging, matrices)?);
    let flash = VirtualDisk::new(table, buffers, &options, units.link(), false)?;
    let mut desk = Desk::new(decider, count as usize);
    let mut watch = Reads { on, journal };
    let mut run = SimulatedRun::default();
    desk.news(&flash, News::Began, &mut watch)?;
    for ask in asks {
        let begin = flash.now();
        flash.pass(units.between(ask.layer, ask.rows));
        (watch.on)(Did::Between { layer: ask.layer }, begin, flash.now());
        desk.take_news(&flash, &mut watch)?;
        desk.ask(&flash, Asked { ..ask.asked(run.stalled, Seen::default()) }, &mut watch)?;
        let rows = rows_each(ask.rows, ask.k, ask.active.len());
        for part in 0..2 {
            for at in 0..desk.decider.order().len() {
                let turn = desk.decider.order()[at];
                let key = desk.decider.keys()[turn.id];
                let begin = flash.now();
                while !desk.decider.is_ready(turn.id, part) {
                    if !flash.news(None) {
                        return Err(Error::plan(format!(
                            "expert {} of layer {} is never read",
                            key.expert, key.layer
                        )));
                    }
                    desk.take_news(&flash, &mut watch)?;
                }
                let there = flash.now();
                run.stalled += there.saturating_sub(begin);
                if there > begin {
                    (watch.on)(Did::Wait(key), begin, there);
                }
                flash.pass(units.expert(ask.layer, part, rows));
                (watch.on)(Did::Expert(key), there, flash.now());
                if turn.passes && (desk.decider.split() || part == 1) {
                    desk.news(&flash, News::Computed { at, part: part as u8 }, &mut watch)?;
                }
            }
        }
    }
    run.wall = flash.now();
    (run.counts, run.flash) = (desk.decider.counts(), flash.stats());
    Ok(run)
}

/// Tells of reads, and writes down the rest.
struct Reads<'a> {
    on: &'a mut dyn FnMut(Did, Duration, Duration),
    journal: Option<&'a Journal>,
}

impl Watch for Reads<'_> {
    fn heard(&mut self, now: Duration, event: &Event<'_>) {
        if let Some(journal) = self.journal {
            journal.heard(now, event);
        }
    }

    fn decided(&mut self, decision: &Decision, _: Option<Addr>) {
        if let Some(journal) = self.journal {
            journal.decided(decision);
        }
    }

    fn read(&mut self, key: Key, priority: Priority, since: Duration, now: Duration) {
        (self.on)(Did::Read { key, ahead: priority == Priority::Prefetch }, since, now);
    }
}

/// Bytes of an expert as it lies in its file: the down matrix begins at a multiple of [`BLOCK`].
fn expert_bytes([first, second]: [u64; 2]) -> u64 {
    first.next_multiple_of(BLOCK).saturating_add(second)
}

/// Extents as a bundle has them, of a file that there is not.
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
