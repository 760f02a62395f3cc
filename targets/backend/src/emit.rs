//! Inputs of a backend that writes its artifacts.

use crate::error::Result;
use crate::subgraph::{HotLayer, StaticSubgraph};
use crate::tools::Tools;
use moec_device::DeviceUnit;
use moec_ir::plan::ExpertTable;
use moec_ir::types::GROUP;
use moec_ir::{Module, Weight};
use std::ops::Range;
use std::path::Path;

/// Artifacts to be written for one unit.
#[derive(Clone, Copy)]
pub struct Emit<'a> {
    /// The Graph.
    pub module: &'a Module,
    /// The unit.
    pub unit: &'a DeviceUnit,
    /// Groups of experts: tables of layers with indices of groups.
    pub groups: &'a [(&'a ExpertTable, usize)],
    /// Other parts.
    pub parts: &'a [StaticSubgraph],
    /// Hot neurons of layers, with those of each expert, the hottest first: as many as the largest number of
    /// a batch.
    pub hot: &'a [(HotLayer, Vec<Vec<u32>>)],
    /// Source of weights.
    pub numbers: &'a dyn Numbers,
    /// Folder of the bundle while it is built. Files that the plan does not name must be removed at the end.
    pub root: &'a Path,
    /// Tools for backends.
    pub tools: Tools<'a>,
    /// Notified of every group and part, by its name, before anything of it is written, any number of times.
    /// An error ends the work: it was interrupted.
    pub next: &'a dyn Fn(&str) -> Result<()>,
}

/// Written artifacts.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Emitted {
    /// Bytes of weights.
    pub bytes: u64,
    /// Parts that were left out, and the remedy, a line each.
    pub notes: Vec<String>,
    /// Machine code of GPU kernels, by its path in the bundle.
    pub code: Vec<String>,
    /// Assembler that wrote that: [`Assembled::by`](crate::Assembled::by).
    pub assembler: Option<String>,
}

/// Numbers of weights, and how they are rounded.
pub trait Numbers {
    /// Reads a rectangle of matrix `matrix` of a weight as f32, row by row, into `out`.
    ///
    /// # Errors
    /// A file that cannot be read.
    fn read(
        &self,
        weight: &Weight,
        matrix: usize,
        rows: Range<usize>,
        cols: Range<usize>,
        out: &mut [f32],
    ) -> Result<()>;

    /// Mean squares of the channels that matrix `matrix` of a weight is multiplied by, 1 on average, where
    /// calibration has seen them.
    fn importance(&self, _weight: &Weight, _matrix: usize) -> Option<Vec<f32>> {
        None
    }

    /// Rows of real text that the matrices of a weight are multiplied by, `[n, cols]`, where calibration has
    /// kept some.
    ///
    /// # Errors
    /// A file that cannot be read.
    fn rows(&self, _weight: &Weight) -> Result<Option<Vec<f32>>> {
        Ok(None)
    }

    /// Rounds matrix `matrix` of a weight to the groups that the CPU's kernels have of it.
    fn rounding<'a>(&'a self, weight: &'a Weight, matrix: usize) -> Box<dyn Rounding + 'a>;
}

/// A matrix as codes with one scale for each of its rows, for units without groups of columns; some columns
/// have wider codes, with scales of their own.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Channels {
    /// Columns whose codes have 8 bits, ascending; those of all others have 4.
    pub outliers: Vec<u32>,
    /// Codes row by row, −8 to 7, of all columns: 0 in those of outliers. None if all are outliers.
    pub four: Vec<i8>,
    /// Scale of each row of these.
    pub scales: Vec<f32>,
    /// Codes of the outliers, row by row: −127 to 127.
    pub eight: Vec<i8>,
    /// Scale of each row of these.
    pub eight_scales: Vec<f32>,
}

/// Rounding of one matrix, some rows at a time, from the first on.
pub trait Rounding {
    /// Rows of `cols` numbers as groups, each with its scale.
    ///
    /// # Errors
    /// A number that no group holds.
    fn groups(&self, rows: &[f32], cols: usize) -> Result<Vec<(f32, [i8; GROUP])>, f32>;

    /// The whole matrix, row by row, as codes with one scale for each row; `outliers` columns, those that lose
    /// most in 4 bits, have 8. The numbers are those of the CPU's `q4o` with as many outliers.
    ///
    /// # Errors
    /// A number that no code holds.
    fn channels(&self, numbers: &[f32], cols: usize, outliers: usize) -> Result<Channels, f32>;
}
