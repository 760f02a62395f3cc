//! Static graphs that an accelerator executes: a Neural Engine, or its emulation.

use crate::bundle::BundleReader;
use crate::error::Result;
use crate::exec::operations::OperationReport;
pub use half::f16;
use moec_ir::plan::GraphDecl;

/// Executor of static graphs.
pub trait Graphs: Send + Sync {
    /// Name of the executor, for `run info`.
    fn name(&self) -> &'static str;

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
    /// may then be loaded while the CPU computes (PowerInfer-2, §4.1.3). A hint: nothing fails here.
    fn prepare(&self, _graphs: &[usize]) {}

    /// Runs a graph to its end. `inputs` and `outputs` have the lengths of its tensors, in their order;
    /// `slot` names the sequence whose state it uses. Only one thread at a time runs graphs.
    ///
    /// # Errors
    /// An error of the unit, or a result outside of the range of f16.
    fn run(&self, graph: usize, slot: usize, inputs: &[&[f16]], outputs: &mut [&mut [f16]]) -> Result<()>;
}
