//! Static graphs that an accelerator executes: a Neural Engine, or its emulation.

use crate::bundle::BundleReader;
use crate::error::Result;
pub use half::f16;
use moec_ir::plan::GraphDecl;

/// Executor of static graphs.
pub trait Graphs: Send + Sync {
    /// Name of what executes, for `run info`.
    fn name(&self) -> &'static str;

    /// Loads every graph of a program, before anything runs. They are called by their index from then on; states
    /// of `slots` sequences begin as zeros.
    ///
    /// # Errors
    /// A package that is missing, malformed or not as it was built, a function that is not there or has another signature.
    fn load(&mut self, bundle: &BundleReader, graphs: &[GraphDecl], slots: usize) -> Result<()>;

    /// Graphs that a call will come to, in its order, if it is of another entry point than the last one: what is not loaded yet may
    /// load while the CPU computes (PowerInfer-2, §4.1.3). A hint: nothing fails here.
    fn prepare(&self, _graphs: &[usize]) {}

    /// Runs a graph to its end: `inputs` and `outputs` as long as its tensors, in their order; `slot` names the sequence
    /// whose state it sees. One thread at a time runs graphs.
    ///
    /// # Errors
    /// The unit refuses, or a result that f16 does not hold.
    fn run(&self, graph: usize, slot: usize, inputs: &[&[f16]], outputs: &mut [&mut [f16]]) -> Result<()>;
}
