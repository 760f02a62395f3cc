//! Settings of a scheduler.

use crate::schedule::costs::{Costs, Table};
use crate::schedule::error::ScheduleError;
use crate::schedule::policy::System;

/// Maximum number of experts of a layer.
pub const MOST_EXPERTS: usize = 1 << 10;
/// Maximum number of memories.
pub const MOST_MEMORIES: usize = 1 << 8;
/// Maximum number of layers.
pub const MOST_LAYERS: usize = 1 << 12;

/// Time of the links that attention and dense layers leave for migration, in microseconds (TriMoE, §4.3).
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Window {
    /// Time of PCIe.
    pub pcie_us: f64,
    /// Time of every link between memories.
    pub link_us: f64,
}

/// Windows of a plan's entry points, by the rows of a step.
#[derive(Clone, Debug, PartialEq)]
pub struct Windows {
    /// Time of attention and dense layers between the experts of two layers of a prompt.
    pub prompt: Table,
    /// The same in decoding.
    pub decode: Table,
    /// Part of it for which values of the step use PCIe; `None`: they do not cross it.
    pub traffic: Option<Table>,
}

impl Windows {
    /// Window of a step with some rows.
    pub fn of(&self, rows: usize, prompt: bool) -> Window {
        let link_us = if prompt { &self.prompt } else { &self.decode }.at(rows as f64);
        let traffic = self.traffic.as_ref().map_or(0.0, |t| t.at(rows as f64));
        Window { pcie_us: (link_us - traffic).max(0.0), link_us }
    }
}

/// Settings of a scheduler.
#[derive(Clone, Debug, PartialEq)]
pub struct Setup {
    /// System whose policies decide.
    pub system: System,
    /// Costs of experts.
    pub costs: Costs,
    /// Layers with routed experts.
    pub layers: usize,
    /// Routed experts of each layer.
    pub experts: usize,
    /// Memories of the host, each with an NDP unit if the costs include one.
    pub memories: usize,
    /// Frames of the GPU's memory for the experts of each layer.
    pub frames: usize,
    /// Window of a step of one layer.
    pub window: Window,
}

impl Setup {
    /// Fails if no scheduler can be made of it.
    ///
    /// # Errors
    /// [`ScheduleError::TooMany`] for more than can be numbered, [`ScheduleError::Time`] for an invalid time,
    /// [`ScheduleError::NoUnit`] if the policy requires a unit without costs.
    pub fn check(&self) -> Result<(), ScheduleError> {
        let limits = [
            ("experts of a layer", self.experts, MOST_EXPERTS),
            ("memories", self.memories, MOST_MEMORIES),
            ("layers", self.layers, MOST_LAYERS),
        ];
        for (what, found, limit) in limits {
            if found > limit {
                return Err(ScheduleError::TooMany { what, found, limit });
            }
        }
        self.costs.check(false)?;
        let System { name, decode, units, .. } = self.system;
        if !decode.has_sums() {
            return Err(ScheduleError::Solver(decode.name()));
        }
        // If the CPU may compute, it can replace the others.
        if !units.cpu && self.costs.gpu.is_none() {
            return Err(ScheduleError::NoUnit { policy: name.to_owned(), unit: "GPU" });
        }
        Ok(())
    }
}
