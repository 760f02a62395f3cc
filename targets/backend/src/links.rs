//! Measurement of the connections between processes that a launcher started.

use moec_runtime::Result;

/// Processes of other hosts, which all do the same at the same time.
pub trait Links {
    /// Whether this process is the first: it measures, and the others answer.
    fn is_first(&self) -> bool;

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
    /// Microseconds that a tenth of many do not exceed.
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
