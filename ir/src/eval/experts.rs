//! Experts: grouping slots, running the networks, joining the results.

use super::basic::{activate, dot, gated, glu as join, matvec};
use super::{Args, EvalError};
use crate::op::{Activation, AdmitDesc, DispatchLayout, Glu, Predictor};
use crate::types::Type;
use std::borrow::Cow;
use std::cmp::Reverse;

/// The dispatch table of [`DispatchLayout`]; words that it leaves unused are 0.
pub(super) fn dispatch(a: &Args<'_>, experts: usize, partial: bool) -> Result<Vec<i32>, EvalError> {
    let ids = a.i32(0)?;
    let layout = DispatchLayout { rows: a.rows(0)?, k: a.cols(0)?, experts };
    // (row, choice) pairs of each expert, flattened, in order of rows.
    let mut members: Vec<Vec<usize>> = vec![Vec::new(); experts];
    for (pair, &id) in ids.iter().enumerate().filter(|&(_, &id)| !(partial && id == -1)) {
        members[a.index("expert", id, experts)?].push(pair);
    }
    let mut active: Vec<usize> = (0..experts).filter(|&e| !members[e].is_empty()).collect();
    active.sort_by_key(|&e| (Reverse(members[e].len()), e));
    let mut table = vec![0; layout.words()];
    table[0] = active.len() as i32;
    table[1] = ids.len() as i32;
    table[layout.slot()..].fill(-1);
    let mut slot = 0;
    for (i, &e) in active.iter().enumerate() {
        table[layout.expert() + i] = e as i32;
        table[layout.start() + i] = slot as i32;
        for &pair in &members[e] {
            table[layout.token() + slot] = (pair / layout.k) as i32;
            table[layout.slot() + pair] = slot as i32;
            slot += 1;
        }
    }
    table[layout.start() + active.len()] = slot as i32;
    Ok(table)
}

/// A dispatch table as it is.
pub(super) fn table<'a>(a: &Args<'a>) -> Result<&'a [i32], EvalError> {
    a.i32(0)
}

/// What static graphs take, and what is served elsewhere.
pub(super) fn admit(a: &Args<'_>, d: &AdmitDesc) -> Result<[Vec<i32>; 2], EvalError> {
    let (ids, k, added, pos) = (a.i32(0)?, a.cols(0)?, a.f32(1)?, a.i32(2)?);
    let norm = |row: usize| {
        let row = added.chunks_exact(a.cols(1).unwrap_or(1)).nth(row).unwrap_or_default();
        row.iter().map(|&x| f64::from(x) * f64::from(x)).sum::<f64>().sqrt() as f32
    };
    let (mut stay, mut rest) = (vec![-1; ids.len()], vec![-1; ids.len()]);
    let mut members: Vec<Vec<usize>> = vec![Vec::new(); d.capacities.len()];
    for (pair, &id) in ids.iter().enumerate().filter(|(pair, _)| pos[pair / k] >= 0) {
        members[a.index("expert", id, d.capacities.len())?].push(pair);
    }
    for ((e, mut pairs), &capacity) in members.into_iter().enumerate().zip(&d.capacities) {
        // Stable: of equal norms the lowest row stays. What is no number counts as the highest.
        pairs.sort_by(|&a, &b| {
            let (a, b) = (norm(a / k), norm(b / k));
            b.partial_cmp(&a).unwrap_or_else(|| b.is_nan().cmp(&a.is_nan()))
        });
        for (place, pair) in pairs.into_iter().enumerate() {
            if place < capacity as usize {
                stay[pair] = e as i32;
            } else if capacity == 0 || d.spill {
                rest[pair] = e as i32;
            }
        }
    }
    Ok([stay, rest])
}

/// Slots that no active expert has are 0.
pub(super) fn expert_ffn(
    a: &Args<'_>,
    glu: Glu,
    bias: bool,
    results: &[Type],
) -> Result<Vec<f32>, EvalError> {
    let (rows, hidden, x, table) = (a.rows(0)?, a.cols(0)?, a.f32(0)?, a.i32(1)?);
    let (experts, gate_up, down) = (a.rows(2)?, a.f32(2)?, a.f32(3)?);
    let slots = results.first().map_or(0, Type::rows);
    let layout = DispatchLayout { rows, k: slots / rows, experts };
    let (gate_up_size, down_size) = (gate_up.len() / experts, down.len() / experts);
    let inner = down_size / hidden;
    let mut out = vec![0.0; slots * hidden];
    let active = a.index("number of active experts", table[0], experts + 1)?;
    for i in 0..active {
        let e = a.index("expert", table[layout.expert() + i], experts)?;
        let first = a.index("slot", table[layout.start() + i], slots + 1)?;
        let end = a.index("slot", table[layout.start() + i + 1], slots + 1)?;
        let (mut gate_up_bias, mut down_bias) = (None, None);
        if bias {
            gate_up_bias = Some(&a.f32(4)?[e * 2 * inner..(e + 1) * 2 * inner]);
            down_bias = Some(&a.f32(5)?[e * hidden..(e + 1) * hidden]);
        }
        for slot in first..end {
            let row = a.index("row", table[layout.token() + slot], rows)?;
            let x = &x[row * hidden..(row + 1) * hidden];
            let h = gated(x, &gate_up[e * gate_up_size..(e + 1) * gate_up_size], gate_up_bias, glu);
            let y = matvec(&h, &down[e * down_size..(e + 1) * down_size], down_bias);
            out[slot * hidden..(slot + 1) * hidden].copy_from_slice(&y);
        }
    }
    Ok(out)
}

/// Slots that no active expert has are 0.
pub(super) fn neuron_ffn(
    a: &Args<'_>,
    glu: Glu,
    predict: Option<Predictor>,
    results: &[Type],
) -> Result<Vec<f32>, EvalError> {
    let (rows, hidden, x) = (a.rows(0)?, a.cols(0)?, a.f32(0)?);
    let row = |i: usize| &x[i * hidden..(i + 1) * hidden];
    let table = a.i32(1)?;
    let neurons = bundles(a, hidden)?;
    let experts = a.get(2)?.ty.shape.first().copied().unwrap_or(1);
    let slots = results.first().map_or(0, Type::rows);
    let layout = DispatchLayout { rows, k: slots / rows, experts };
    let size = neurons.len() / experts;
    let mut out = vec![0.0; slots * hidden];
    let active = a.index("number of active experts", table[0], experts + 1)?;
    for i in 0..active {
        let e = a.index("expert", table[layout.expert() + i], experts)?;
        let first = a.index("slot", table[layout.start() + i], slots + 1)?;
        let end = a.index("slot", table[layout.start() + i + 1], slots + 1)?;
        for slot in first..end {
            let x = row(a.index("row", table[layout.token() + slot], rows)?);
            let said = predict.map(|p| predicted(a, p, e, experts, x)).transpose()?;
            let y = by_neurons(x, &neurons[e * size..(e + 1) * size], glu, said.as_deref());
            out[slot * hidden..(slot + 1) * hidden].copy_from_slice(&y);
        }
    }
    Ok(out)
}

/// The bundles of all neurons, whether gates lie apart or not.
fn bundles<'a>(a: &'a Args<'_>, hidden: usize) -> Result<Cow<'a, [f32]>, EvalError> {
    let first = a.f32(2)?;
    // Gates by themselves are as wide as a row.
    if a.cols(2)? != hidden {
        return Ok(Cow::Borrowed(first));
    }
    let rests = a.f32(3)?.chunks_exact(2 * hidden);
    Ok(first.chunks_exact(hidden).zip(rests).flat_map(|(gate, rest)| [gate, rest].concat()).collect())
}

/// What a predictor says of the neurons of an expert.
fn predicted(
    a: &Args<'_>,
    predict: Predictor,
    e: usize,
    experts: usize,
    x: &[f32],
) -> Result<Vec<f32>, EvalError> {
    let of = |i: usize| -> Result<&[f32], EvalError> {
        let all = a.f32(i)?;
        let size = all.len() / experts;
        Ok(&all[e * size..(e + 1) * size])
    };
    Ok(match predict {
        Predictor::LowRank => matvec(&matvec(x, of(3)?, None), of(4)?, Some(of(5)?)),
        Predictor::Coarse => matvec(x, of(3)?, Some(of(4)?)),
    })
}

/// A row through the bundles of a network: gate, up, down. A neuron of which a predictor says 0 or less is passed over.
fn by_neurons(x: &[f32], bundles: &[f32], glu: Glu, predicted: Option<&[f32]>) -> Vec<f32> {
    let mut sums = vec![0.0_f64; x.len()];
    for (i, bundle) in bundles.chunks_exact(3 * x.len()).enumerate() {
        if predicted.and_then(|said| said.get(i)).is_some_and(|&said| said <= 0.0) {
            continue;
        }
        let (gate, rest) = bundle.split_at(x.len());
        let (up, down) = rest.split_at(x.len());
        let gate = dot(x, gate) as f32;
        if silent(glu, gate) {
            continue;
        }
        let h = f64::from(join(glu, gate, dot(x, up) as f32));
        for (sum, &down) in sums.iter_mut().zip(down) {
            *sum += h * f64::from(down);
        }
    }
    sums.into_iter().map(|sum| sum as f32).collect()
}

/// Whether the gate alone makes the result 0.
fn silent(glu: Glu, gate: f32) -> bool {
    match glu {
        Glu::Gated(Activation::Relu) | Glu::DRelu => gate <= 0.0,
        Glu::FatRelu { threshold } => gate < threshold,
        Glu::Cats { threshold } => activate(Activation::Silu, gate).abs() < threshold,
        Glu::Gated(_) | Glu::Clamped { .. } => false,
    }
}

/// Rows past those that the table counts are padding, and 0.
pub(super) fn combine(a: &Args<'_>, partial: bool) -> Result<Vec<f32>, EvalError> {
    let (slots, hidden, y, table) = (a.rows(0)?, a.cols(0)?, a.f32(0)?, a.i32(1)?);
    let (rows, k, weights) = (a.rows(2)?, a.cols(2)?, a.f32(2)?);
    // The slots of the pairs are the last words of the table.
    let of_pair = &table[table.len() - slots..];
    let valid = a.index("number of slots", table[1], slots + 1)? / k;
    let mut out = Vec::new();
    for row in 0..rows {
        let mut sum = vec![0.0_f64; hidden];
        if row < valid {
            for pair in (row * k..(row + 1) * k).filter(|&pair| !(partial && of_pair[pair] == -1)) {
                let slot = a.index("slot", of_pair[pair], slots)?;
                for (s, &y) in sum.iter_mut().zip(&y[slot * hidden..(slot + 1) * hidden]) {
                    *s += f64::from(weights[pair]) * f64::from(y);
                }
            }
        }
        out.extend(sum.into_iter().map(|s| s as f32));
    }
    Ok(out)
}
