//! Routing, as [`RouterDesc`] defines it.
//!
//! Scores are rounded to f32 before the choice is made on them, since two experts tie where their f32
//! scores do.

use super::basic::{sigmoid, softmax};
use super::{Args, EvalError};
use crate::op::{GroupScore, Groups, Renorm, RouterDesc, Score, WeightFrom};
use std::cmp::Ordering;

/// The `n` largest, in descending order; the lowest index wins ties. NaN is never among them, so there may be fewer.
fn top(x: &[f32], n: usize) -> Vec<usize> {
    let mut order: Vec<usize> = (0..x.len()).filter(|&i| !x[i].is_nan()).collect();
    // The sort is stable: equal numbers keep their order.
    order.sort_by(|&i, &j| x[j].partial_cmp(&x[i]).unwrap_or(Ordering::Equal));
    order.truncate(n);
    order
}

fn scores(z: &[f32], score: Score) -> Vec<f32> {
    match score {
        Score::Softmax => softmax(z).into_iter().map(|p| p as f32).collect(),
        Score::Sigmoid => z.iter().map(|&z| sigmoid(f64::from(z)) as f32).collect(),
        Score::Identity => z.to_vec(),
    }
}

/// Masks the experts outside of the best groups. NaN counts as −∞ in a group's score, and stays NaN.
fn mask_groups(choice: &mut [f32], g: Groups) {
    let size = choice.len() / g.n;
    let largest = match g.score {
        GroupScore::Max => 1,
        GroupScore::Top2Sum => size.min(2),
    };
    let of_groups: Vec<f32> = choice
        .chunks_exact(size)
        .map(|group| {
            let numbers = top(group, largest).into_iter().map(|i| group[i]);
            numbers.chain(std::iter::repeat(f32::NEG_INFINITY)).take(largest).sum()
        })
        .collect();
    let kept = top(&of_groups, g.keep);
    let masked = if g.mask_neg_inf { f32::NEG_INFINITY } else { 0.0 };
    for (i, group) in choice.chunks_exact_mut(size).enumerate() {
        if !kept.contains(&i) {
            group.iter_mut().filter(|c| !c.is_nan()).for_each(|c| *c = masked);
        }
    }
}

/// SparseMixer's weight of expert `at`, the largest of `candidates`: the softmax over the candidates that
/// are near it. `z` are the original logits, from which nearness is measured; `removed` is −∞ in the softmax.
fn sparse_mixer(z: &[f32], at: usize, removed: Option<usize>, eps: f32) -> f64 {
    let max = z[at];
    let kept = z.iter().enumerate().filter(|&(j, &zj)| {
        // `!(a > b)`, since 0/0 keeps the expert.
        let far = (max - zj) / zj.abs().max(max) > 2.0 * eps;
        !far && Some(j) != removed
    });
    let sum: f64 = kept.map(|(_, &zj)| (f64::from(zj) - f64::from(max)).exp()).sum();
    1.0 / sum
}

fn weights(z: &[f32], s: &[f32], chosen: &[usize], d: &RouterDesc) -> Vec<f64> {
    let mut w: Vec<f64> = match d.weight_from {
        WeightFrom::Score => chosen.iter().map(|&i| f64::from(s[i])).collect(),
        WeightFrom::SoftmaxTopk => softmax(&chosen.iter().map(|&i| z[i]).collect::<Vec<_>>()),
        WeightFrom::SigmoidTopk => chosen.iter().map(|&i| sigmoid(f64::from(z[i]))).collect(),
        WeightFrom::SparseMixer { eps } => {
            let removed = std::iter::once(None).chain(chosen.iter().map(|&i| Some(i)));
            chosen.iter().zip(removed).map(|(&i, removed)| sparse_mixer(z, i, removed, eps)).collect()
        }
    };
    let sum: f64 = w.iter().sum();
    let divisor = match d.renorm {
        Renorm::None => 1.0,
        Renorm::Sum { eps } => sum + f64::from(eps),
        Renorm::Clamp { min } => sum.max(f64::from(min)),
    };
    for w in &mut w {
        *w = *w / divisor * f64::from(d.scale);
    }
    w
}

/// Experts and weights of every row, `[T, k]` each. A row with fewer numbers among its scores than experts to choose is an error.
pub(super) fn router(a: &Args<'_>, d: &RouterDesc) -> Result<(Vec<i32>, Vec<f32>), EvalError> {
    let bias = if d.select_bias { Some(a.f32(1)?) } else { None };
    let (mut ids, mut out) = (Vec::new(), Vec::new());
    for (row, z) in a.f32(0)?.chunks_exact(d.experts).enumerate() {
        let s = scores(z, d.score);
        let mut choice = s.clone();
        for (c, b) in choice.iter_mut().zip(bias.unwrap_or_default()) {
            *c += b;
        }
        if let Some(groups) = d.groups {
            mask_groups(&mut choice, groups);
        }
        let chosen = top(&choice, d.k);
        if chosen.len() < d.k {
            let (numbers, experts, k) = (choice.iter().filter(|c| !c.is_nan()).count(), d.experts, d.k);
            return Err(a.error(format!(
                "row {row}: of the scores of {experts} experts {numbers} are numbers, the others NaN, and {k} experts are to be chosen"
            )));
        }
        out.extend(weights(z, &s, &chosen, d).into_iter().map(|w| w as f32));
        ids.extend(chosen.into_iter().map(|i| i as i32));
    }
    Ok((ids, out))
}
