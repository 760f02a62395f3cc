//! What a scheduler is made of.

use super::costs::Costs;
use super::error::MakespanError;
use super::policy::Policy;

/// Experts of a layer, at most.
pub const MOST_EXPERTS: usize = 1 << 10;
/// DIMMs, at most.
pub const MOST_DIMMS: usize = 1 << 8;
/// Layers, at most.
pub const MOST_LAYERS: usize = 1 << 12;

/// How long attention and dense layers leave the links to migration, in microseconds (TriMoE, §4.3).
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Window {
    /// On PCIe.
    pub pcie_us: f64,
    /// On every DIMM-Link.
    pub link_us: f64,
}

/// What a scheduler is made of.
#[derive(Clone, Debug, PartialEq)]
pub struct Setup {
    /// Who decides.
    pub policy: Policy,
    /// What experts cost.
    pub costs: Costs,
    /// Layers with routed experts.
    pub layers: usize,
    /// Routed experts of each.
    pub experts: usize,
    /// DIMMs, each with a near-data unit where the costs have one.
    pub dimms: usize,
    /// Frames of the GPU's memory for the experts of each layer.
    pub frames: usize,
    /// Window of a step of one layer.
    pub window: Window,
}

impl Setup {
    /// Whether a scheduler can be made of it.
    ///
    /// # Errors
    /// [`MakespanError::TooMany`] for more than can be numbered, [`MakespanError::Time`] for a rate that is none,
    /// [`MakespanError::NoUnit`] where the policy cannot do without a unit that has no costs.
    pub fn check(&self) -> Result<(), MakespanError> {
        let limits = [
            ("experts of a layer", self.experts, MOST_EXPERTS),
            ("DIMMs", self.dimms, MOST_DIMMS),
            ("layers", self.layers, MOST_LAYERS),
        ];
        for (what, found, limit) in limits {
            if found > limit {
                return Err(MakespanError::TooMany { what, found, limit });
            }
        }
        self.costs.check()?;
        let units = self.policy.rules().units;
        // Where the processor may compute, it can stand in for the others.
        if !units.cpu && self.costs.gpu.is_none() {
            return Err(MakespanError::NoUnit { policy: self.policy.to_string(), unit: "GPU" });
        }
        Ok(())
    }
}
