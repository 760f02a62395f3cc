//! Reference for an expert in a DIMM, with which the machine is compared bit by bit.
//!
//! It does not use streams, tiles or engines, and shares no code with their executor. The arithmetic is that
//! of `docs/ndp-isa.md`. Activations are rounded to bf16. The f32 products of every 64 inputs in a row are
//! added by halves. The sums of these groups are added in order to the bias, or to zero. The gate's
//! function is computed in f64 and rounded to f32. Its product with up is in f32, and the result is rounded
//! to bf16.
#![expect(
    clippy::cast_possible_truncation,
    reason = "an evaluator and simulator: numbers are rounded, places were checked"
)]

use crate::image::{ImageError, Matrix, Shape};
use moec_ir::{Activation, Glu};
use std::f64::consts::{PI, SQRT_2};

/// Inputs whose products are added to each other before they are added to anything else.
const GROUP: usize = 64;

/// Results `[n, hidden]` of an expert for `x[n, hidden]`. `image` is its [`crate::image`].
///
/// # Errors
/// A shape without an image; an image or activations of another size.
pub fn expert(shape: &Shape, image: &[u8], x: &[f32], n: usize) -> Result<Vec<f32>, ImageError> {
    let parts = shape.image()?;
    let (hidden, inner) = (shape.hidden as usize, shape.inner as usize);
    let size = |part, found: u64, want: u64| {
        let &Shape { hidden, inner, .. } = shape;
        if found == want { Ok(()) } else { Err(ImageError::Bytes { hidden, inner, part, found, want }) }
    };
    size("lines", image.len() as u64, parts.lines * 64)?;
    size("activations", x.len() as u64 * 4, n as u64 * hidden as u64 * 4)?;
    let mut results = Vec::with_capacity(n * hidden);
    for x in x.chunks_exact(hidden) {
        let x: Vec<f32> = x.iter().map(|&x| to_bf16(x)).collect();
        let bias = |first: Option<u64>, number: usize| {
            first.map_or(0.0, |line| f32_at(image, line as usize * 64 + 4 * number))
        };
        let (gate_up_bias, down_bias) = (parts.biases.map(|b| b.0), parts.biases.map(|b| b.1));
        let mut h = Vec::with_capacity(inner);
        for output in 0..inner {
            // 16 gate columns, then the 16 up columns of the same outputs.
            let gate = output / 16 * 32 + output % 16;
            let [g, u] = [gate, gate + 16]
                .map(|column| column_sum(image, &parts.gate_up, column, &x, bias(gate_up_bias, column)));
            h.push(to_bf16(joined(shape.glu, g, u)));
        }
        for output in 0..hidden {
            results.push(column_sum(image, &parts.down, output, &h, bias(down_bias, output)));
        }
    }
    Ok(results)
}

/// Product of one column of a matrix and a vector, added to `start`.
fn column_sum(image: &[u8], matrix: &Matrix, column: usize, x: &[f32], start: f32) -> f32 {
    let first = matrix.line as usize * 64 + column / 32 * matrix.pairs as usize * 128 + column % 32 * 4;
    let mut sum = start;
    for (group, x) in x.chunks(GROUP).enumerate() {
        let mut products = [0.0; GROUP];
        for (i, (product, &x)) in products.iter_mut().zip(x).enumerate() {
            let input = group * GROUP + i;
            let at = first + input / 2 * 128 + input % 2 * 2;
            *product = bf16_at(image, at) * x;
        }
        sum += by_halves(&products);
    }
    sum
}

/// The first half added to the second, number by number, until one is left.
fn by_halves(numbers: &[f32]) -> f32 {
    if let [one] = numbers {
        return *one;
    }
    let (low, high) = numbers.split_at(numbers.len() / 2);
    by_halves(&low.iter().zip(high).map(|(low, high)| low + high).collect::<Vec<_>>())
}

fn f32_at(bytes: &[u8], at: usize) -> f32 {
    f32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
}

fn bf16_at(bytes: &[u8], at: usize) -> f32 {
    f32::from_le_bytes([0, 0, bytes[at], bytes[at + 1]])
}

/// Rounded to the nearest bf16, to the even one of two.
fn to_bf16(x: f32) -> f32 {
    let bits = x.to_bits();
    if x.is_nan() {
        return f32::from_bits(bits & 0xffff_0000 | 1 << 22);
    }
    let half = 0x7fff + (bits >> 16 & 1);
    f32::from_bits(bits.wrapping_add(half) & 0xffff_0000)
}

fn joined(glu: Glu, g: f32, u: f32) -> f32 {
    match glu {
        Glu::Gated(kind) => activated(kind, f64::from(g)) as f32 * u,
        Glu::DRelu => {
            activated(Activation::Relu, f64::from(g)) as f32
                * activated(Activation::Relu, f64::from(u)) as f32
        }
        Glu::FatRelu { threshold } => (if g < threshold { 0.0 } else { g }) * u,
        Glu::Cats { threshold } => {
            let g = activated(Activation::Silu, f64::from(g)) as f32;
            (if g.abs() < threshold { 0.0 } else { g }) * u
        }
        Glu::Limited { limit } => {
            (activated(Activation::Silu, f64::from(g)) as f32).min(limit) * u.max(-limit).min(limit)
        }
        Glu::Clamped { alpha, limit } => {
            let g = f64::from(if g <= limit || g.is_nan() { g } else { limit });
            let u = if u.is_nan() { u } else { u.clamp(-limit, limit) };
            let swish = g * logistic(f64::from(alpha) * g);
            swish as f32 * (u + 1.0)
        }
        Glu::Ungated(kind) => activated(kind, f64::from(u)) as f32,
    }
}

fn logistic(x: f64) -> f64 {
    1.0 / ((-x).exp() + 1.0)
}

fn activated(kind: Activation, x: f64) -> f64 {
    match kind {
        Activation::Silu => x * logistic(x),
        Activation::Gelu => x * 0.5 * (error(x * SQRT_2.recip()) + 1.0),
        Activation::GeluTanh => {
            // tanh(y) = ±(1 − 2q/(1 + q)), q = e^(−2|y|): 1 is added to a number that is rounded once.
            let y = (2.0 / PI).sqrt() * (0.044_715 * x * x * x + x);
            let q = (-2.0 * y.abs()).exp();
            let tanh = if q > 0.5 { y.sinh() / y.cosh() } else { (1.0 - 2.0 * q / (1.0 + q)).copysign(y) };
            x * 0.5 * (tanh + 1.0)
        }
        Activation::Relu if x > 0.0 => x,
        Activation::Relu => 0.0,
        Activation::Sigmoid => logistic(x),
        Activation::Relu2 => x.max(0.0) * x.max(0.0),
    }
}

/// The error function.
fn error(z: f64) -> f64 {
    let (square, size) = (2.0 * z * z, z.abs());
    let scale = (-z * z).exp() / PI.sqrt();
    if size < 2.0 {
        // erf(z) = 2/√π · e^(−z²) · Σ 2ⁿ z^(2n+1) / (2n+1)!!
        let (mut term, mut sum) = (z, z);
        for n in 1..60 {
            term *= square / f64::from(2 * n + 1);
            sum += term;
        }
        return 2.0 * scale * sum;
    }
    // erfc(z) = 2z·e^(−z²)/√π / (2z²+1 − 1·2/(2z²+5 − 3·4/(2z²+9 − …)))
    let below = (1..=60)
        .rev()
        .map(f64::from)
        .fold(square + 241.0, |below, n| square + 4.0 * n - 3.0 - (2.0 * n - 1.0) * 2.0 * n / below);
    (1.0 - 2.0 * size * scale / below).copysign(z)
}
