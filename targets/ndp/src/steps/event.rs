//! Events of a timeline.

use std::fmt;

/// Track of a timeline that an event is on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Track {
    /// The GPU's calculation.
    Gpu,
    /// The CPU's calculation.
    Cpu,
    /// PCIe to the GPU.
    Pcie,
    /// PCIe from the GPU.
    PcieBack,
    /// The NDP unit of a DIMM.
    Ndp(u16),
    /// The DIMM-Link of a DIMM.
    Link(u16),
}

impl fmt::Display for Track {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Gpu => f.write_str("GPU"),
            Self::Cpu => f.write_str("CPU"),
            Self::Pcie => f.write_str("PCIe to GPU"),
            Self::PcieBack => f.write_str("PCIe from GPU"),
            Self::Ndp(dimm) => write!(f, "DIMM {dimm}"),
            Self::Link(dimm) => write!(f, "DIMM-Link {dimm}"),
        }
    }
}

/// Something that took time.
#[derive(Clone, Debug, PartialEq)]
pub struct Event {
    /// Track.
    pub track: Track,
    /// Description, in words: `layer 3, expert 17, 12 tokens`.
    pub name: String,
    /// Its begin in virtual time, in microseconds.
    pub begin_us: f64,
    /// Its end, in microseconds.
    pub end_us: f64,
}
