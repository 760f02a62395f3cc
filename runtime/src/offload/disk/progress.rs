//! Progress of fetches and their blocks.

use super::buffer::Buffer;
use super::event::{MAX_PARTS, Priority, Ticket};
use super::extent::{Extent, ExtentTable};
use std::time::Duration;

/// Progress of one extent.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct ExtentProgress {
    /// Bytes that were cut into blocks.
    pub(super) scheduled: u64,
    /// Bytes that have not arrived.
    pub(super) left: u64,
    /// Length of the checked prefix in bytes, and its checksum, if all extents are checked.
    pub(super) summed: u64,
    pub(super) crc32c: u32,
    /// Number of times that it was read as a whole.
    pub(super) readings: u32,
    /// Whether a read of it has failed.
    pub(super) read_failed: bool,
}

#[derive(Debug)]
pub(super) struct Active {
    pub(super) ticket: Ticket,
    pub(super) first: u32,
    pub(super) count: u32,
    pub(super) priority: Priority,
    pub(super) buffer: Buffer,
    /// Reads and retries that hold the buffer.
    pub(super) in_flight: u32,
    /// Whether it has failed or was cancelled, and only waits for its reads in flight.
    pub(super) over: bool,
    pub(super) parts: [ExtentProgress; MAX_PARTS],
}

/// A block that is read or will be read again.
#[derive(Clone, Copy, Debug)]
pub(super) struct Block {
    pub(super) ticket: Ticket,
    pub(super) part: u32,
    /// Offset in the extent.
    pub(super) at: u64,
    /// Bytes to read, and how many of them have arrived: a multiple of [`BLOCK`] while some are missing.
    pub(super) bytes: u32,
    pub(super) got: u32,
    pub(super) failures: u32,
    pub(super) interruptions: u32,
    pub(super) since: Duration,
    pub(super) overdue: bool,
}

impl Active {
    /// Whether there may be more blocks to cut.
    pub(super) fn unfinished(&self) -> bool {
        !self.over && self.parts.iter().any(|p| p.left > 0)
    }
}

pub(super) fn extents(table: &ExtentTable, first: u32, count: u32) -> &[Extent] {
    let range = first as usize..first as usize + (count as usize).min(MAX_PARTS);
    table.extents().get(range).unwrap_or_default()
}

pub(super) fn find(active: &[Option<Active>], ticket: Ticket) -> Option<&Active> {
    active.get(ticket.buffer as usize)?.as_ref().filter(|f| f.ticket == ticket)
}

pub(super) fn find_mut(active: &mut [Option<Active>], ticket: Ticket) -> Option<&mut Active> {
    active.get_mut(ticket.buffer as usize)?.as_mut().filter(|f| f.ticket == ticket)
}
