//! Requests to a disk and its events.

use super::buffer::{Buffer, Loaded};
use super::error::ReadError;

/// Most extents of one fetch.
pub const MAX_PARTS: usize = 8;

/// Priority of a fetch.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Priority {
    /// A thread waits for it.
    Demand,
    /// It may be needed soon. Read while there is no demand.
    Prefetch,
}

/// Name of a fetch.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Ticket {
    /// Index of its buffer.
    pub(super) buffer: u32,
    /// Number of the fetch since the start.
    pub(super) serial: u64,
}

impl Ticket {
    /// Index of the buffer that is filled.
    pub fn buffer(self) -> usize {
        self.buffer as usize
    }
}

/// Result of a fetch.
#[derive(Debug)]
pub enum Event {
    /// An extent has arrived, while others of its fetch have not. It is in the buffer,
    /// [`super::extent::BLOCK`]-aligned after those before it. Nothing writes to it until the buffer is
    /// submitted again.
    Arrived {
        /// Fetch.
        ticket: Ticket,
        /// Index of the extent in the table.
        extent: u32,
    },
    /// All extents have arrived. The last one has no event of its own.
    Done {
        /// Fetch.
        ticket: Ticket,
        /// Its bytes.
        loaded: Loaded,
    },
    /// An extent cannot be read. Its buffer is free once the last read into it has ended.
    Failed {
        /// Fetch.
        ticket: Ticket,
        /// The extent and the reason.
        error: ReadError,
    },
    /// It was cancelled. Its buffer is free once the last read into it has ended.
    Cancelled {
        /// Fetch.
        ticket: Ticket,
    },
    /// The last read of a fetch that failed or was cancelled has ended, and its buffer is free. Follows
    /// [`Event::Failed`] or [`Event::Cancelled`], but never for a read that does not end.
    Released {
        /// Fetch.
        ticket: Ticket,
    },
}

/// Request for a fetch.
#[derive(Debug)]
pub(super) struct Fetch {
    pub(super) ticket: Ticket,
    pub(super) first: u32,
    pub(super) count: u32,
    pub(super) priority: Priority,
    pub(super) buffer: Buffer,
}
