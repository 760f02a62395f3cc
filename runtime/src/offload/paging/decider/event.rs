//! Events and decisions of a decider.

use crate::offload::cache::Key;
use crate::offload::disk::Priority;
use crate::offload::paging::ahead::DiskProgress;
use std::fmt;
use std::time::Duration;

/// Scores of routers, as the first row of a call has them.
#[derive(Clone, Copy)]
pub enum Scores<'a> {
    /// Looked up where they lie: those of the layer that requests 0, then of the layers ahead.
    There(&'a dyn Fn(usize) -> &'a [f32]),
    /// As they were recorded.
    Kept(&'a [Vec<f32>]),
}

impl<'a> Scores<'a> {
    /// Those of a layer ahead, or of the requesting one; empty where there are none.
    pub fn of(&self, ahead: usize) -> &'a [f32] {
        match self {
            Self::There(score) => score(ahead),
            Self::Kept(scores) => scores.get(ahead).map_or(&[], Vec::as_slice),
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
    /// Experts in the order of the dispatch table; what the layer does not have is passed over.
    pub active: &'a [i32],
    /// Experts of the layer that other units compute, which hold them: those in memory have been used.
    pub beside: &'a [i32],
    /// Layers whose scores there are, its own first.
    pub scored: usize,
    /// These scores.
    pub scores: Scores<'a>,
    /// Time that computing threads have waited for the disk, since the start.
    pub stalled: Duration,
    /// Progress of the disk.
    pub disk: DiskProgress,
}

/// Event: all that a decider knows.
#[derive(Clone, Copy, Debug)]
pub enum Event<'a> {
    /// A layer requests its experts.
    Requested(ExpertRequest<'a>),
    /// Anything else.
    News(News),
}

/// Changes of frames.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum News {
    /// The run begins.
    Began,
    /// A part of the expert that is read into a frame is there, and others are not yet.
    Arrived {
        /// Frame.
        frame: u32,
        /// 0: gate and up; 1: down.
        part: u8,
    },
    /// All that was to be read into a frame is there.
    Done {
        /// Frame.
        frame: u32,
    },
    /// The read into a frame has failed. The frame is not free yet.
    Failed {
        /// Frame.
        frame: u32,
    },
    /// The last read into a frame whose read failed or was given up has ended.
    Released {
        /// Frame.
        frame: u32,
    },
    /// A part of an expert that only passes through has been computed.
    Computed {
        /// Place of the expert in [`super::Decider::order`].
        at: usize,
        /// Part.
        part: u8,
    },
}

/// Decision, in the order in which it was made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Decision {
    /// An expert is to be read. [`Decision::Load`] follows when a frame is free.
    Want {
        /// Expert.
        key: Key,
        /// The first of its parts that is read.
        first: u8,
        /// Number of parts.
        parts: u8,
        /// [`Priority::Prefetch`]: it was not requested yet.
        priority: Priority,
        /// Whether it only passes through: the cache does not keep it.
        passes: bool,
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
    Hurry {
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
        /// The first part that lies in the frame.
        first: u8,
    },
    /// An expert goes.
    Evict {
        /// Expert.
        key: Key,
        /// The frame that it leaves; none if it had none yet.
        frame: Option<u32>,
        /// Whether it was still being read: the frame is free when that has ended.
        reading: bool,
    },
    /// An expert could not be read, and what has come of it may not be used.
    Lost {
        /// Frame.
        frame: u32,
        /// Expert.
        key: Key,
        /// Whether a step waits for it: the call has to end.
        requested: bool,
    },
}
