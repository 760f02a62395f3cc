//! The operators of a network: a row of a table each.
//!
//! A row has an operator's names in QNN's package `qti.aisw` and in ONNX, its operands, its shape rule, and
//! its computation. A new operator is a row here. It may also need a shape rule in `infer`, and attributes in
//! the writers.

use super::infer::{self, Shaped};

/// An operator with its attributes.
#[derive(Clone, Debug, PartialEq)]
#[expect(missing_docs, reason = "the names are QNN's; the table has descriptions")]
pub enum Op {
    FullyConnected,
    MatMul,
    Add,
    Subtract,
    Multiply,
    Divide,
    Maximum,
    Minimum,
    Relu,
    Sigmoid,
    Sign,
    Tanh,
    Gelu,
    Softmax,
    RmsNorm {
        /// Added to the mean square.
        eps: f32,
    },
    Concat {
        /// Axis along which operands follow each other.
        axis: usize,
    },
    StridedSlice {
        /// First entry, end and step of every axis.
        ranges: Vec<[usize; 3]>,
    },
    Reshape {
        /// Extents of the result.
        shape: Vec<usize>,
    },
    Transpose {
        /// Axis of the operand that each axis of the result is.
        perm: Vec<usize>,
    },
    Gather {
        /// Axis whose entries are picked.
        axis: usize,
    },
}

/// Operands, and places in them.
pub(crate) type Places = Vec<(usize, usize)>;

/// Computation of an operator.
#[derive(Clone, Copy, Debug)]
pub enum Meaning {
    /// `x[T, K], w[N, K], bias[N]? → [T, N]`: sums of products, exact in integers.
    FullyConnected,
    /// `a[…, M, K], b[…, K, N] → […, M, N]`, the other axes broadcast.
    MatMul,
    /// Number by number of two operands, which broadcast.
    Pair(fn(f64, f64) -> f64),
    /// Number by number.
    Each(fn(f64) -> f64),
    /// Row by row along the last axis: attributes, a row, the second operand if there is one; in place.
    Row(fn(&Op, &mut [f64], &[f64])),
    /// Numbers are copied unchanged: for every number of the result, the operand and the position that it
    /// comes from. The second argument is the operands' extents, the third the indices of a `Gather`.
    Move(fn(&Op, &[&[usize]], &[i64]) -> Places),
}

/// A row of the table.
#[derive(Debug)]
pub struct Row {
    /// QNN's name.
    pub qnn: &'static str,
    /// ONNX's name.
    pub onnx: &'static str,
    /// First version of ONNX's operator set that supports it for the types used here.
    pub since: i64,
    /// Fewest and most operands.
    pub operands: (usize, usize),
    /// Extents of the result.
    pub(super) shape: fn(&Op, &[&[usize]]) -> Shaped,
    /// Its computation.
    pub meaning: Meaning,
}

const MANY: usize = 256;

const fn row(
    qnn: &'static str,
    onnx: &'static str,
    since: i64,
    operands: (usize, usize),
    shape: fn(&Op, &[&[usize]]) -> Shaped,
    meaning: Meaning,
) -> Row {
    Row { qnn, onnx, since, operands, shape, meaning }
}

/// Rows in the order of the enum, which a test checks.
#[rustfmt::skip]
const TABLE: [Row; 20] = [
    row("FullyConnected", "Gemm", 13, (2, 3), infer::fully_connected, Meaning::FullyConnected),
    row("MatMul", "MatMul", 13, (2, 2), infer::matmul, Meaning::MatMul),
    row("ElementWiseAdd", "Add", 14, (2, 2), infer::broadcast, Meaning::Pair(|a, b| a + b)),
    row("ElementWiseSubtract", "Sub", 14, (2, 2), infer::broadcast, Meaning::Pair(|a, b| a - b)),
    row("ElementWiseMultiply", "Mul", 14, (2, 2), infer::broadcast, Meaning::Pair(|a, b| a * b)),
    row("ElementWiseDivide", "Div", 14, (2, 2), infer::broadcast, Meaning::Pair(|a, b| a / b)),
    row("ElementWiseMaximum", "Max", 13, (2, 2), infer::broadcast, Meaning::Pair(f64::max)),
    row("ElementWiseMinimum", "Min", 13, (2, 2), infer::broadcast, Meaning::Pair(f64::min)),
    row("Relu", "Relu", 14, (1, 1), infer::same, Meaning::Each(|x| x.max(0.0))),
    row("Sigmoid", "Sigmoid", 13, (1, 1), infer::same, Meaning::Each(|x| 1.0 / (1.0 + (-x).exp()))),
    // 0 of zero.
    row("ElementWiseSign", "Sign", 13, (1, 1), infer::same, Meaning::Each(|x| if x == 0.0 { 0.0 } else { x.signum() })),
    row("Tanh", "Tanh", 13, (1, 1), infer::same, Meaning::Each(f64::tanh)),
    // With the error function.
    row("Gelu", "Gelu", 20, (1, 1), infer::same, Meaning::Each(gelu)),
    // Over the last axis.
    row("Softmax", "Softmax", 13, (1, 1), infer::same, Meaning::Row(softmax)),
    // x, gain[C]; over the last axis.
    row("RmsNorm", "RMSNormalization", 23, (2, 2), infer::rms_norm, Meaning::Row(rms_norm)),
    row("Concat", "Concat", 13, (1, MANY), infer::concat, Meaning::Move(concat)),
    row("StridedSlice", "Slice", 13, (1, 1), infer::slice, Meaning::Move(slice)),
    row("Reshape", "Reshape", 21, (1, 1), infer::reshape, Meaning::Move(|_, x, _| every(x))),
    row("Transpose", "Transpose", 21, (1, 1), infer::transpose, Meaning::Move(transpose)),
    // x, static indices[n].
    row("Gather", "Gather", 13, (2, 2), infer::gather, Meaning::Move(gather)),
];

impl Op {
    /// Its row.
    pub fn row(&self) -> &'static Row {
        &TABLE[self.index()]
    }

    /// Whether numbers are only moved, so that codes of operand and result mean the same.
    pub fn moves(&self) -> bool {
        matches!(self.row().meaning, Meaning::Move(_))
    }

    fn index(&self) -> usize {
        match self {
            Self::FullyConnected => 0,
            Self::MatMul => 1,
            Self::Add => 2,
            Self::Subtract => 3,
            Self::Multiply => 4,
            Self::Divide => 5,
            Self::Maximum => 6,
            Self::Minimum => 7,
            Self::Relu => 8,
            Self::Sigmoid => 9,
            Self::Sign => 10,
            Self::Tanh => 11,
            Self::Gelu => 12,
            Self::Softmax => 13,
            Self::RmsNorm { .. } => 14,
            Self::Concat { .. } => 15,
            Self::StridedSlice { .. } => 16,
            Self::Reshape { .. } => 17,
            Self::Transpose { .. } => 18,
            Self::Gather { .. } => 19,
        }
    }

    /// The operators without attributes, by their ONNX names.
    pub(crate) fn plain(onnx: &str) -> Option<Self> {
        const PLAIN: [Op; 14] = [
            Op::FullyConnected,
            Op::MatMul,
            Op::Add,
            Op::Subtract,
            Op::Multiply,
            Op::Divide,
            Op::Maximum,
            Op::Minimum,
            Op::Relu,
            Op::Sigmoid,
            Op::Sign,
            Op::Tanh,
            Op::Gelu,
            Op::Softmax,
        ];
        PLAIN.into_iter().find(|op| op.row().onnx == onnx)
    }
}

/// `x/2 · (1 + erf(x/√2))`
fn gelu(x: f64) -> f64 {
    0.5 * x * (1.0 + erf(x * std::f64::consts::FRAC_1_SQRT_2))
}

/// The error function to 1.5e-7 (Abramowitz and Stegun, 7.1.26).
fn erf(x: f64) -> f64 {
    let t = 1.0 / (1.0 + 0.327_591_1 * x.abs());
    let poly = [1.061_405_429, -1.453_152_027, 1.421_413_741, -0.284_496_736, 0.254_829_592];
    let sum = poly.iter().fold(0.0, |sum, c| sum * t + c) * t;
    (1.0 - sum * (-x * x).exp()).copysign(x)
}

fn softmax(_: &Op, row: &mut [f64], _: &[f64]) {
    let most = row.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    for x in &mut *row {
        *x = (*x - most).exp();
    }
    let sum: f64 = row.iter().sum();
    for x in row {
        *x /= sum;
    }
}

fn rms_norm(op: &Op, row: &mut [f64], gain: &[f64]) {
    let Op::RmsNorm { eps } = op else { return };
    let mean = row.iter().map(|x| x * x).sum::<f64>() / row.len() as f64;
    let factor = 1.0 / (mean + f64::from(*eps)).sqrt();
    row.iter_mut().zip(gain).for_each(|(x, g)| *x *= factor * g);
}

/// Entries before an axis, along it, and after it.
fn around(shape: &[usize], axis: usize) -> [usize; 3] {
    let (outer, rest) = shape.split_at(axis.min(shape.len()));
    let (along, inner) = rest.split_first().unwrap_or((&1, &[]));
    [outer.iter().product(), *along, inner.iter().product()]
}

fn every(x: &[&[usize]]) -> Vec<(usize, usize)> {
    let count: usize = x.first().map_or(0, |s| s.iter().product());
    (0..count).map(|i| (0, i)).collect()
}

fn concat(op: &Op, operands: &[&[usize]], _: &[i64]) -> Vec<(usize, usize)> {
    let Op::Concat { axis } = op else { return Vec::new() };
    let parts: Vec<_> = operands.iter().map(|s| around(s, *axis)).collect();
    let outer = parts.first().map_or(0, |p| p[0]);
    let run = |i: usize, [_, along, inner]: [usize; 3], at: usize| {
        (at * along * inner..(at + 1) * along * inner).map(move |j| (i, j))
    };
    (0..outer).flat_map(|at| parts.iter().enumerate().flat_map(move |(i, p)| run(i, *p, at))).collect()
}

fn slice(op: &Op, operands: &[&[usize]], _: &[i64]) -> Vec<(usize, usize)> {
    let (Op::StridedSlice { ranges }, Some(shape)) = (op, operands.first()) else { return Vec::new() };
    let axes: Vec<Vec<usize>> =
        ranges.iter().map(|&[a, b, step]| (a..b).step_by(step.max(1)).collect()).collect();
    picked(shape, &axes)
}

fn transpose(op: &Op, operands: &[&[usize]], _: &[i64]) -> Vec<(usize, usize)> {
    let (Op::Transpose { perm }, Some(shape)) = (op, operands.first()) else { return Vec::new() };
    let strides = strides(shape);
    let mut out = vec![0];
    for &axis in perm {
        out = spread(&out, (0..shape[axis]).map(|i| i * strides[axis]));
    }
    out.into_iter().map(|i| (0, i)).collect()
}

fn gather(op: &Op, operands: &[&[usize]], indices: &[i64]) -> Vec<(usize, usize)> {
    let (Op::Gather { axis }, Some(shape)) = (op, operands.first()) else { return Vec::new() };
    let axes: Vec<Vec<usize>> = shape
        .iter()
        .enumerate()
        .map(|(i, &n)| {
            if i == *axis {
                indices.iter().map(|&i| usize::try_from(i).unwrap_or(usize::MAX)).collect()
            } else {
                (0..n).collect()
            }
        })
        .collect();
    picked(shape, &axes)
}

/// Places of entries of every axis.
fn picked(shape: &[usize], axes: &[Vec<usize>]) -> Vec<(usize, usize)> {
    let strides = strides(shape);
    let mut out = vec![0];
    for (axis, stride) in axes.iter().zip(strides) {
        out = spread(&out, axis.iter().map(|i| i * stride));
    }
    out.into_iter().map(|i| (0, i)).collect()
}

fn spread(bases: &[usize], steps: impl Iterator<Item = usize> + Clone) -> Vec<usize> {
    bases.iter().flat_map(|base| steps.clone().map(move |step| base + step)).collect()
}

/// Distances of the entries of every axis.
pub(crate) fn strides(shape: &[usize]) -> Vec<usize> {
    let mut out = vec![1; shape.len()];
    for axis in (1..shape.len()).rev() {
        out[axis - 1] = out[axis] * shape[axis];
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_is_in_the_order_of_the_enum() {
        let with = [
            Op::RmsNorm { eps: 0.0 },
            Op::Concat { axis: 0 },
            Op::StridedSlice { ranges: vec![] },
            Op::Reshape { shape: vec![] },
            Op::Transpose { perm: vec![] },
            Op::Gather { axis: 0 },
        ];
        for (op, name) in
            with.iter().zip(["RmsNorm", "Concat", "StridedSlice", "Reshape", "Transpose", "Gather"])
        {
            assert_eq!(op.row().qnn, name);
        }
        for (op, name) in
            [(Op::Add, "Add"), (Op::Minimum, "Min"), (Op::Gelu, "Gelu"), (Op::Softmax, "Softmax")]
        {
            assert_eq!(op.row().onnx, name);
            assert_eq!(Op::plain(name), Some(op));
        }
    }

    #[test]
    fn data_movement_operators_report_source_indices() {
        let concat = concat(&Op::Concat { axis: 1 }, &[&[2, 1], &[2, 2]], &[]);
        assert_eq!(concat, [(0, 0), (1, 0), (1, 1), (0, 1), (1, 2), (1, 3)]);
        let op = Op::StridedSlice { ranges: vec![[0, 2, 1], [0, 4, 2]] };
        assert_eq!(slice(&op, &[&[2, 4]], &[]).iter().map(|p| p.1).collect::<Vec<_>>(), [0, 2, 4, 6]);
        let transposed = transpose(&Op::Transpose { perm: vec![1, 0] }, &[&[2, 3]], &[]);
        assert_eq!(transposed.iter().map(|p| p.1).collect::<Vec<_>>(), [0, 3, 1, 4, 2, 5]);
        let some = gather(&Op::Gather { axis: 1 }, &[&[2, 3]], &[2, 0]);
        assert_eq!(some.iter().map(|p| p.1).collect::<Vec<_>>(), [2, 0, 5, 3]);
    }

    #[test]
    fn elementwise_and_row_operators_match_their_formulas() {
        let mut row = [0.0, 2.0_f64.ln()];
        softmax(&Op::Softmax, &mut row, &[]);
        assert!((row[0] - 1.0 / 3.0).abs() < 1e-12 && (row[1] - 2.0 / 3.0).abs() < 1e-12);
        let mut row = [3.0, 4.0];
        rms_norm(&Op::RmsNorm { eps: 0.0 }, &mut row, &[1.0, 2.0]);
        let rms = 12.5_f64.sqrt();
        assert!((row[0] - 3.0 / rms).abs() < 1e-12 && (row[1] - 8.0 / rms).abs() < 1e-12);
        assert!((gelu(1.0) - 0.841_344_746).abs() < 1e-6 && (gelu(-1.0) + 0.158_655_254).abs() < 1e-6);
    }
}
