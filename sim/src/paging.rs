//! A run that computes nothing and reads nothing: recorded routing on modelled units, under virtual time.
//!
//! The desk, the decider, the cache and its policy, and the scheduler of flash are those of a run; modelled are the device
//! after the scheduler ([`crate::flash::Modelled`]) and the computing units ([`Units`]). A run under virtual time takes the same
//! turns ([`moec_runtime::offload::paging::Paging::units`]), so that both decide the same.

use moec_ir::plan;
use moec_runtime::offload::cache::Key;
use moec_runtime::offload::flash::{
    self, BLOCK, Buffers, Class, Extent, ExtentTable, FileEntry, Flash, Options, Priority,
};
use moec_runtime::offload::paging::decider::{Asked, Counts, Decider, Decision, How, News, Seen};
use moec_runtime::offload::paging::desk::{Desk, Watch};
use moec_runtime::offload::paging::journal::{Ask, Journal};
use moec_runtime::offload::paging::units::{Units, rows_each};
use moec_runtime::platform::memory::Addr;
use moec_runtime::{Error, Result};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

/// Scene to simulate.
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
    /// Journal that events and decisions are written to.
    pub journal: Option<&'static Journal>,
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
    let flash = Flash::on_caller(table, buffers, &options, &|bytes| units.device(bytes), None)?;
    let clock = Arc::clone(flash.clock());
    let mut desk = Desk::new(decider, count as usize, journal);
    let mut watch = Reads(on);
    let mut run = SimulatedRun::default();
    desk.news(&flash, News::Began, &mut watch)?;
    for ask in asks {
        let begin = clock.now();
        flash.pass(units.between(ask.layer, ask.rows));
        (watch.0)(Did::Between { layer: ask.layer }, begin, clock.now());
        desk.take_news(&flash, &mut watch)?;
        desk.ask(&flash, Asked { ..ask.asked(run.stalled, Seen::default()) }, &mut watch)?;
        let rows = rows_each(ask.rows, ask.k, ask.active.len());
        for part in 0..2 {
            for at in 0..desk.decider.order().len() {
                let turn = desk.decider.order()[at];
                let key = desk.decider.keys()[turn.id];
                let begin = clock.now();
                while !desk.decider.is_ready(turn.id, part) {
                    if !flash.news(None) {
                        return Err(Error::plan(format!(
                            "expert {} of layer {} is never read",
                            key.expert, key.layer
                        )));
                    }
                    desk.take_news(&flash, &mut watch)?;
                }
                let there = clock.now();
                run.stalled += there.saturating_sub(begin);
                if there > begin {
                    (watch.0)(Did::Wait(key), begin, there);
                }
                flash.pass(units.expert(ask.layer, part, rows));
                (watch.0)(Did::Expert(key), there, clock.now());
                if turn.passes && (desk.decider.split() || part == 1) {
                    desk.news(&flash, News::Computed { at, part: part as u8 }, &mut watch)?;
                }
            }
        }
    }
    run.wall = clock.now();
    (run.counts, run.flash) = (desk.decider.counts(), flash.stats());
    Ok(run)
}

/// Tells of reads.
struct Reads<'a>(&'a mut dyn FnMut(Did, Duration, Duration));

impl Watch for Reads<'_> {
    fn decided(&mut self, _: &Decision, _: Option<Addr>) {}

    fn read(&mut self, key: Key, priority: Priority, since: Duration, now: Duration) {
        (self.0)(Did::Read { key, ahead: priority == Priority::Prefetch }, since, now);
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
