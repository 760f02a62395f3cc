//! The operators of MIL that moec emits.
//!
//! Names of operators and parameters are MIL's own (opset of iOS 18, coremltools' *MIL operations*
//! reference). The table [`OpKind::params`] is all that the text form, the JSON form and the verifier use of
//! an operator; `infer` computes its shape. A new operator is a row here and an arm there.

use super::ValueId;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// Kinds of operators.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[expect(missing_docs, reason = "the names are MIL's; the table has descriptions")]
pub enum OpKind {
    Const,
    Conv,
    Matmul,
    Silu,
    Sigmoid,
    Gelu,
    Relu,
    Clip,
    Abs,
    Rsqrt,
    Add,
    Sub,
    Mul,
    RealDiv,
    Maximum,
    Minimum,
    ReduceMean,
    ReduceMax,
    ReduceSum,
    Softmax,
    Transpose,
    Reshape,
    ExpandDims,
    Squeeze,
    Tile,
    SliceBySize,
    SliceUpdate,
    Concat,
    Split,
    ReadState,
    WriteState,
}

/// Values that a parameter takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ArgKind {
    /// A tensor.
    Value,
    /// A list of tensors.
    Values,
    /// A state.
    State,
    /// A whole number.
    Int,
    /// A list of whole numbers.
    Ints,
    /// A number.
    Float,
    /// True or false.
    Bool,
    /// An approximation, see [`Mode`].
    Mode,
}

/// A parameter of an operator.
#[derive(Clone, Copy, Debug)]
pub struct Param {
    /// MIL's name.
    pub name: &'static str,
    /// Kind of values that are accepted.
    pub kind: ArgKind,
    /// Whether it must be there.
    pub required: bool,
}

const fn p(name: &'static str, kind: ArgKind) -> Param {
    Param { name, kind, required: true }
}

const fn optional(name: &'static str, kind: ArgKind) -> Param {
    Param { name, kind, required: false }
}

const X: Param = p("x", ArgKind::Value);
const Y: Param = p("y", ArgKind::Value);
const UNARY: &[Param] = &[X];
const BINARY: &[Param] = &[X, Y];
const REDUCE: &[Param] = &[X, p("axes", ArgKind::Ints), p("keep_dims", ArgKind::Bool)];

/// Kind, name, parameters in the order of the text form.
const TABLE: &[(OpKind, &str, &[Param])] = &[
    // One of the first two: an index of the program's weights, or one number everywhere.
    (
        OpKind::Const,
        "const",
        &[
            optional("weight", ArgKind::Int),
            optional("splat", ArgKind::Float),
            optional("shape", ArgKind::Ints),
        ],
    ),
    // x[N, C, H, W], weight[O, C / groups, 1, 1], bias[O]: kernel 1×1, stride 1, no padding, one group by
    // default.
    (
        OpKind::Conv,
        "conv",
        &[X, p("weight", ArgKind::Value), optional("bias", ArgKind::Value), optional("groups", ArgKind::Int)],
    ),
    // The last two axes are multiplied, the others broadcast.
    (OpKind::Matmul, "matmul", &[X, Y, p("transpose_x", ArgKind::Bool), p("transpose_y", ArgKind::Bool)]),
    (OpKind::Silu, "silu", UNARY),
    (OpKind::Sigmoid, "sigmoid", UNARY),
    (OpKind::Gelu, "gelu", &[X, p("mode", ArgKind::Mode)]),
    (OpKind::Relu, "relu", UNARY),
    (OpKind::Clip, "clip", &[X, p("alpha", ArgKind::Float), p("beta", ArgKind::Float)]),
    (OpKind::Abs, "abs", UNARY),
    // 1 / √(x + epsilon)
    (OpKind::Rsqrt, "rsqrt", &[X, p("epsilon", ArgKind::Float)]),
    (OpKind::Add, "add", BINARY),
    (OpKind::Sub, "sub", BINARY),
    (OpKind::Mul, "mul", BINARY),
    (OpKind::RealDiv, "real_div", BINARY),
    (OpKind::Maximum, "maximum", BINARY),
    (OpKind::Minimum, "minimum", BINARY),
    (OpKind::ReduceMean, "reduce_mean", REDUCE),
    (OpKind::ReduceMax, "reduce_max", REDUCE),
    (OpKind::ReduceSum, "reduce_sum", REDUCE),
    (OpKind::Softmax, "softmax", &[X, p("axis", ArgKind::Int)]),
    (OpKind::Transpose, "transpose", &[X, p("perm", ArgKind::Ints)]),
    (OpKind::Reshape, "reshape", &[X, p("shape", ArgKind::Ints)]),
    (OpKind::ExpandDims, "expand_dims", &[X, p("axes", ArgKind::Ints)]),
    (OpKind::Squeeze, "squeeze", &[X, p("axes", ArgKind::Ints)]),
    (OpKind::Tile, "tile", &[X, p("reps", ArgKind::Ints)]),
    (OpKind::SliceBySize, "slice_by_size", &[X, p("begin", ArgKind::Ints), p("size", ArgKind::Ints)]),
    // x with x[begin .. end] replaced.
    (
        OpKind::SliceUpdate,
        "slice_update",
        &[X, p("update", ArgKind::Value), p("begin", ArgKind::Ints), p("end", ArgKind::Ints)],
    ),
    (OpKind::Concat, "concat", &[p("values", ArgKind::Values), p("axis", ArgKind::Int)]),
    (OpKind::Split, "split", &[X, p("split_sizes", ArgKind::Ints), p("axis", ArgKind::Int)]),
    (OpKind::ReadState, "read_state", &[p("state", ArgKind::State)]),
    (OpKind::WriteState, "write_state", &[p("state", ArgKind::State), p("value", ArgKind::Value)]),
];

impl OpKind {
    /// Every kind.
    pub fn all() -> impl Iterator<Item = Self> {
        TABLE.iter().map(|row| row.0)
    }

    /// MIL's name.
    pub fn name(self) -> &'static str {
        self.row().1
    }

    /// Parameters in the order of the text form.
    pub fn params(self) -> &'static [Param] {
        self.row().2
    }

    fn row(self) -> &'static (Self, &'static str, &'static [Param]) {
        // The table is in the order of the enum; a test holds it to that.
        &TABLE[self as usize]
    }
}

/// Computation of `gelu`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "SCREAMING_SNAKE_CASE")]
pub enum Mode {
    /// By the error function.
    Exact,
    /// By the hyperbolic tangent.
    TanhApproximation,
}

/// An argument.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum Arg {
    /// True or false.
    Bool(bool),
    /// A whole number; extents, axes and indices are never negative.
    Int(usize),
    /// A number.
    Float(f32),
    /// Whole numbers.
    Ints(Vec<usize>),
    /// A tensor or a state.
    Value(ValueId),
    /// Tensors.
    Values(Vec<ValueId>),
    /// An approximation.
    Mode(Mode),
}

impl Arg {
    /// Whether a parameter of a kind takes it.
    pub(crate) fn is(&self, kind: ArgKind) -> bool {
        matches!(
            (self, kind),
            (Self::Bool(_), ArgKind::Bool)
                | (Self::Int(_), ArgKind::Int)
                | (Self::Float(_), ArgKind::Float)
                | (Self::Ints(_), ArgKind::Ints)
                | (Self::Value(_), ArgKind::Value | ArgKind::State)
                | (Self::Values(_), ArgKind::Values)
                | (Self::Mode(_), ArgKind::Mode)
        )
    }
}

/// An operator with its arguments and results.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Op {
    /// Its kind.
    pub op: OpKind,
    /// Arguments by the name of their parameter.
    pub args: BTreeMap<String, Arg>,
    /// Values that it defines.
    pub results: Vec<ValueId>,
}

impl Op {
    /// The argument of a parameter.
    pub fn arg(&self, name: &str) -> Option<&Arg> {
        self.args.get(name)
    }

    /// Index of the weight of a constant.
    pub fn weight(&self) -> Option<usize> {
        match (self.op, self.arg("weight")) {
            (OpKind::Const, Some(Arg::Int(n))) => Some(*n),
            _ => None,
        }
    }

    /// The number that fills a constant.
    pub fn splat(&self) -> Option<f32> {
        match (self.op, self.arg("splat")) {
            (OpKind::Const, Some(Arg::Float(x))) => Some(*x),
            _ => None,
        }
    }

    /// Every value that it reads, states included.
    pub fn operands(&self) -> impl Iterator<Item = ValueId> {
        self.args
            .values()
            .flat_map(|arg| match arg {
                Arg::Value(v) => std::slice::from_ref(v),
                Arg::Values(list) => list,
                _ => &[],
            })
            .copied()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_is_in_the_order_of_the_enum() {
        for (i, (kind, name, _)) in TABLE.iter().enumerate() {
            assert_eq!(*kind as usize, i, "{name}");
            assert_eq!(serde_json::to_string(kind).unwrap(), format!("\"{name}\""));
        }
    }
}
