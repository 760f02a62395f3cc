//! Rules of a unit for programs.
#![expect(clippy::cast_possible_truncation, reason = "bytes of one element")]

use super::OpKind;
use super::OpKind as K;

/// Bytes that a limit on a graph counts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Counted {
    /// Stored bytes of the package.
    #[default]
    Stored,
    /// Bytes of its weights in f16.
    Dense,
}

/// Rules of a unit that runs programs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rules {
    /// Name of the unit, for messages.
    pub unit: &'static str,
    /// Operators that it runs.
    pub ops: &'static [OpKind],
    /// Most states in a graph.
    pub states: usize,
    /// The last two extents of a state are multiples of it.
    pub state_multiple: usize,
    /// Largest extent of a tensor that is computed.
    pub extent: usize,
    /// Rows of a chunk or of an expert's slice are multiples of it.
    pub rows_multiple: usize,
    /// Bytes that the last axis of a tensor is padded to. Where that is more than a number has, nothing
    /// inside of a graph may have a last axis of 1.
    pub last_axis_bytes: usize,
}

/// Operators of the Neural Engine (NPUMoE, figure 4): convolutions, products, activations, element-wise
/// operators and reductions, static movement of data. There is no layer norm, comparison, indexing, top-k,
/// gather or scatter.
const NEURAL_ENGINE: &[OpKind] = &[
    K::Const,
    K::Conv,
    K::Matmul,
    K::Silu,
    K::Sigmoid,
    K::Gelu,
    K::Relu,
    K::Clip,
    K::Abs,
    K::Rsqrt,
    K::Add,
    K::Sub,
    K::Mul,
    K::RealDiv,
    K::Maximum,
    K::Minimum,
    K::ReduceMean,
    K::ReduceMax,
    K::ReduceSum,
    K::Softmax,
    K::Transpose,
    K::Reshape,
    K::ExpandDims,
    K::Squeeze,
    K::Tile,
    K::SliceBySize,
    K::SliceUpdate,
    K::Concat,
    K::Split,
    K::ReadState,
    K::WriteState,
];

impl Rules {
    /// Apple's Neural Engine, with no word on how it pads.
    pub const ANE: Self = Self {
        unit: "the Neural Engine",
        ops: NEURAL_ENGINE,
        states: 2,
        state_multiple: 32,
        extent: 16384,
        rows_multiple: 16,
        last_axis_bytes: super::ELEMENT as usize,
    };

    /// Whether tensors inside of a graph must not have a last axis of 1.
    pub const fn pads(&self) -> bool {
        self.last_axis_bytes > super::ELEMENT as usize
    }
}
