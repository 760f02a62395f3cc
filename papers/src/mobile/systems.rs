//! The systems, as rows of one simulator.

use crate::hybrimoe::systems::{LRU, MRS_BYPASS};
use moec_runtime::schedule::hybrid::Policy;

/// A system.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct System {
    /// Name.
    pub name: &'static str,
    /// Who divides the experts of a layer.
    pub policy: Policy,
    /// What stays on the GPU from token to token, in room for as many experts as a token uses; `None`: nothing.
    pub keeps: Option<&'static str>,
    /// Whether a gate one layer before says which experts are transferred.
    pub gates: bool,
    /// Whether fewer experts are tried first.
    pub little: bool,
}

/// All experts, fetched when their layer's router has spoken.
pub const FULL: System =
    System { name: "offloading", policy: Policy::Gpu, keeps: None, gates: false, little: false };
/// Pre-gated MoE: a layer's experts are known one layer before.
pub const PRE_GATED: System = System { name: "Pre-gated MoE", gates: true, ..FULL };
/// AdapMoE: the same, and LRU.
pub const ADAPMOE: System = System { name: "AdapMoE", keeps: Some(LRU), ..PRE_GATED };
/// MoBiLE.
pub const MOBILE: System = System { name: "MoBiLE", little: true, ..FULL };
/// MoBiLE with the gates of Pre-gated MoE.
pub const MOBILE_GATES: System = System { name: "MoBiLE with gates", gates: true, ..MOBILE };
/// moec's schedule and cache, with all experts: the processor computes, too.
pub const MOEC_FULL: System =
    System { name: "moec, all experts", policy: Policy::Cut, keeps: Some(MRS_BYPASS), ..FULL };
/// The same, with fewer experts first.
pub const MOEC: System = System { name: "moec, big-little", little: true, ..MOEC_FULL };

/// All that are compared; the first is the baseline.
pub const SYSTEMS: [System; 7] = [FULL, PRE_GATED, ADAPMOE, MOBILE, MOBILE_GATES, MOEC_FULL, MOEC];

/// Where in [`SYSTEMS`] one is.
pub fn at(system: &System) -> usize {
    SYSTEMS.iter().position(|s| s.name == system.name).unwrap_or(0)
}
