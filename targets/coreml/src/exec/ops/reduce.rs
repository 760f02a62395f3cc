//! Operators over axes: reductions, `softmax`, `layer_norm`. They compute in f32 and round once.

use super::super::call::{Call, Floats};
use super::super::error::Fault;
use super::super::table::{Results, one};
use super::super::tensor::{Tensor, View};

/// The other axes, then `axes`.
fn trailing_axes(axes: &[usize], rank: usize) -> Vec<usize> {
    (0..rank).filter(|a| !axes.contains(a)).chain(axes.iter().copied()).collect()
}

/// Elements with `axes` innermost, and how many places those have.
fn gathered(x: &Floats, axes: &[usize]) -> (Vec<f32>, usize) {
    let values = View::whole(&x.shape).permuted(&trailing_axes(axes, x.shape.len())).take(&x.values);
    (values, axes.iter().map(|&a| x.shape[a]).product())
}

/// Elements with `axes` innermost, back in their own order.
fn scattered(values: &[f32], shape: &[usize], axes: &[usize]) -> Vec<f32> {
    let perm = trailing_axes(axes, shape.len());
    let mut back = vec![0; perm.len()];
    perm.iter().enumerate().for_each(|(i, &p)| back[p] = i);
    let moved: Vec<usize> = perm.iter().map(|&p| shape[p]).collect();
    View::whole(&moved).permuted(&back).take(values)
}

/// A reduction over `axes`, all of them where none are named.
pub(in super::super) fn reduce(call: &Call<'_>, f: impl Fn(&[f32]) -> f32) -> Results {
    let x = call.floats("x")?;
    let axes = call.axes("axes", x.shape.len())?;
    let keep = call.flag("keep_dims")?;
    let (values, len) = gathered(&x, &axes);
    let out = values.chunks(len).map(f).collect();
    let shape = (x.shape.iter().enumerate())
        .filter_map(|(i, &d)| if axes.contains(&i) { keep.then_some(1) } else { Some(d) })
        .collect();
    one(Tensor::rounded(x.dtype, shape, out))
}

/// `softmax` over one axis.
pub(in super::super) fn softmax(call: &Call<'_>) -> Results {
    let x = call.floats("x")?;
    let axis = [call.axis("axis", x.shape.len(), Some(-1))?];
    let (mut values, len) = gathered(&x, &axis);
    for row in values.chunks_mut(len) {
        let max = row.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        for x in row.iter_mut() {
            *x = (*x - max).exp();
        }
        let sum: f32 = row.iter().sum();
        for x in row.iter_mut() {
            *x /= sum;
        }
    }
    let values = scattered(&values, &x.shape, &axis);
    one(Tensor::rounded(x.dtype, x.shape, values))
}

/// `layer_norm` over `axes`, with `gamma` and `beta` of their shape.
pub(in super::super) fn layer_norm(call: &Call<'_>) -> Results {
    let x = call.floats("x")?;
    let axes = call.axes("axes", x.shape.len())?;
    let epsilon = call.scalar("epsilon")?.unwrap_or(1e-5);
    let (mut values, len) = gathered(&x, &axes);
    let affine = |parameter, neutral: f32| {
        if call.optional(parameter)?.is_none() {
            return Ok(vec![neutral; len]);
        }
        let given = call.floats(parameter)?;
        if given.values.len() != len {
            return Err(Fault::argument(parameter, format!("{:?} for {len} elements", given.shape)));
        }
        Ok(given.values)
    };
    let (gamma, beta) = (affine("gamma", 1.0)?, affine("beta", 0.0)?);
    for row in values.chunks_mut(len) {
        let mean = row.iter().sum::<f32>() / len as f32;
        let variance = row.iter().map(|x| (x - mean) * (x - mean)).sum::<f32>() / len as f32;
        let scale = 1.0 / (variance + epsilon).sqrt();
        (row.iter_mut().zip(&gamma).zip(&beta)).for_each(|((x, g), b)| *x = (*x - mean) * scale * g + b);
    }
    let values = scattered(&values, &x.shape, &axes);
    one(Tensor::rounded(x.dtype, x.shape, values))
}
