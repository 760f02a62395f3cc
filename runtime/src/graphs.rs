//! Static graphs that a unit beside the processor executes: a Neural Engine, or its emulation.

use crate::error::Result;
pub use half::f16;
use std::path::Path;

/// A tensor at the boundary of a graph. All are f16, dense, the last axis inner.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PortRef<'a> {
    /// Name in the function's signature.
    pub name: &'a str,
    /// Shape.
    pub shape: [u32; 4],
}

impl PortRef<'_> {
    /// Numbers in it.
    pub fn len(&self) -> usize {
        self.shape.iter().map(|&n| n as usize).product()
    }

    /// Whether it holds none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// A function of a package.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GraphRef<'a> {
    /// Path of the package, relative to the bundle.
    pub package: &'a str,
    /// Function in it.
    pub function: &'a str,
    /// What it takes, in order.
    pub inputs: &'a [PortRef<'a>],
    /// What it gives, in order.
    pub outputs: &'a [PortRef<'a>],
    /// Whether the package keeps a state, one for each sequence slot. Functions of one package share it.
    pub stateful: bool,
}

impl GraphRef<'_> {
    /// Where rows stand that an attention's graph takes, if that is fixed: it has no `write`, and its mask ends behind
    /// its last row.
    pub fn fixed_start(&self) -> Option<u32> {
        let port = |name: &str| self.inputs.iter().find(|p| p.name == name);
        match (port("mask"), port("write")) {
            (Some(mask), None) => mask.shape[3].checked_sub(mask.shape[2]),
            _ => None,
        }
    }
}

/// What executes static graphs.
pub trait Graphs: Send + Sync {
    /// Name of what executes, for `run info`.
    fn name(&self) -> &'static str;

    /// Loads every graph of a program, before anything runs. They are called by their index from then on; states
    /// of `slots` sequences begin as zeros.
    ///
    /// # Errors
    /// A package that is missing or malformed, a function that is not there or has another signature.
    fn load(&mut self, bundle: &Path, graphs: &[GraphRef<'_>], slots: usize) -> Result<()>;

    /// Runs a graph to its end: `inputs` and `outputs` as long as its ports, in their order; `slot` names the sequence
    /// whose state it sees. One thread at a time runs graphs.
    ///
    /// # Errors
    /// The unit refuses, or a result that f16 does not hold.
    fn run(&self, graph: usize, slot: usize, inputs: &[&[f16]], outputs: &mut [&mut [f16]]) -> Result<()>;
}
