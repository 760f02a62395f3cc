//! Rows by which ranges are measured: rows of real text that calibration kept, or else random rows with the
//! same statistics.
//!
//! Experts read the output of an RMS norm, so the sum of `(x/gain)²` over the channels of a row is the number
//! of channels. Calibration knows how the squares are divided between channels; together both give the
//! average size of each channel. Rows are drawn with these variances. They lack the tails of real ones, for
//! which ranges are widened ([`HEADROOM`]).
#![expect(clippy::cast_possible_truncation, reason = "sizes of one layer, which the import bounds")]

use super::weights::MatrixSlice;
use moec_backend::Numbers;
use moec_backend::error::{Error, Result};
use moec_ir::{Module, Op, Operand, Weight, WeightId};

/// Factor by which codes reach at least beyond the observed range: two of sixteen bits are given to rare
/// values. On text that calibration has not read, networks diverge least from 4 to 16 (docs/qnn-networks.md,
/// Ranges).
pub(super) const HEADROOM: f32 = 4.0;
/// With fewer rows of text, ranges are too uncertain.
const ENOUGH: usize = 32;
/// Rows of a run.
pub(super) const RUN_ROWS: usize = 32;
/// Runs of drawn rows; every other one measures margins.
const DRAWN_RUNS: u64 = 4;

/// Rows that one layer's networks are measured by.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Sample {
    /// Rows of text, `[n, H]`.
    Text { rows: Vec<f32>, hidden: usize },
    /// Standard deviations `[H]` of the random rows.
    Drawn(Vec<f32>),
}

impl Sample {
    /// For networks that begin with a weight: rows of text if calibration has kept enough, else the random
    /// rows of `drawn`.
    ///
    /// # Errors
    /// Errors of `drawn`; a file that cannot be read.
    pub(super) fn new(
        numbers: &dyn Numbers,
        module: &Module,
        weight: WeightId,
        drawn: impl FnOnce() -> Result<Vec<f32>>,
    ) -> Result<Self> {
        let weight = module.weight(weight);
        let hidden = weight.cols();
        let rows = numbers.rows(weight)?.filter(|rows| rows.len() >= ENOUGH * hidden);
        Ok(match rows {
            Some(rows) => Self::Text { rows, hidden },
            None => Self::Drawn(drawn()?),
        })
    }

    /// Runs of [`RUN_ROWS`] rows each, and whether a run measures margins.
    pub(super) fn runs(&self) -> Vec<(Vec<f32>, bool)> {
        match self {
            Self::Text { rows, hidden } => {
                // Rows come in an order that is independent of their contents.
                let (seen, held) = rows.split_at(rows.len() / hidden / 2 * hidden);
                let of = |half: &[f32], held: bool| -> Vec<(Vec<f32>, bool)> {
                    let runs = half.chunks(RUN_ROWS * hidden);
                    runs.map(|run| (cycled(run, RUN_ROWS * hidden), held)).collect()
                };
                [of(seen, false), of(held, true)].concat()
            }
            Self::Drawn(deviations) => {
                (0..DRAWN_RUNS).map(|seed| (drawn(deviations, RUN_ROWS, seed), seed % 2 == 1)).collect()
            }
        }
    }

    /// At most `most` rows to verify networks by: rows of text that measured margins come first.
    pub(super) fn verification_rows(&self, most: usize) -> Vec<f32> {
        match self {
            Self::Text { rows, hidden } => {
                let (seen, held) = rows.split_at(rows.len() / hidden / 2 * hidden);
                held.iter().chain(seen).take(most * hidden).copied().collect()
            }
            Self::Drawn(deviations) => drawn(deviations, most, 0),
        }
    }
}

/// The first `count` numbers; if there are fewer, they repeat from the first.
pub(super) fn cycled(of: &[f32], count: usize) -> Vec<f32> {
    of.iter().cycle().take(count).copied().collect()
}

/// Standard deviations of the channels of an operand, which a weight is multiplied by.
///
/// # Errors
/// An operand that no RMS norm gives; a file that cannot be read.
pub(super) fn deviations(
    module: &Module,
    x: Operand,
    weight: WeightId,
    numbers: &dyn Numbers,
) -> Result<Vec<f32>> {
    let weight = module.weight(weight);
    let gain = gain(module, x, weight, numbers)?;
    let share = numbers.importance(weight, 0).filter(|s| s.len() == gain.len());
    let share = share.unwrap_or_else(|| gain.iter().map(|g| g * g).collect());
    let normed: f64 =
        share.iter().zip(&gain).filter(|(_, g)| **g != 0.0).map(|(s, g)| f64::from(s / (g * g))).sum();
    let factor = if normed > 0.0 { gain.len() as f64 / normed } else { 1.0 };
    Ok(share.iter().map(|s| (f64::from(*s) * factor).sqrt() as f32).collect())
}

/// The gain of the norm that gives an operand; 1 everywhere where rewriting has folded it into matrices.
fn gain(module: &Module, x: Operand, reader: &Weight, numbers: &dyn Numbers) -> Result<Vec<f32>> {
    let missing = || {
        Error::limit(format!("`{}` does not read an RMS norm", reader.name))
            .because("without rows of text, the range of its activations is derived from the norm")
            .hint("record the profile again with `moec calibrate`, which stores rows of text")
    };
    let graph = module.entries.first().ok_or_else(missing)?;
    let mut operand = x;
    loop {
        let Operand::Value(value) = operand else { return Err(missing()) };
        let node = graph.def(value).and_then(|id| graph.nodes.get(id.0 as usize)).ok_or_else(missing)?;
        match node.op {
            Op::GatherRows => {
                operand = *node.inputs.first().ok_or_else(missing)?;
            }
            Op::RmsNorm { weight: false, groups: 1, .. } => return Ok(vec![1.0; reader.cols()]),
            Op::RmsNorm { weight: true, groups: 1, .. } => {
                let Some(Operand::Weight(id)) = node.inputs.get(1).copied() else { return Err(missing()) };
                let gain = MatrixSlice { weight: module.weight(id), matrix: 0, rows: 0..1 }.read(numbers)?;
                return if gain.len() == reader.cols() { Ok(gain) } else { Err(missing()) };
            }
            _ => return Err(missing()),
        }
    }
}

/// Rows with these deviations, the same in every build: a sum of twelve even numbers is nearly normal.
fn drawn(deviations: &[f32], rows: usize, seed: u64) -> Vec<f32> {
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
    fn all_text_rows_are_used_half_for_margins() {
        let rows: Vec<f32> = (0..100 * 2).map(|i| i as f32).collect();
        let sample = Sample::Text { rows: rows.clone(), hidden: 2 };
        let runs = sample.runs();
        assert!(runs.iter().all(|(run, _)| run.len() == RUN_ROWS * 2));
        let of = |held_out: bool| -> std::collections::BTreeSet<u32> {
            runs.iter()
                .filter(|(_, held)| *held == held_out)
                .flat_map(|(run, _)| run)
                .map(|x| *x as u32)
                .collect()
        };
        assert_eq!((of(false), of(true)), ((0..100).collect(), (100..200).collect()));
        assert_eq!(sample.verification_rows(51), [&rows[100..], &rows[..2]].concat());
    }

    #[test]
    fn drawn_rows_have_their_deviations_and_are_reproducible() {
        let rows = drawn(&[1.0, 0.0, 10.0], 4000, 7);
        assert_eq!(rows, drawn(&[1.0, 0.0, 10.0], 4000, 7));
        for (c, want) in [1.0, 0.0, 100.0].into_iter().enumerate() {
            let square: f32 = rows.chunks(3).map(|r| r[c] * r[c]).sum::<f32>() / 4000.0;
            assert!((square - want).abs() <= 0.08 * want, "{c}: {square}");
        }
    }
}
