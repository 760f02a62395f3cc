//! Inputs and results of a backend that verifies its artifacts.

use crate::distance::Distance;
use crate::error::Result;
use crate::subgraph::{HotLayer, StaticSubgraph};
use crate::tools::Tools;
use moec_device::DeviceUnit;
use moec_ir::Module;
use moec_ir::eval::Evaluator;
use moec_ir::plan::{ExpertTable, Plan};
use moec_runtime::bundle::BundleReader;
use serde::Serialize;

/// Artifacts of one unit, and the reference that they are compared with.
pub struct Trial<'a, 'e> {
    /// Files of the bundle.
    pub files: &'a BundleReader,
    /// Its plan.
    pub plan: &'a Plan,
    /// The Graph.
    pub module: &'a Module,
    /// The unit.
    pub unit: &'a DeviceUnit,
    /// Groups of experts: tables of layers with indices of groups.
    pub groups: &'a [(&'a ExpertTable, usize)],
    /// Other parts.
    pub parts: &'a [StaticSubgraph],
    /// Hot neurons of layers.
    pub hot: &'a [HotLayer],
    /// The reference.
    pub evaluator: &'a mut Evaluator<'e>,
    /// Whether the reference has the bundle's own weights. If so, the rounding of their format is allowed
    /// for, since artifacts hold the checkpoint's.
    pub rounded: bool,
    /// Tools for backends.
    pub tools: Tools<'a>,
    /// Parts that could not be verified here, why, and the remedy, a line each: the backend adds to it.
    pub unverified: Vec<String>,
    /// Notified of every group and part, by its name, before it is executed.
    pub next: &'a dyn Fn(&str) -> Result<()>,
}

/// A function of an artifact.
#[derive(Clone, Debug, Serialize)]
pub struct FunctionReport {
    /// Path of the artifact in the bundle.
    pub package: String,
    /// `cap32`
    pub function: String,
    /// Experts; 0 if it is not of experts.
    pub experts: usize,
    /// Against the evaluator on the same rows.
    pub error: Distance,
    /// Largest error allowed.
    pub bound: f64,
    /// Parts that the unit would not run unchanged, and oddities.
    pub findings: Vec<String>,
    /// Whether one of them forbids it.
    pub refused: bool,
    /// Results of others than moec.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub checks: Vec<Check>,
}

/// A function, executed by another program than moec.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Check {
    /// Executor: `QNN's emulator`.
    pub by: String,
    /// Largest difference from the same weights with activations in f32, over all rows that verify the
    /// artifact. It is a share of the spread of these results, their largest less their smallest.
    pub share_of_spread: f64,
    /// The largest that passes.
    pub bound: f64,
}

impl Check {
    /// Whether the difference is a number and passes.
    pub fn passes(&self) -> bool {
        self.share_of_spread <= self.bound
    }
}
