//! What a family gets to write its artifacts from.

use crate::error::Result;
use crate::part::StaticPart;
use crate::tools::Tools;
use moec_device::Unit;
use moec_ir::plan::ExpertTable;
use moec_ir::types::GROUP;
use moec_ir::{Module, Weight};
use std::ops::Range;
use std::path::Path;

/// Artifacts to be written: what lives on one unit.
#[derive(Clone, Copy)]
pub struct Emit<'a> {
    /// The Graph.
    pub module: &'a Module,
    /// The unit.
    pub unit: &'a Unit,
    /// Groups of experts: tables of layers with indices of groups.
    pub groups: &'a [(&'a ExpertTable, usize)],
    /// Other parts.
    pub parts: &'a [StaticPart],
    /// Where weights come from.
    pub numbers: &'a dyn Numbers,
    /// Folder of the bundle on its way. What lies elsewhere than the plan says must be gone at the end.
    pub root: &'a Path,
    /// What families are helped by.
    pub tools: Tools<'a>,
    /// Told of every group and part, by its name, before anything of it is written, any number of times. An error ends the
    /// work: somebody interrupted it.
    pub next: &'a dyn Fn(&str) -> Result<()>,
}

/// What was written.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Emitted {
    /// Bytes of weights.
    pub bytes: u64,
    /// What was left out, and what helps, a line each.
    pub notes: Vec<String>,
}

/// Numbers of weights, and how they are rounded.
pub trait Numbers {
    /// Reads a rectangle of matrix `lead` of a weight as f32, row by row, into `out`.
    ///
    /// # Errors
    /// A file that cannot be read.
    fn read(
        &self,
        weight: &Weight,
        lead: usize,
        rows: Range<usize>,
        cols: Range<usize>,
        out: &mut [f32],
    ) -> Result<()>;

    /// Mean squares of the channels that matrix `lead` of a weight is multiplied by, 1 on average, where calibration has
    /// seen them.
    fn importance(&self, _weight: &Weight, _lead: usize) -> Option<Vec<f32>> {
        None
    }

    /// Rounds matrix `lead` of a weight to the groups that the processor's kernels have of it.
    fn rounding<'a>(&'a self, weight: &'a Weight, lead: usize) -> Box<dyn Rounding + 'a>;
}

/// How one matrix is rounded, some rows at a time, from the first on.
pub trait Rounding {
    /// Rows of `cols` numbers as groups, each with its scale.
    ///
    /// # Errors
    /// A number that no group holds.
    fn groups(&self, rows: &[f32], cols: usize) -> Result<Vec<(f32, [i8; GROUP])>, f32>;
}
