//! Operators on rows: embedding, norms, matrices and what goes element by element.

use super::{Args, EvalError};
use crate::op::{Activation, Glu};

type FloatResult = Result<Vec<f32>, EvalError>;

/// Σ xᵢ·wᵢ, in f64.
pub(super) fn dot(x: &[f32], w: &[f32]) -> f64 {
    x.iter().zip(w).map(|(&x, &w)| f64::from(x) * f64::from(w)).sum()
}

pub(super) fn sigmoid(x: f64) -> f64 {
    1.0 / (1.0 + (-x).exp())
}

/// The error function, by its series near zero and by a continued fraction of its complement beyond;
/// exact to about 1e-15.
fn erf(x: f64) -> f64 {
    let z = x.abs();
    let value = if z < 2.5 {
        let (mut term, mut sum, mut n) = (z, z, 0.0);
        while term.abs() > 1e-17 * sum {
            n += 1.0;
            term *= -z * z / n;
            sum += term / (2.0 * n + 1.0);
            if term == 0.0 {
                break;
            }
        }
        sum * std::f64::consts::FRAC_2_SQRT_PI
    } else {
        let fraction = (1..=80).rev().fold(z, |below, n| z + f64::from(n) / 2.0 / below);
        1.0 - (-z * z).exp() / (fraction * std::f64::consts::PI.sqrt())
    };
    value.copysign(x)
}

/// One activation, computed in f64.
pub(super) fn activate(act: Activation, x: f32) -> f32 {
    let x = f64::from(x);
    let y = match act {
        Activation::Silu => x * sigmoid(x),
        Activation::Gelu => 0.5 * x * (1.0 + erf(x * std::f64::consts::FRAC_1_SQRT_2)),
        Activation::GeluTanh => {
            let inner = (2.0 / std::f64::consts::PI).sqrt() * (x + 0.044_715 * x * x * x);
            0.5 * x * (1.0 + inner.tanh())
        }
        Activation::Relu => x.max(0.0),
        Activation::Sigmoid => sigmoid(x),
    };
    y as f32
}

/// `ln(1 + e^x)`, computed in f64 without overflow.
pub(super) fn softplus(x: f32) -> f32 {
    let x = f64::from(x);
    (x.max(0.0) + (-x.abs()).exp().ln_1p()) as f32
}

/// Joins gate and up.
pub(super) fn glu(glu: Glu, g: f32, u: f32) -> f32 {
    match glu {
        Glu::Gated(act) => activate(act, g) * u,
        Glu::DRelu => g.max(0.0) * u.max(0.0),
        Glu::FatRelu { threshold } => (if g < threshold { 0.0 } else { g }) * u,
        Glu::Cats { threshold } => {
            let g = activate(Activation::Silu, g);
            (if g.abs() < threshold { 0.0 } else { g }) * u
        }
        Glu::Clamped { alpha, limit } => {
            let g = f64::from(g.min(limit));
            let u = f64::from(u.max(-limit).min(limit));
            ((u + 1.0) * g * sigmoid(f64::from(alpha) * g)) as f32
        }
    }
}

/// Softmax in f64.
pub(super) fn softmax(x: &[f32]) -> Vec<f64> {
    let max = x.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let e: Vec<f64> = x.iter().map(|&x| (f64::from(x) - f64::from(max)).exp()).collect();
    let sum: f64 = e.iter().sum();
    e.into_iter().map(|e| e / sum).collect()
}

pub(super) fn embed(a: &Args<'_>) -> FloatResult {
    let (vocab, hidden, table) = (a.rows(1)?, a.cols(1)?, a.f32(1)?);
    let mut out = Vec::new();
    for &id in a.i32(0)? {
        let id = a.index("id", id, vocab)?;
        out.extend_from_slice(&table[id * hidden..(id + 1) * hidden]);
    }
    Ok(out)
}

pub(super) fn rms_norm(a: &Args<'_>, eps: f32, groups: usize, weight: bool) -> FloatResult {
    let width = a.channels(0)? / groups;
    let weight = if weight { Some(a.f32(1)?) } else { None };
    let mut out = Vec::new();
    for group in a.f32(0)?.chunks_exact(width) {
        let mean_square = dot(group, group) / width as f64;
        let factor = 1.0 / (mean_square + f64::from(eps)).sqrt();
        for (c, &x) in group.iter().enumerate() {
            let w = weight.map_or(1.0, |w| f64::from(w[c]));
            out.push((f64::from(x) * factor * w) as f32);
        }
    }
    Ok(out)
}

pub(super) fn layer_norm(a: &Args<'_>, eps: f32) -> FloatResult {
    let (width, weight, bias) = (a.cols(0)?, a.f32(1)?, a.f32(2)?);
    let mut out = Vec::new();
    for row in a.f32(0)?.chunks_exact(width) {
        let mean = row.iter().map(|&x| f64::from(x)).sum::<f64>() / width as f64;
        let variance = row.iter().map(|&x| (f64::from(x) - mean).powi(2)).sum::<f64>() / width as f64;
        let factor = 1.0 / (variance + f64::from(eps)).sqrt();
        for (c, &x) in row.iter().enumerate() {
            let y = (f64::from(x) - mean) * factor * f64::from(weight[c]) + f64::from(bias[c]);
            out.push(y as f32);
        }
    }
    Ok(out)
}

/// `w · x (+ bias)` for one row `x` and a matrix `w` of rows as long as `x`.
pub(super) fn matvec(x: &[f32], w: &[f32], bias: Option<&[f32]>) -> Vec<f32> {
    let rows = w.chunks_exact(x.len()).enumerate();
    rows.map(|(n, w)| (dot(x, w) + bias.map_or(0.0, |b| f64::from(b[n]))) as f32).collect()
}

pub(super) fn linear(a: &Args<'_>, bias: bool) -> FloatResult {
    let (k, w) = (a.cols(0)?, a.f32(1)?);
    let bias = if bias { Some(a.f32(2)?) } else { None };
    Ok(a.f32(0)?.chunks_exact(k).flat_map(|x| matvec(x, w, bias)).collect())
}

/// Gate and up of one row, joined.
pub(super) fn gated(x: &[f32], w: &[f32], bias: Option<&[f32]>, kind: Glu) -> Vec<f32> {
    let both = matvec(x, w, bias);
    let (gate, up) = both.split_at(both.len() / 2);
    gate.iter().zip(up).map(|(&g, &u)| glu(kind, g, u)).collect()
}

pub(super) fn linear_glu(a: &Args<'_>, kind: Glu, bias: bool) -> FloatResult {
    let (k, w) = (a.cols(0)?, a.f32(1)?);
    let bias = if bias { Some(a.f32(2)?) } else { None };
    Ok(a.f32(0)?.chunks_exact(k).flat_map(|x| gated(x, w, bias, kind)).collect())
}

pub(super) fn head_linear(a: &Args<'_>, heads: usize) -> FloatResult {
    let (k, w) = (a.cols(1)?, a.f32(1)?);
    let per_head = w.len() / heads;
    let mut out = Vec::new();
    for (i, x) in a.f32(0)?.chunks_exact(k).enumerate() {
        let head = i % heads;
        out.extend(matvec(x, &w[head * per_head..(head + 1) * per_head], None));
    }
    Ok(out)
}

/// Each group of channels meets its own matrix at every place of every image.
pub(super) fn conv1x1(a: &Args<'_>, groups: usize, bias: bool) -> FloatResult {
    let (k, w) = (a.channels(0)? / groups, a.f32(1)?);
    let bias = if bias { Some(a.f32(2)?) } else { None };
    let (matrix, n) = (w.len() / groups, w.len() / groups / k);
    let mut out = Vec::new();
    for (i, x) in a.f32(0)?.chunks_exact(k).enumerate() {
        let group = i % groups;
        let bias = bias.map(|b| &b[group * n..(group + 1) * n]);
        out.extend(matvec(x, &w[group * matrix..(group + 1) * matrix], bias));
    }
    Ok(out)
}

pub(super) fn zip(a: &Args<'_>, f: impl Fn(f32, f32) -> f32) -> FloatResult {
    Ok(a.f32(0)?.iter().zip(a.f32(1)?).map(|(&x, &y)| f(x, y)).collect())
}

pub(super) fn map(a: &Args<'_>, f: impl Fn(f32) -> f32) -> FloatResult {
    Ok(a.f32(0)?.iter().map(|&x| f(x)).collect())
}

pub(super) fn mul(a: &Args<'_>) -> FloatResult {
    let (cols, b_cols, b) = (a.channels(0)?, a.channels(1)?, a.f32(1)?);
    let factor = |i: usize| if b_cols == cols { b[i] } else { b[i / cols] };
    Ok(a.f32(0)?.iter().enumerate().map(|(i, &x)| x * factor(i)).collect())
}

pub(super) fn mul_heads(a: &Args<'_>, heads: usize) -> FloatResult {
    let (each, b) = (a.cols(0)? / heads, a.f32(1)?);
    Ok(a.f32(0)?.chunks_exact(each).zip(b).flat_map(|(head, b)| head.iter().map(move |x| x * b)).collect())
}

pub(super) fn scale_cols(a: &Args<'_>) -> FloatResult {
    let w = a.f32(1)?;
    Ok(a.f32(0)?.iter().enumerate().map(|(i, &x)| x * w[i % w.len()]).collect())
}

pub(super) fn softmax_rows(a: &Args<'_>) -> FloatResult {
    let cols = a.cols(0)?;
    Ok(a.f32(0)?.chunks_exact(cols).flat_map(softmax).map(|x| x as f32).collect())
}

pub(super) fn concat(a: &Args<'_>, heads: usize) -> FloatResult {
    let mut out = Vec::new();
    for block in 0..a.rows(0)? * heads {
        for i in 0..a.list.len() {
            let width = a.channels(i)? / heads;
            out.extend_from_slice(&a.f32(i)?[block * width..(block + 1) * width]);
        }
    }
    Ok(out)
}

pub(super) fn slice(a: &Args<'_>, heads: usize, start: usize, len: usize) -> FloatResult {
    let width = a.channels(0)? / heads;
    Ok(a.f32(0)?.chunks_exact(width).flat_map(|head| &head[start..start + len]).copied().collect())
}

pub(super) fn gather_rows(a: &Args<'_>) -> FloatResult {
    let (rows, cols, x) = (a.rows(0)?, a.cols(0)?, a.f32(0)?);
    let mut out = Vec::new();
    for &row in a.i32(1)? {
        if row < 0 {
            out.extend(std::iter::repeat_n(0.0, cols));
        } else {
            let row = a.index("row", row, rows)?;
            out.extend_from_slice(&x[row * cols..(row + 1) * cols]);
        }
    }
    Ok(out)
}
