//! Positions: rotary embedding, the KV cache, and attention over it.

use super::basic::dot;
use super::tensor::{Data, Tensor};
use super::{Args, EvalError};
use crate::op::{AttentionDesc, LongSwitch, RopeStyle};

/// Angles are `pos · inv_freq` rounded to f32, as the models compute them; the long frequencies of LongRoPE
/// hold for a row whose sequence, or whose prompt, is longer than the switch.
pub(super) fn rope_angles(
    a: &Args<'_>,
    scale: f32,
    switch: Option<LongSwitch>,
) -> Result<Vec<f32>, EvalError> {
    let short = a.f32(1)?;
    let mut out = Vec::new();
    for &pos in a.i32(0)? {
        let length = a.sequence.max(usize::try_from(pos).map_or(0, |pos| pos + 1));
        let (freqs, scale) = match switch.filter(|s| length > s.after) {
            Some(s) => (a.f32(2)?, s.long_scale),
            None => (short, scale),
        };
        let angles = || freqs.iter().map(|&f| f64::from(pos as f32 * f));
        out.extend(angles().map(|t| (t.cos() * f64::from(scale)) as f32));
        out.extend(angles().map(|t| (t.sin() * f64::from(scale)) as f32));
    }
    Ok(out)
}

pub(super) fn rope(
    a: &Args<'_>,
    heads: usize,
    offset: usize,
    style: RopeStyle,
) -> Result<Vec<f32>, EvalError> {
    let (width, rotary, angles) = (a.cols(0)?, a.cols(1)?, a.f32(1)?);
    let (dim, half) = (width / heads, rotary / 2);
    let mut out = a.f32(0)?.to_vec();
    for (t, row) in out.chunks_exact_mut(width).enumerate() {
        let (cos, sin) = angles[t * rotary..(t + 1) * rotary].split_at(half);
        for head in row.chunks_exact_mut(dim) {
            let part = &mut head[offset..offset + rotary];
            for i in 0..half {
                let (p, q) = match style {
                    RopeStyle::Half => (i, i + half),
                    RopeStyle::Interleaved => (2 * i, 2 * i + 1),
                };
                let (x, y) = (f64::from(part[p]), f64::from(part[q]));
                let (c, s) = (f64::from(cos[i]), f64::from(sin[i]));
                part[p] = (x * c - y * s) as f32;
                part[q] = (y * c + x * s) as f32;
            }
        }
    }
    Ok(out)
}

/// Index of the first channel at (slot, head, position) of a state `[slots, heads, ctx, dim]`.
fn place(state: &Tensor, slot: usize, head: usize, pos: usize) -> usize {
    let shape = &state.ty.shape;
    ((slot * shape[1] + head) * shape[2] + pos) * shape[3]
}

/// Stores the rows of `x`, position `p` in row `p mod ctx`; the operands are `x, pos, slot`.
pub(super) fn write(a: &Args<'_>, state: &mut Tensor) -> Result<(), EvalError> {
    let (slots, heads, ctx, dim) =
        (state.ty.shape[0], state.ty.shape[1], state.ty.shape[2], state.ty.shape[3]);
    let (pos, slot) = (a.i32(1)?, a.i32(2)?);
    for (t, row) in a.f32(0)?.chunks_exact(heads * dim).enumerate() {
        let Ok(p) = usize::try_from(pos[t]) else { continue };
        let p = p % ctx;
        let s = a.index("slot", slot[t], slots)?;
        for (h, head) in row.chunks_exact(dim).enumerate() {
            let at = place(state, s, h, p);
            let Data::F32(data) = &mut state.data else {
                return Err(a.error("the state holds integers"));
            };
            data[at..at + dim].copy_from_slice(head);
        }
    }
    Ok(())
}

pub(super) fn attention(a: &Args<'_>, d: &AttentionDesc) -> Result<Vec<f32>, EvalError> {
    let (q, k) = (a.f32(0)?, a.get(1)?);
    let v = if d.v_from_k { k } else { a.get(2)? };
    let next = if d.v_from_k { 2 } else { 3 };
    let (pos, slot) = (a.i32(next)?, a.i32(next + 1)?);
    let sinks = if d.sinks { Some(a.f32(next + 2)?) } else { None };
    let (slots, ctx) = (k.ty.shape[0], k.ty.shape[2]);
    let mut out = Vec::new();
    for (t, row) in q.chunks_exact(d.heads * d.qk_dim).enumerate() {
        if pos[t] < 0 {
            out.extend(std::iter::repeat_n(0.0, d.heads * d.v_dim));
            continue;
        }
        // What a state of `ctx` rows holds of the positions up to the last: all of them, or its window.
        let held = if d.window.is_some_and(|w| w <= ctx) { usize::MAX } else { ctx };
        let last = a.index("position", pos[t], held)?;
        let slot = a.index("slot", slot[t], slots)?;
        let first = d.window.map_or(0, |w| (last + 1).saturating_sub(w));
        for (h, query) in row.chunks_exact(d.qk_dim).enumerate() {
            let kv_head = h / (d.heads / d.kv_heads);
            let scores: Vec<f64> = (first..=last)
                .map(|p| {
                    let at = place(k, slot, kv_head, p % ctx);
                    dot(query, &k.as_f32()[at..at + d.qk_dim]) * f64::from(d.scale)
                })
                .collect();
            let sink = sinks.map(|s| f64::from(s[h]));
            let max = scores.iter().copied().chain(sink).fold(f64::NEG_INFINITY, f64::max);
            let total: f64 = scores.iter().copied().chain(sink).map(|s| (s - max).exp()).sum();
            let mut sum = vec![0.0_f64; d.v_dim];
            for (p, s) in (first..=last).zip(&scores) {
                let weight = (s - max).exp() / total;
                let at = place(v, slot, kv_head, p % ctx);
                for (y, &x) in sum.iter_mut().zip(&v.as_f32()[at..at + d.v_dim]) {
                    *y += weight * f64::from(x);
                }
            }
            out.extend(sum.into_iter().map(|y| y as f32));
        }
    }
    Ok(out)
}
