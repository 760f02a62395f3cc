//! Ranges of activations on real rows, and how much wider their codes should reach.
//!
//! A range that is too narrow saturates and dominates every other error; one that is too wide wastes codes.
//! So margins are measured: rows of one half of a text give ranges, and rows of the other half show the
//! smallest margin without saturation. Unseen text is expected to exceed both halves by as much as one half
//! exceeds the other: the margin widens the range of both together. [`RangeObserver`] collects it from runs in f32.
#![expect(clippy::cast_possible_truncation, reason = "bins of a histogram")]

use crate::exec::{ExecError, Executor, Outcome, Values};
use crate::quant::{Range, Ranges};
use std::collections::BTreeMap;

/// Margins that are tried, in order: factors on both ends of a range.
pub const MARGINS: [f32; 10] = [1.0, 1.05, 1.1, 1.25, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0];
/// Bins of a power of two in a histogram of magnitudes.
const BINS: i32 = 8;
/// Powers of two of the smallest and largest magnitude that are distinguished.
const POWERS: (i32, i32) = (-24, 24);
/// Share of a range that either end of it reaches in any case.
const SLACK: f32 = 1.0 / 64.0;

/// Observed range of an activation.
#[derive(Clone, Debug, PartialEq)]
pub struct ObservedRange {
    /// Range of the rows that ranges are taken from.
    pub range: Range,
    /// Range of the rows that margins are measured on.
    pub held_out: Range,
    /// Numbers in all.
    pub count: u64,
    magnitudes: Vec<u64>,
}

impl Default for ObservedRange {
    fn default() -> Self {
        let bins = (POWERS.1 - POWERS.0) * BINS + 1;
        Self {
            range: Range::default(),
            held_out: Range::default(),
            count: 0,
            magnitudes: vec![0; bins as usize],
        }
    }
}

impl ObservedRange {
    fn add(&mut self, reals: &[f32], held: bool) {
        let range = Range::of(reals.iter().copied());
        let of = if held { &mut self.held_out } else { &mut self.range };
        *of = of.and(range);
        self.count += reals.len() as u64;
        for x in reals {
            self.magnitudes[bin(x.abs())] += 1;
        }
    }

    /// The smallest margin with which no value of the held-out rows is clamped; `None` if even the largest
    /// clamps some. Values that are small compared with the activation's range are ignored, since a range
    /// that ends near zero gives no meaningful factor.
    pub fn margin(&self) -> Option<f32> {
        let slack = self.slack();
        let holds = |margin: &f32| {
            let wide = self.range.widened(*margin);
            self.held_out.least >= wide.least.min(slack.least)
                && self.held_out.most <= wide.most.max(slack.most)
        };
        MARGINS.into_iter().find(holds)
    }

    /// Observed range of both halves.
    pub fn all(&self) -> Range {
        let both = self.range.and(self.held_out);
        let slack = self.slack();
        // An end of exactly zero, as after a Relu, stays zero.
        let end = |seen: f32, slack: f32| if seen == 0.0 { 0.0 } else { slack };
        both.and(Range { least: end(both.least, slack.least), most: end(both.most, slack.most) })
    }

    fn slack(&self) -> Range {
        let slack = (self.range.most - self.range.least) * SLACK;
        Range { least: -slack, most: slack }
    }

    /// A magnitude that at most a share of all numbers exceed, to an eighth of a power of two; 0 where
    /// nothing was seen.
    pub fn quantile(&self, exceed: f64) -> f32 {
        let allowed = (self.count as f64 * exceed) as u64;
        let mut above = 0;
        for (i, n) in self.magnitudes.iter().enumerate().rev() {
            above += n;
            if above > allowed {
                return ((i as f32 / BINS as f32) + POWERS.0 as f32).exp2();
            }
        }
        0.0
    }
}

fn bin(magnitude: f32) -> usize {
    let power = magnitude.log2().clamp(POWERS.0 as f32, POWERS.1 as f32);
    if power.is_nan() { 0 } else { ((power - POWERS.0 as f32) * BINS as f32).ceil() as usize }
}

/// Observes the range of every activation of a network.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct RangeObserver {
    seen: BTreeMap<String, ObservedRange>,
}

impl RangeObserver {
    /// Runs a network in f32 on some rows; returns its results. `held`: the rows measure margins, and give no
    /// ranges.
    ///
    /// # Errors
    /// Inputs that do not fit.
    pub fn run(
        &mut self,
        executor: &Executor,
        inputs: &[&[f32]],
        held_out: bool,
    ) -> Result<Outcome, ExecError> {
        executor.watch(inputs, &mut |tensor, values| {
            if let Values::Reals(reals) = values {
                self.seen.entry(tensor.name.clone()).or_default().add(reals, held_out);
            }
        })
    }

    /// Observed ranges, by the name of the tensor.
    pub fn observed(&self) -> &BTreeMap<String, ObservedRange> {
        &self.seen
    }

    /// Observed range of both halves, each activation widened by its margin, or by `headroom` if that is
    /// more. It should be more than 1: codes have errors, and values at the end of a range, such as the
    /// lowest point of SiLU, would then be outside.
    pub fn ranges(&self, headroom: f32) -> Ranges {
        let last = MARGINS[MARGINS.len() - 1];
        let of = |seen: &ObservedRange| seen.all().widened(seen.margin().unwrap_or(last).max(headroom));
        self.seen.iter().map(|(name, seen)| (name.clone(), of(seen))).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn seen(range: &[f32], held: &[f32]) -> ObservedRange {
        let mut seen = ObservedRange::default();
        seen.add(range, false);
        seen.add(held, true);
        seen
    }

    #[test]
    fn smallest_margin_without_clipping_is_chosen() {
        assert_eq!(seen(&[-1.0, 2.0], &[0.5]).margin(), Some(1.0));
        assert_eq!(seen(&[-1.0, 2.0], &[2.15]).margin(), Some(1.1));
        assert_eq!(seen(&[-1.0, 2.0], &[-2.9]).margin(), Some(3.0));
        let far = seen(&[-1.0, 2.0], &[-100.0]);
        assert_eq!(far.margin(), None);
        let watch = RangeObserver { seen: [("x".to_owned(), far)].into() };
        assert_eq!(watch.ranges(1.25)["x"], Range { least: -800.0, most: 16.0 });
    }

    #[test]
    fn cross_validated_margins_widen_all_ranges() {
        let seen = [("x", seen(&[-1.0, 2.0], &[0.5])), ("relu", seen(&[0.0, 4.0], &[6.0]))];
        let watch = RangeObserver { seen: seen.map(|(name, seen)| (name.to_owned(), seen)).into() };
        let ranges = watch.ranges(1.25);
        assert_eq!(ranges["x"], Range { least: -1.25, most: 2.5 });
        assert_eq!((ranges["relu"].least, ranges["relu"].most), (0.0, 6.0 * 1.5));
    }

    #[test]
    fn range_end_near_zero_needs_no_margin() {
        let seen = seen(&[-0.001, 1.0], &[-0.01, 1.0]);
        assert_eq!((seen.margin(), seen.all().most), (Some(1.0), 1.0));
        assert!((seen.all().least + 1.001 / 64.0).abs() < 1e-6);
    }

    #[test]
    fn quantiles_are_accurate_to_an_eighth_octave() {
        let numbers: Vec<f32> = (1..=1000).map(|i| i as f32 / 10.0).collect();
        let all = seen(&numbers, &[]);
        for (exceed, want) in [(0.0, 100.0), (0.01, 99.0), (0.5, 50.0)] {
            let got = all.quantile(exceed);
            assert!(got >= want * 0.999 && got <= want * 1.1, "{exceed}: {got}");
        }
    }
}
