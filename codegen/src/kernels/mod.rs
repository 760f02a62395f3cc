//! One kernel per file: parameters, symbol, work items, scratch, layout, rules and code.
//! [`KernelSpec`](crate::KernelSpec) is the table of them.
#![expect(clippy::cast_possible_truncation, reason = "kernels: lanes, tiles and strides of one matrix")]

mod amx;
pub(crate) mod attention;
mod bytes;
pub(crate) mod cache;
pub(crate) mod combine;
pub(crate) mod copy_columns;
pub(crate) mod embed;
pub(crate) mod expert;
mod fine;
pub(crate) mod gather_rows;
mod hadamard;
pub(crate) mod linear;
pub(crate) mod map;
mod micro;
pub(crate) mod multiply;
pub(crate) mod neuron;
pub(crate) mod norm;
mod outliers;
pub(crate) mod panel;
pub(crate) mod position;
pub(crate) mod quantise;
pub(crate) mod recurrence;
pub(crate) mod rope;
pub(crate) mod routed;
pub(crate) mod router;
pub(crate) mod softmax;
mod squares;
pub(crate) mod unpack;
pub(crate) mod zero_experts;

use crate::dsl::Kb;
use crate::gpu::GpuKernel;
use crate::machine::{ByteDot, Isa};
use crate::schedule::Schedule;
use crate::spec::{ComputeType, Product, RowFormat, Symbol, packed_words};
use moec_ir::plan::{Grid, Layout, Results};
use moec_ir::types::Format;
use std::fmt::Debug;

/// Condition that must hold, and the fault where it does not.
pub(crate) type Rule = (bool, &'static str);

/// Rows of a work item of kernels whose rows are independent and cheap.
pub(crate) const ROWS: usize = 4;

/// A kernel: all that is known of it, and its code.
pub(crate) trait Kernel: Debug {
    /// Kind of the kernel, in a word.
    fn kind(&self) -> &'static str;
    /// Adds its parameters to its symbol: equal exactly for equal ones.
    fn name(&self, s: &mut Symbol, isa: &Isa);
    /// Work items.
    fn grid(&self, _isa: &Isa) -> Grid {
        Grid::Tiles { rows: ROWS as u32, tiles: 1 }
    }
    /// Number of arguments.
    fn args(&self) -> usize;
    /// Arguments that it writes.
    fn results(&self) -> Results {
        Results::last(1, self.args())
    }
    /// Bytes of scratch that a thread needs.
    fn scratch_bytes(&self, _isa: &Isa) -> usize {
        0
    }
    /// Layout of its weight matrix, if it reads one.
    fn layout(&self, _isa: &Isa) -> Option<Layout> {
        None
    }
    /// The product with a matrix that it computes, if it does and its work can be cut otherwise.
    fn product(&self) -> Option<Product> {
        None
    }
    /// The schedule of its [`Self::product`].
    fn schedule_mut(&mut self) -> Option<&mut Schedule> {
        None
    }
    /// Conditions for it to read and write within bounds.
    fn rules(&self, isa: &Isa) -> Vec<Rule>;
    /// Writes its body.
    fn write<'k>(&self, k: &'k Kb<'k>);
    /// Its code for GPUs, if they have it.
    fn on_gpu(&self) -> Option<&dyn GpuKernel> {
        None
    }
}

const NO_GATE: &str = "two projections, of which none is a gate";
const NO_NEURONS: &str = "neurons in a format that does not hold them";
const NO_GATE_BOUND: &str = "a gate bound that is no smaller than the gate, or does not bound it";

/// Whether rows of `groups` segments of `cols` numbers each can be written in a compute type.
fn fits(isa: &Isa, out: RowFormat, cols: usize, groups: usize) -> [Rule; 3] {
    [
        (out.compute != ComputeType::Bf16 || isa.bf16, "pairs on a machine that does not multiply them"),
        (out.ld >= packed_words(cols, out.compute) * groups, "rows of the output overlap"),
        (
            out.compute != ComputeType::I8 || isa.bytes != ByteDot::None,
            "bytes on a machine that does not multiply them",
        ),
    ]
}

/// Whether a machine multiplies weights of a format in a compute type.
fn can_multiply(isa: &Isa, format: Format, compute: ComputeType) -> Rule {
    let quantised = format.is_quantised();
    match compute {
        ComputeType::F32 => (true, ""),
        ComputeType::Bf16 => (
            isa.bf16 && (quantised || format == Format::Bf16 || format == Format::F16 && isa.is_thread()),
            "bf16 rows need weights of bf16 or codes (on threads f16, too), and a machine with bf16 dot products",
        ),
        ComputeType::I8 => (
            isa.bytes != ByteDot::None && quantised,
            "byte rows need weights of codes, and a machine with byte dot products",
        ),
    }
}
