//! Norms out of operators that the Neural Engine runs.
//!
//! It has no layer norm (NPUMoE, figure 4). So norms of tokens are computed on the CPU, unless the device
//! file permits them in the graph. Norms of queries and keys are between a projection and a rotation, and are
//! always here.
//!
//! In f16 a square overflows from 256 on and is nothing below 2⁻¹². So a vector is first divided by its
//! largest magnitude `m`, and then
//!
//! ```text
//! x / √(mean(x²) + ε)  =  (x/m) / √(mean((x/m)²) + (√ε/m)²)
//! ```
//!
//! where, with `m ≥ √ε`, every number is between 0 and 1. The equality holds for any `m > 0`.

use super::{Raw, Result};
use crate::program::{Array, Counted, FunctionBuilder, OpKind, ValueId};

/// Smallest divisor: far above where f16 loses digits.
const FLOOR: f32 = 1.0 / 1024.0;
/// Number that `rsqrt` adds. Its operand is at least 1/C, so this smallest number above zero changes nothing.
const NOTHING: f32 = 1.0 / 16_777_216.0;

/// Root mean square norm, or layer norm.
#[derive(Clone, Debug, PartialEq)]
pub struct Norm {
    /// Factor per channel, `[C]`.
    pub weight: Option<Raw>,
    /// Term per channel, `[C]`.
    pub bias: Option<Raw>,
    /// Added to the mean square.
    pub eps: f32,
    /// Whether the mean is taken away first: layer norm.
    pub center: bool,
}

impl Norm {
    /// Refuses weights of other shapes.
    pub(super) fn check(&self, graph: &str, name: &str, channels: usize) -> Result<()> {
        self.parts(name).try_for_each(|(name, raw)| raw.expect(graph, &name, &[channels]))
    }

    /// The arrays that it becomes.
    pub(super) fn arrays(&self, counted: Counted) -> impl Iterator<Item = Array> {
        [&self.weight, &self.bias].into_iter().flatten().flat_map(move |raw| raw.arrays(counted))
    }

    fn parts(&self, name: &str) -> impl Iterator<Item = (String, &Raw)> {
        let named = move |suffix: &str, raw| (format!("{name}{suffix}"), raw);
        let weight = self.weight.iter().map(move |raw| named("", raw));
        weight.chain(self.bias.iter().map(move |raw| named("_bias", raw)))
    }

    /// Over axis 1 of `x[rows, C, 1, 1]` or `x[1, C, 1, rows]`.
    pub(super) fn whole(&self, b: &mut FunctionBuilder, x: ValueId, name: &str) -> Result<ValueId> {
        self.over(b, x, 1, name)
    }

    /// Over axis 2 of `x[1, groups, C, rows]`, each group for itself with the same weights.
    pub(super) fn grouped(&self, b: &mut FunctionBuilder, x: ValueId, name: &str) -> Result<ValueId> {
        self.over(b, x, 2, name)
    }

    fn over(&self, b: &mut FunctionBuilder, mut x: ValueId, axis: usize, name: &str) -> Result<ValueId> {
        let mut shape = vec![1; 4];
        shape[axis] = b.shape(x).get(axis).copied().unwrap_or(0);
        if self.center {
            let mean = b.reduce(OpKind::ReduceMean, x, axis)?;
            x = b.binary(OpKind::Sub, x, mean)?;
        }
        let root = self.eps.sqrt();
        let magnitude = b.unary(OpKind::Abs, x)?;
        let largest = b.reduce(OpKind::ReduceMax, magnitude, axis)?;
        let largest = b.scalar(OpKind::Maximum, largest, root.max(FLOOR))?;
        let scaled = b.binary(OpKind::RealDiv, x, largest)?;
        let square = b.binary(OpKind::Mul, scaled, scaled)?;
        let mean = b.reduce(OpKind::ReduceMean, square, axis)?;
        let root = b.splat(root, &[])?;
        let root = b.binary(OpKind::RealDiv, root, largest)?;
        let eps = b.binary(OpKind::Mul, root, root)?;
        let sum = b.binary(OpKind::Add, mean, eps)?;
        let factor = b.rsqrt(sum, NOTHING)?;
        let mut y = b.binary(OpKind::Mul, scaled, factor)?;
        let applied = [(OpKind::Mul, &self.weight, ""), (OpKind::Add, &self.bias, "_bias")];
        for (op, raw, suffix) in applied {
            if let Some(raw) = raw {
                let weight = b.weight(&raw.weight(&format!("{name}{suffix}"), shape.clone()))?;
                y = b.binary(op, y, weight)?;
            }
        }
        Ok(y)
    }
}
