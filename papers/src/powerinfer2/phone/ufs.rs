//! UFS behind one queue of commands: its rate by size of reads, by the range that they are scattered over, by
//! the core that reads, and by the number of cores that read.

use moec_sim::neurons::RatesByBlock;

/// Kinds of cores.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cluster {
    /// The fastest.
    Big,
    /// In between.
    Mid,
    /// The slowest.
    Little,
}

/// UFS. Rates in bytes per second.
#[derive(Clone, Debug)]
pub struct Ufs {
    /// One read after the other, by size.
    pub sequential: RatesByBlock,
    /// Scattered over a small range, by size; read by a mid core.
    pub random: RatesByBlock,
    /// Ranges in bytes, and the part of that rate which is left there: the first and the last point of a line
    /// over the logarithm of the range. Past the ends it stays.
    pub ranges: [(f64, f64); 2],
    /// Rates over that of a mid core: requested by a big one, by a little one.
    pub cores: [f64; 2],
    /// Part of the rate that is left where several cores read at once.
    pub contended: f64,
}

impl Ufs {
    /// The rate of a core over that of a mid one.
    fn core(&self, core: Cluster) -> f64 {
        match core {
            Cluster::Big => self.cores[0],
            Cluster::Mid => 1.0,
            Cluster::Little => self.cores[1],
        }
    }

    /// Part of the rate that is left where reads are scattered over `range` bytes.
    pub fn scattered(&self, range: f64) -> f64 {
        let [(near, high), (far, low)] = self.ranges;
        let part = ((range / near).ln() / (far / near).ln()).clamp(0.0, 1.0);
        high + (low - high) * part
    }

    /// Seconds of a scattered read among many.
    pub fn random_seconds(&self, bytes: u64, range: f64, core: Cluster) -> f64 {
        self.random.seconds(bytes) / (self.scattered(range) * self.core(core))
    }

    /// Seconds for so many bytes, one read after the other.
    pub fn sequential_seconds(&self, bytes: f64, block: u64) -> f64 {
        bytes / self.sequential.rate(block)
    }
}
