//! Statistics of the store.

use super::Pager;
use crate::exec::graphs::LoadCounts;
use crate::offload::cache::EvictedExpertCounts;
use crate::offload::disk::Stats;
use crate::offload::paging::decider::Counts;
use std::sync::atomic::Ordering;
use std::time::Duration;

/// Statistics since the store was opened.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Report {
    /// Experts that were requested and in memory, or being read.
    pub hits: u64,
    /// Experts that were requested and had to be read.
    pub misses: u64,
    /// Of the hits: experts that were read ahead, and requested as predicted.
    pub predicted: u64,
    /// Experts that were read ahead.
    pub ahead: u64,
    /// Misses that the cache did not keep.
    pub streamed: u64,
    /// Time in which the first thread waited for the disk.
    pub stalled: Duration,
    /// Statistics of reads.
    pub disk: Stats,
    /// Name of the reader.
    pub reader: String,
    /// Policy of the cache with its parameters.
    pub policy: String,
    /// Most bytes of one read.
    pub block_bytes: u32,
    /// Bytes that the run may take.
    pub budget: u64,
    /// Neurons of a frame, if neurons are read one by one: hits and misses then count frames. 0: whole
    /// experts.
    pub neurons: u32,
    /// Whether gates stay on disk, too: hits and misses count them and the rest of a frame separately.
    pub gates_on_disk: bool,
    /// Bytes of gates that were read.
    pub gate_bytes: u64,
    /// Frames of the cache, the most of any entry point.
    pub frames: u32,
    /// Frames that the cache has now: less where graphs of a larger batch are loaded.
    pub current_frames: u32,
    /// Bytes of all frames, including those for experts that bypass the cache.
    pub frame_bytes: u64,
    /// Experts that are pinned.
    pub pinned: u32,
    /// Bytes of the pinned experts' frames.
    pub pinned_bytes: u64,
    /// Experts that the cache began with and that were in memory before they were requested: pinned ones, and
    /// those that recorded routing used most.
    pub preloaded: u64,
    /// Bytes of weights outside of experts that are locked in memory.
    pub locked: u64,
    /// Artifacts of graphs that were loaded and freed.
    pub loads: LoadCounts,
    /// Experts of tokens that were decoded again.
    pub second_pass: EvictedExpertCounts,
}

impl Pager {
    /// Bytes that were read from disk so far.
    pub(crate) fn bytes_read(&self) -> u64 {
        self.disk.stats().bytes
    }

    /// Statistics so far.
    pub(crate) fn report(&self) -> Report {
        let mut report = {
            let mut state = self.lock();
            // A reader that has failed is reported to the next step.
            let _ = self.handle_disk_events(&mut state);
            let Counts { hits, misses, predicted, ahead, streamed, preloaded, second_pass } =
                state.executor.decider.counts();
            Report {
                hits,
                misses,
                predicted,
                ahead,
                streamed,
                preloaded,
                second_pass,
                ..state.report.clone()
            }
        };
        report.disk = self.disk.stats();
        report.stalled = Duration::from_nanos(self.stalled.load(Ordering::Relaxed));
        report
    }
}
