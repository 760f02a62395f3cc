//! Events and decisions of a decider.

use crate::offload::cache::Key;
use crate::offload::disk::Priority;
use crate::offload::paging::ahead::DiskProgress;
use std::fmt;
use std::time::Duration;

/// Scores of routers, for the first row of a call.
#[derive(Clone, Copy)]
pub enum Scores<'a> {
    /// Looked up in memory: index 0 is the requesting layer, then the layers ahead.
    InMemory(&'a dyn Fn(usize) -> &'a [f32]),
    /// Recorded scores.
    Recorded(&'a [Vec<f32>]),
}

impl<'a> Scores<'a> {
    /// Scores of the layer `ahead`, or of the requesting one for 0; empty if there are none.
    pub fn of(&self, ahead: usize) -> &'a [f32] {
        match self {
            Self::InMemory(score) => score(ahead),
            Self::Recorded(scores) => scores.get(ahead).map_or(&[], Vec::as_slice),
        }
    }
}

impl fmt::Debug for Scores<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Scores").finish_non_exhaustive()
    }
}

/// A layer requests its experts.
#[derive(Clone, Copy, Debug)]
pub struct ExpertRequest<'a> {
    /// Layer, counted over those with routed experts.
    pub layer: usize,
    /// Rows of the call.
    pub rows: usize,
    /// Experts per token of the call.
    pub k: usize,
    /// Experts in the order of the dispatch table; experts that the layer does not have are skipped.
    pub active: &'a [i32],
    /// Experts of the layer that other units compute, which hold them: those in memory have been used.
    pub accelerator_experts: &'a [i32],
    /// Number of layers with scores, its own first.
    pub scored: usize,
    /// The scores.
    pub scores: Scores<'a>,
    /// Time that computing threads have waited for the disk, since the start.
    pub stalled: Duration,
    /// Progress of the disk.
    pub disk: DiskProgress,
}

/// Input of a decider: all that its decisions depend on.
#[derive(Clone, Copy, Debug)]
pub enum Event<'a> {
    /// A layer requests its experts.
    Requested(ExpertRequest<'a>),
    /// Any other event.
    Frame(FrameEvent),
}

/// Events of frames.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FrameEvent {
    /// The run begins.
    Began,
    /// A part of the expert that is read into a frame has arrived, and others have not.
    Arrived {
        /// Frame.
        frame: u32,
        /// 0: gate and up; 1: down.
        part: u8,
    },
    /// Everything that was to be read into a frame has arrived.
    Done {
        /// Frame.
        frame: u32,
    },
    /// The read into a frame has failed. The frame is not free yet.
    Failed {
        /// Frame.
        frame: u32,
    },
    /// The last read into a frame whose read failed or was cancelled has ended.
    Released {
        /// Frame.
        frame: u32,
    },
    /// A part of an expert that bypasses the cache has been computed.
    Computed {
        /// Position of the expert in [`super::Decider::order`].
        at: usize,
        /// Part.
        part: u8,
    },
}

/// Decision, in the order in which it was made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Decision {
    /// An expert is to be read. [`Decision::Load`] follows when a frame is free.
    Enqueue {
        /// Expert.
        key: Key,
        /// The first of its parts that is read.
        first: u8,
        /// Number of parts.
        parts: u8,
        /// [`Priority::Prefetch`]: it has not been requested yet.
        priority: Priority,
        /// Whether it bypasses the cache, which does not keep it.
        bypasses: bool,
    },
    /// A read begins, into a frame that is free.
    Load {
        /// Frame.
        frame: u32,
        /// Expert.
        key: Key,
        /// The first of its parts that is read.
        first: u8,
        /// Number of parts.
        parts: u8,
        /// Priority of the read.
        priority: Priority,
    },
    /// A prefetch is needed now.
    RaisePriority {
        /// Frame.
        frame: u32,
        /// Expert.
        key: Key,
    },
    /// A part of an expert may be used.
    Use {
        /// Frame.
        frame: u32,
        /// Expert.
        key: Key,
        /// Part.
        part: u8,
        /// The first part that is in the frame.
        first: u8,
    },
    /// An expert is evicted.
    Evict {
        /// Expert.
        key: Key,
        /// The frame that it leaves; `None` if it had none yet.
        frame: Option<u32>,
        /// Whether it was still being read: the frame is free when that has ended.
        reading: bool,
    },
    /// An expert could not be read, and the bytes that have arrived may not be used.
    ReadFailed {
        /// Frame.
        frame: u32,
        /// Expert.
        key: Key,
        /// Whether a step waits for it: the call then has to end.
        requested: bool,
    },
}
