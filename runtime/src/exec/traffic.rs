//! Statistics of the messages between hosts.

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

impl AddAssign for HostTraffic {
    fn add_assign(&mut self, other: Self) {
        self.sent += other.sent;
        self.received += other.received;
        self.round_trips += other.round_trips;
        self.waited += other.waited;
    }
}
