//! Static graphs that an accelerator executes: a Neural Engine, or its emulation.

use crate::bundle::BundleReader;
use crate::error::Result;
use crate::exec::operations::OperationReport;
pub use half::f16;
use moec_ir::plan::{ArtifactBytes, GraphDecl};

/// Counts of artifacts that were loaded and freed, where memory has a budget. Bytes are those of the plan.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LoadCounts {
    /// Artifacts that were read before a step needed them.
    pub ahead: u64,
    /// Artifacts that a step waited for, from the beginning of the read.
    pub waited: u64,
    /// Artifacts that were freed.
    pub freed: u64,
    /// Bytes of all that were read.
    pub bytes: u64,
    /// Bytes of those that are loaded or being read now.
    pub held: u64,
    /// The most of these so far.
    pub peak: u64,
}

/// Executor of static graphs.
pub trait Graphs: Send + Sync {
    /// Name of the executor, for `run info`.
    fn name(&self) -> &'static str;

    /// Requests, before [`Graphs::load`], that artifacts are loaded when a call needs them, and freed to keep
    /// to the memory of [`Graphs::prepare`]. The default ignores it.
    fn load_on_demand(&mut self, _artifacts: &[ArtifactBytes]) {}

    /// Loads every graph of a program, before anything runs. Graphs are then called by their index; states of
    /// `slots` sequences begin as zeros.
    ///
    /// # Errors
    /// A package that is missing, malformed or changed; a function that does not exist or has another
    /// signature.
    fn load(&mut self, bundle: &BundleReader, graphs: &[GraphDecl], slots: usize) -> Result<()>;

    /// Reports the units that will execute the operations of these graphs. Nothing is loaded for
    /// [`Graphs::run`].
    ///
    /// # Errors
    /// As [`Graphs::load`].
    fn operations(&self, _bundle: &BundleReader, _graphs: &[GraphDecl]) -> Result<OperationReport> {
        Ok(OperationReport::Unknown(format!("`{}` does not report them", self.name())))
    }

    /// Announces the graphs that a call will run, in order, if its entry point is not the last call's. Graphs
    /// may then be loaded while the CPU computes (PowerInfer-2, §4.1.3). `memory`: most bytes of artifacts
    /// that may be loaded until the next announcement, where memory has a budget; artifacts past them are
    /// freed before this returns. Nothing fails here.
    fn prepare(&self, _graphs: &[usize], _memory: Option<u64>) {}

    /// Counts of loads so far.
    fn loads(&self) -> LoadCounts {
        LoadCounts::default()
    }

    /// Runs a graph to its end. `inputs` and `outputs` have the lengths of its tensors, in their order;
    /// `slot` names the sequence whose state it uses. Several threads may call it at a time; an executor that
    /// runs one graph at a time lets the others wait.
    ///
    /// # Errors
    /// An error of the unit, or a result outside of the range of f16.
    fn run(&self, graph: usize, slot: usize, inputs: &[&[f16]], outputs: &mut [&mut [f16]]) -> Result<()>;
}
