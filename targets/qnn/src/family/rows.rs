//! Rows like those that experts meet, for measuring how wide activations are.
//!
//! Experts read what an RMS norm gives, so that `Σ (x/gain)²` over the channels of a row is their number. Calibration knows
//! how the squares are divided between channels; together both say how large each channel is on average. Rows are drawn
//! with these variances. They lack the tails of real ones, for which ranges are widened ([`HEADROOM`]).

use super::weights::Part;
use moec_family::Numbers;
use moec_family::error::{Error, Result};
use moec_ir::{Module, Op, Operand, WeightId};

/// How much wider codes reach than what was drawn: two of sixteen bits are given for what is rare.
pub(super) const HEADROOM: f32 = 4.0;

/// Standard deviations of the channels that experts of a layer read.
///
/// # Errors
/// Experts that read no RMS norm; a file that cannot be read.
pub(super) fn deviations(
    module: &Module,
    layer: u32,
    gate_up: WeightId,
    numbers: &dyn Numbers,
) -> Result<Vec<f32>> {
    let weight = module.weight(gate_up);
    let gain = gain(module, layer, weight.cols(), numbers)?;
    let share = numbers.importance(weight, 0).filter(|s| s.len() == gain.len());
    let share = share.unwrap_or_else(|| gain.iter().map(|g| g * g).collect());
    let normed: f64 =
        share.iter().zip(&gain).filter(|(_, g)| **g != 0.0).map(|(s, g)| f64::from(s / (g * g))).sum();
    let factor = if normed > 0.0 { gain.len() as f64 / normed } else { 1.0 };
    Ok(share.iter().map(|s| (f64::from(*s) * factor).sqrt() as f32).collect())
}

/// The gain of the norm in front of the experts of a layer; 1 everywhere where rewriting has folded it into matrices.
fn gain(module: &Module, layer: u32, channels: usize, numbers: &dyn Numbers) -> Result<Vec<f32>> {
    let missing = || {
        Error::limit(format!("experts of layer {layer} do not read an RMS norm"))
            .because("how wide their activations are follows from the norm")
            .hint("set `experts = \"cpu\"` under `[placement]`")
    };
    let graph = module.entries.first().ok_or_else(missing)?;
    let node =
        graph.nodes.iter().find(|n| n.scope.layer == Some(layer) && matches!(n.op, Op::ExpertFfn { .. }));
    let mut operand = node.and_then(|n| n.inputs.first().copied()).ok_or_else(missing)?;
    loop {
        let Operand::Value(value) = operand else { return Err(missing()) };
        let node = graph.def(value).and_then(|id| graph.nodes.get(id.0 as usize)).ok_or_else(missing)?;
        match node.op {
            Op::ToNchw | Op::FromNchw => operand = *node.inputs.first().ok_or_else(missing)?,
            Op::RmsNorm { weight: false, groups: 1, .. } => return Ok(vec![1.0; channels]),
            Op::RmsNorm { weight: true, groups: 1, .. } => {
                let Some(Operand::Weight(id)) = node.inputs.get(1).copied() else { return Err(missing()) };
                let gain = Part { weight: module.weight(id), lead: 0, rows: 0..1 }.read(numbers)?;
                return if gain.len() == channels { Ok(gain) } else { Err(missing()) };
            }
            _ => return Err(missing()),
        }
    }
}

/// Rows with these deviations, the same in every build: a sum of twelve even numbers is nearly normal.
pub(super) fn drawn(deviations: &[f32], rows: usize, seed: u64) -> Vec<f32> {
    let mut state = seed;
    // SplitMix64 (Steele, Lea and Flood 2014).
    let mut next = move || {
        state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = state;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((z ^ (z >> 31)) >> 40) as f32 / (1 << 24) as f32
    };
    let mut normal = move || (0..12).map(|_| next()).sum::<f32>() - 6.0;
    (0..rows).flat_map(|_| deviations.iter().map(|d| d * normal()).collect::<Vec<_>>()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_have_the_deviations_and_are_the_same_again() {
        let rows = drawn(&[1.0, 0.0, 10.0], 4000, 7);
        assert_eq!(rows, drawn(&[1.0, 0.0, 10.0], 4000, 7));
        for (c, want) in [1.0, 0.0, 100.0].into_iter().enumerate() {
            let square: f32 = rows.chunks(3).map(|r| r[c] * r[c]).sum::<f32>() / 4000.0;
            assert!((square - want).abs() <= 0.08 * want, "{c}: {square}");
        }
    }
}
