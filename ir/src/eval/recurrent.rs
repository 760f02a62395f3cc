//! Operators on states that fold all tokens so far together.

use super::tensor::{Data, Tensor};
use super::{Args, EvalError, basic};
use crate::op::Activation;

/// The slot of each row with a position, which must be one of `slots`; `None` for padding.
fn slots_of(a: &Args<'_>, slots: usize) -> Result<Vec<Option<usize>>, EvalError> {
    let (pos, slot) = (a.i32(a.list.len() - 2)?, a.i32(a.list.len() - 1)?);
    let rows = pos.iter().zip(slot);
    rows.map(|(&p, &s)| if p < 0 { Ok(None) } else { a.index("slot", s, slots).map(Some) }).collect()
}

fn numbers<'s>(a: &Args<'_>, state: &'s mut Tensor) -> Result<&'s mut [f32], EvalError> {
    match &mut state.data {
        Data::F32(data) => Ok(data),
        Data::I32(_) => Err(a.error("the state holds integers")),
    }
}

/// The operands are `x, w, bias?, pos, slot`.
pub(super) fn causal_conv(
    a: &Args<'_>,
    state: &mut Tensor,
    act: Option<Activation>,
    bias: bool,
) -> Result<Vec<f32>, EvalError> {
    let (slots, before, c) = (state.ty.shape[0], state.ty.shape[2], state.ty.shape[3]);
    let (x, w) = (a.f32(0)?, a.f32(1)?);
    let bias = if bias { Some(a.f32(2)?) } else { None };
    let slot = slots_of(a, slots)?;
    let state = numbers(a, state)?;
    let mut out = vec![0.0; x.len()];
    for ((row, y), slot) in x.chunks_exact(c).zip(out.chunks_exact_mut(c)).zip(slot) {
        let Some(slot) = slot else { continue };
        let held = &mut state[slot * before * c..(slot + 1) * before * c];
        for (i, y) in y.iter_mut().enumerate() {
            let taps = held.iter().skip(i).step_by(c).chain([&row[i]]);
            let sum: f64 = taps.zip(w.iter().skip(i).step_by(c)).map(|(&x, &w)| f64::from(x) * f64::from(w)).sum();
            let sum = (sum + bias.map_or(0.0, |b| f64::from(b[i]))) as f32;
            *y = act.map_or(sum, |act| basic::activate(act, sum));
        }
        // The oldest row goes, this one is the last.
        if before > 0 {
            held.copy_within(c.., 0);
            held[(before - 1) * c..].copy_from_slice(row);
        }
    }
    Ok(out)
}

/// A state of sums of `k vᵀ` that decay; with `corrects`, what it says of a key is taken off the value. The operands are
/// `q, k, v, decay, beta, pos, slot`.
pub(super) fn outer_products(
    a: &Args<'_>,
    state: &mut Tensor,
    [key_heads, heads]: [usize; 2],
    corrects: bool,
) -> Result<Vec<f32>, EvalError> {
    let (slots, dk, dv) = (state.ty.shape[0], state.ty.shape[2], state.ty.shape[3]);
    let [q, k, v, decay, beta] = [a.f32(0)?, a.f32(1)?, a.f32(2)?, a.f32(3)?, a.f32(4)?];
    let decays = a.cols(3)? / heads;
    let slot = slots_of(a, slots)?;
    let state = numbers(a, state)?;
    let mut out = vec![0.0; v.len()];
    for (t, slot) in slot.into_iter().enumerate() {
        let Some(slot) = slot else { continue };
        for h in 0..heads {
            let of_key = t * key_heads + h / (heads / key_heads);
            let (q, k) = (&q[of_key * dk..][..dk], &k[of_key * dk..][..dk]);
            let at = t * heads + h;
            let decay = &decay[at * decays..][..decays];
            let s = &mut state[(slot * heads + h) * dk * dv..][..dk * dv];
            for (j, (&v, y)) in v[at * dv..].iter().zip(&mut out[at * dv..][..dv]).enumerate() {
                // Column `j` of the state, decayed.
                let mut column: Vec<f64> = (0..dk)
                    .map(|i| f64::from(s[i * dv + j]) * f64::from(decay[i % decays]).exp())
                    .collect();
                let dot = |with: &[f32], column: &[f64]| -> f64 {
                    with.iter().zip(column).map(|(&x, s)| f64::from(x) * s).sum()
                };
                let said = if corrects { dot(k, &column) } else { 0.0 };
                let change = f64::from(beta[at]) * (f64::from(v) - said);
                for (s, &k) in column.iter_mut().zip(k) {
                    *s += f64::from(k) * change;
                }
                *y = dot(q, &column) as f32;
                for (i, x) in column.into_iter().enumerate() {
                    s[i * dv + j] = x as f32;
                }
            }
        }
    }
    Ok(out)
}
