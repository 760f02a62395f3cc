//! Requests to the cache and its answers.

/// Part of a neuron.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Part {
    /// Gate: determines whether the neuron is active.
    Gate,
    /// Up and down: the other parts that an active neuron needs.
    UpDown,
    /// Both.
    Whole,
}

pub(super) const GATE: u8 = 1;
pub(super) const UP_DOWN: u8 = 2;

impl Part {
    pub(super) fn mask(self) -> u8 {
        match self {
            Self::Gate => GATE,
            Self::UpDown => UP_DOWN,
            Self::Whole => GATE | UP_DOWN,
        }
    }
}

/// Location of a requested neuron or cluster.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CacheLookup {
    /// In the hot region.
    Hot,
    /// In the cold region.
    Cold,
    /// This many bytes are read, and stay.
    Load(u64),
    /// This many bytes are read for this step only: there is no room beside what this step has used.
    Stream(u64),
}

impl CacheLookup {
    /// Bytes that are read.
    pub fn read(self) -> u64 {
        match self {
            Self::Hot | Self::Cold => 0,
            Self::Load(bytes) | Self::Stream(bytes) => bytes,
        }
    }
}

/// Effect of a request on other neurons.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Event {
    /// A neuron leaves the cold region and is forgotten.
    Evict(u32),
    /// A cluster leaves the hot region and is forgotten.
    Drop(u32),
    /// A neuron moves to the hot region with its loaded parts; its cluster is being loaded.
    Promote(u32),
}

/// Counts of requests, for neurons or for clusters.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Requests.
    pub requests: u64,
    /// Found in the hot region.
    pub hot: u64,
    /// Found in the cold region.
    pub cold: u64,
    /// Read and kept.
    pub loads: u64,
    /// Read for one step only.
    pub streams: u64,
    /// Bytes read.
    pub read: u64,
    /// Evicted to make room, or because the region shrank.
    pub evicted: u64,
}

impl Counts {
    pub(super) fn count(&mut self, found: CacheLookup) -> CacheLookup {
        self.requests += 1;
        self.read += found.read();
        match found {
            CacheLookup::Hot => self.hot += 1,
            CacheLookup::Cold => self.cold += 1,
            CacheLookup::Load(_) => self.loads += 1,
            CacheLookup::Stream(_) => self.streams += 1,
        }
        found
    }
}
