//! Sums and functions in f64, of which operators are made.

use super::{Args, Evaluated, one};

/// Σ xᵢ·wᵢ
pub(super) fn dot(x: &[f32], w: &[f32]) -> f64 {
    x.iter().zip(w).map(|(&x, &w)| f64::from(x) * f64::from(w)).sum()
}

/// `w · x (+ bias)` for one row `x` and a matrix `w` of rows as long as `x`.
pub(super) fn matvec(x: &[f32], w: &[f32], bias: Option<&[f32]>) -> Vec<f32> {
    let rows = w.chunks_exact(x.len()).enumerate();
    rows.map(|(n, w)| (dot(x, w) + bias.map_or(0.0, |b| f64::from(b[n]))) as f32).collect()
}

/// Matrix `i` of `n` of one size.
pub(super) fn matrix(all: &[f32], i: usize, n: usize) -> &[f32] {
    let size = all.len() / n;
    &all[i * size..(i + 1) * size]
}

pub(super) fn sigmoid(x: f64) -> f64 {
    1.0 / (1.0 + (-x).exp())
}

pub(super) fn softmax(x: &[f32]) -> Vec<f64> {
    let max = x.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let e: Vec<f64> = x.iter().map(|&x| (f64::from(x) - f64::from(max)).exp()).collect();
    let sum: f64 = e.iter().sum();
    e.into_iter().map(|e| e / sum).collect()
}

/// A function of every element of the first operand.
pub(super) fn map(a: &Args<'_>, f: impl Fn(f32) -> f32) -> Evaluated {
    Ok(one(a.f32(0)?.iter().map(|&x| f(x)).collect()))
}

/// A function of every two elements of the first two operands.
pub(super) fn zip(a: &Args<'_>, f: impl Fn(f32, f32) -> f32) -> Evaluated {
    Ok(one(a.f32(0)?.iter().zip(a.f32(1)?).map(|(&x, &y)| f(x, y)).collect()))
}
