//! The simulated machine: its resources and their rates.

use super::error::StepsError;
use super::rates::Rates;

/// Channels or DIMMs, at most.
const MOST: usize = 1 << 10;

/// The machine. Units and what experts cost on them are the scheduler's
/// [`moec_runtime::schedule::scheduled::Setup`].
#[derive(Clone, Debug, PartialEq)]
pub struct System {
    /// Channels of the host's memory.
    pub channels: usize,
    /// DIMMs that hold striped experts. Those with NDP units are the first of them; where a setup has
    /// more, there are as many.
    pub all_dimms: usize,
    /// Rates of memory.
    pub rates: Rates,
    /// PCIe, one direction, in GB/s.
    pub pcie_gbs: f64,
    /// One DIMM-Link, in GB/s.
    pub link_gbs: f64,
    /// Whether moves take time. Otherwise experts are at their new location at once; the difference is the
    /// cost of migration.
    pub moves_take_time: bool,
    /// Bytes of one expert's weights.
    pub expert_bytes: u64,
}

impl System {
    /// TriMoE's Table 1, with rates of memory as given: 8 channels of 2 DIMMs, PCIe 5.0, links of 25 GB/s.
    pub fn trimoe(rates: Rates, expert_bytes: u64) -> Self {
        let moves_take_time = true;
        Self {
            channels: 8,
            all_dimms: 16,
            rates,
            pcie_gbs: 64.0,
            link_gbs: 25.0,
            moves_take_time,
            expert_bytes,
        }
    }

    /// Checks that it describes a machine.
    ///
    /// # Errors
    /// [`StepsError::Count`], [`StepsError::Number`].
    pub fn check(&self) -> Result<(), StepsError> {
        for (what, found) in [("channels", self.channels), ("DIMMs", self.all_dimms)] {
            if found == 0 || found > MOST {
                return Err(StepsError::Count { what, found, limit: MOST });
            }
        }
        let rates = [("the rate of PCIe", self.pcie_gbs), ("the rate of a DIMM-Link", self.link_gbs)];
        match rates.into_iter().find(|r| !(r.1.is_finite() && r.1 > 0.0)) {
            Some((what, value)) => Err(StepsError::Number { what, from: "above 0", value }),
            None => self.rates.check(),
        }
    }
}
