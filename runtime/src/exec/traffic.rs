//! Statistics of the messages between hosts, and of the reads of other hosts from their disks.

use std::ops::AddAssign;
use std::time::Duration;

/// Messages between this host and others since the engine was opened.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct HostTraffic {
    /// Bytes that were sent.
    pub sent: u64,
    /// Bytes that were received.
    pub received: u64,
    /// Messages that were sent and answered.
    pub round_trips: u64,
    /// Time in which the CPU has waited for other units. Messages on their way while it computes take none of it.
    pub waited: Duration,
}

/// Experts that another host has read from its disk since the engine was opened.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct HostReads {
    /// Bytes that were read.
    pub bytes: u64,
    /// Reads.
    pub reads: u64,
    /// Experts that were requested and in memory, or being read.
    pub hits: u64,
    /// Experts that were requested and had to be read.
    pub misses: u64,
}

impl HostReads {
    /// Its numbers, in the order of the fields.
    pub const fn numbers(self) -> [u64; 4] {
        [self.bytes, self.reads, self.hits, self.misses]
    }

    /// The counts of such numbers.
    pub const fn of_numbers([bytes, reads, hits, misses]: [u64; 4]) -> Self {
        Self { bytes, reads, hits, misses }
    }
}

impl AddAssign for HostTraffic {
    fn add_assign(&mut self, other: Self) {
        self.sent += other.sent;
        self.received += other.received;
        self.round_trips += other.round_trips;
        self.waited += other.waited;
    }
}
