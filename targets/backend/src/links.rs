//! Connections between processes that a launcher started: work that they divide, and its measurement.

use moec_runtime::Result;
use std::fmt::Debug;

/// Processes of several hosts, which run the same subcommand at the same time.
pub trait Links: Debug {
    /// Index of this process.
    fn rank(&self) -> usize;

    /// Number of processes.
    fn hosts(&self) -> usize;

    /// Whether this process is the first: it writes and prints.
    fn is_first(&self) -> bool {
        self.rank() == 0
    }

    /// Does the work of another process than the first, with signs of it for [`Links::receive`].
    fn work(&self, work: &mut dyn FnMut());

    /// Sends a message of any length to the first process, which may take it much later.
    ///
    /// # Errors
    /// A process that cannot be reached.
    fn send(&self, message: &[u8]) -> Result<()>;

    /// The next message of another process, for the first. Waits as long as that process gives signs.
    ///
    /// # Errors
    /// A process that cannot be reached, or has given no sign for too long.
    fn receive(&self, from: usize) -> Result<Vec<u8>>;

    /// The message of the first process, at every process; those of the others are ignored.
    ///
    /// # Errors
    /// A process that cannot be reached.
    fn broadcast(&self, message: &[u8]) -> Result<Vec<u8>>;

    /// Lets all processes end together; the last use of the connections.
    ///
    /// # Errors
    /// A process that cannot be reached, or does not answer.
    fn leave(&self) -> Result<()>;

    /// Ends all processes with an error of this one, which is named.
    fn end_job(&self, why: &str, hint: Option<String>) -> !;

    /// Lets every other process say something to the first, which measures its connection with each; the last use of
    /// the connections. `says` is what this process says. Gives what the first learned, by host; the others get
    /// nothing.
    ///
    /// # Errors
    /// A process that cannot be reached, or does not answer.
    fn meet(&self, says: &str) -> Result<Vec<Peer>>;
}

/// Facts that the first process has learned of another.
#[derive(Clone, Debug, PartialEq)]
pub struct Peer {
    /// Its own description.
    pub says: String,
    /// Messages with small answers, by size.
    pub to: Vec<Trip>,
    /// Small messages with answers, by their size.
    pub from: Vec<Trip>,
}

/// A message and its answer, of which one has this size and the other is small.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Trip {
    /// Bytes.
    pub bytes: u64,
    /// The least microseconds of many.
    pub us: f64,
}

impl Trip {
    /// 10⁹ bytes per second of trips by ascending size: what the largest takes longer than the smallest.
    pub fn gb_per_s(trips: &[Self]) -> Option<f64> {
        let (first, last) = trips.first().zip(trips.last())?;
        let us = last.us - first.us;
        (us > 0.0).then(|| (last.bytes - first.bytes) as f64 / (us * 1e3))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rate_is_without_the_latency() {
        let trips = [Trip { bytes: 64, us: 10.0 }, Trip { bytes: 1_000_064, us: 210.0 }];
        assert_eq!(Trip::gb_per_s(&trips), Some(5.0));
        assert_eq!(Trip::gb_per_s(&trips[..1]), None);
    }
}
