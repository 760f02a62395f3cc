//! The systems, as rows of one simulator.

use moec_runtime::schedule::{self, GpuResidents, Prediction};
use moec_sim::systems;

/// A system: a row of the table of systems.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct System {
    /// Name.
    pub name: &'static str,
    /// System: the division of a layer's experts, and the experts that stay on the GPU, in room for those of
    /// one token. Also whether a gate one layer before predicts the transferred experts.
    pub row: schedule::System,
    /// Whether fewer experts are tried first.
    pub little: bool,
}

const fn of(row: schedule::System) -> System {
    System { name: row.name, row, little: false }
}

/// All experts, fetched when their layer's router has spoken.
pub const FULL: System = of(systems::OFFLOADING);
/// Pre-gated MoE: a layer's experts are known one layer before.
pub const PRE_GATED: System = of(systems::PRE_GATED);
/// AdapMoE: the same, and LRU.
pub const ADAPMOE: System = of(systems::ADAPMOE);
/// MoBiLE.
pub const MOBILE: System = System { name: "MoBiLE", little: true, ..FULL };
/// MoBiLE with the gates of Pre-gated MoE.
pub const MOBILE_GATES: System = System { name: "MoBiLE with gates", little: true, ..PRE_GATED };
/// moec's schedule and cache, with all experts: the CPU computes, too.
pub const MOEC_FULL: System = System {
    name: "moec, all experts",
    row: schedule::System { prediction: Prediction::Nothing, ..systems::MOEC },
    little: false,
};
/// The same, with fewer experts first.
pub const MOEC: System = System { name: "moec, big-little", little: true, ..MOEC_FULL };

impl System {
    /// Cache policy that keeps experts on the GPU from token to token; `None`: nothing.
    pub fn cache(&self) -> Option<&'static str> {
        if let GpuResidents::Cache(setting) = self.row.gpu_residents { Some(setting) } else { None }
    }
}

/// All that are compared; the first is the baseline.
pub const SYSTEMS: [System; 7] = [FULL, PRE_GATED, ADAPMOE, MOBILE, MOBILE_GATES, MOEC_FULL, MOEC];

/// Index in [`SYSTEMS`].
pub fn at(system: &System) -> usize {
    SYSTEMS.iter().position(|s| s.name == system.name).unwrap_or(0)
}
