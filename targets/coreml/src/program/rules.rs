//! What a unit allows in a program.

use super::OpKind;
use super::OpKind as K;

/// Rules of a unit that runs programs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rules {
    /// What the unit is, for messages.
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
}

/// Operators of the Neural Engine (NPUMoE, figure 4): convolutions, products, activations, element-wise operators
/// and reductions, static movement of data. There is no layer norm, comparison, indexing, top-k, gather or scatter.
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
    /// Apple's Neural Engine.
    pub const ANE: Self = Self {
        unit: "the Neural Engine",
        ops: NEURAL_ENGINE,
        states: 2,
        state_multiple: 32,
        extent: 16384,
        rows_multiple: 16,
    };
}
