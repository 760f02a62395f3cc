//! Magnitudes of the gates of experts after SiLU: the basis of thresholds (CATS, arXiv 2404.08763).
//!
//! A profile keeps a histogram of `|silu(x · gate)|` over tokens, the experts that they chose, and all
//! neurons of these. It is taken from a sample, which is sufficient for quantiles. From it follow the
//! threshold for a share of zeros, and the share for a threshold.
#![expect(clippy::cast_possible_truncation, reason = "statistics: floats are clamped and rounded")]

use super::{MOST, MOST_TOKENS, ProfileFault};
use bincode::{Decode, Encode};

/// Bins per doubling of the magnitude.
const PER_OCTAVE: f64 = 32.0;
/// Exponent of the lower edge of the first bin, `2^LOWEST`; smaller magnitudes are in that bin, too.
const LOWEST: f64 = -24.0;
/// Number of bins; the last one ends at 2⁸.
const BINS: usize = 1024;

/// Magnitudes of the gates of a layer's experts.
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
pub struct Gates {
    /// Layer.
    pub layer: u32,
    /// The matrix of gate and up, by its name in the lowered Graph.
    pub weight: String,
    /// Number of gates by the logarithm of their magnitude.
    bins: Vec<u64>,
}

/// Lower edge of a bin.
fn edge(bin: usize) -> f64 {
    (bin as f64 / PER_OCTAVE + LOWEST).exp2()
}

/// The bin of a magnitude, and its position in the bin, in `[0, 1]`.
fn place(magnitude: f64) -> (usize, f64) {
    let at = ((magnitude.log2() - LOWEST) * PER_OCTAVE).clamp(0.0, BINS as f64);
    let bin = (at as usize).min(BINS - 1);
    (bin, at - bin as f64)
}

impl Gates {
    /// An empty histogram of a layer.
    pub fn new(layer: u32, weight: String) -> Self {
        Self { layer, weight, bins: vec![0; BINS] }
    }

    /// Counts a gate after SiLU. NaN is not counted.
    pub fn add(&mut self, silu: f32) {
        if !silu.is_nan() {
            self.bins[place(f64::from(silu.abs())).0] += 1;
        }
    }

    /// Number of counted gates.
    pub fn counted(&self) -> u64 {
        self.bins.iter().sum()
    }

    /// The magnitude that a share of the gates is below; 0 if the share is 0 or nothing was counted. Within a
    /// bin gates are assumed to be uniform by their logarithm: the error is less than a bin, 2 %.
    pub fn quantile(&self, share: f64) -> f32 {
        let target = share.clamp(0.0, 1.0) * self.counted() as f64;
        if target <= 0.0 {
            return 0.0;
        }
        let mut below = 0.0;
        for (bin, &n) in self.bins.iter().enumerate() {
            let n = n as f64;
            if n > 0.0 && below + n >= target {
                let (from, to) = (edge(bin), edge(bin + 1));
                return (from * (to / from).powf((target - below) / n)) as f32;
            }
            below += n;
        }
        edge(BINS) as f32
    }

    /// Share of the gates below a magnitude; `None` if nothing was counted.
    pub fn below(&self, magnitude: f32) -> Option<f64> {
        let all = self.counted();
        let (bin, part) = place(f64::from(magnitude));
        let lower: u64 = self.bins.iter().take(bin).sum();
        let own = self.bins.get(bin).map_or(0.0, |&n| n as f64 * part);
        (all > 0).then(|| (lower as f64 + own) / all as f64)
    }

    /// Merges two histograms.
    fn merge(&self, other: &Self) -> Self {
        let bins = self.bins.iter().zip(&other.bins).map(|(a, b)| a.saturating_add(*b)).collect();
        Self { bins, ..self.clone() }
    }

    fn check(&self) -> Result<(), ProfileFault> {
        if self.bins.len() != BINS || self.weight.is_empty() || self.weight.len() > 256 {
            return Err(format!("{} bins of the gates of {:?}", self.bins.len(), self.weight));
        }
        // A token has thousands of gates.
        let most = MOST_TOKENS.saturating_mul(1 << 12);
        let sum = self.bins.iter().try_fold(0_u64, |sum, &n| sum.checked_add(n));
        if sum.is_some_and(|n| n <= most) {
            Ok(())
        } else {
            Err("more gates than anyone can count".to_owned())
        }
    }
}

/// Merges gates by their weights. Those in one profile only stay as they are.
pub(super) fn merge(a: &[Gates], b: &[Gates]) -> Vec<Gates> {
    let same = |x: &Gates, y: &Gates| (x.layer, &x.weight) == (y.layer, &y.weight);
    let both = a.iter().map(|x| b.iter().find(|y| same(x, y)).map_or_else(|| x.clone(), |y| x.merge(y)));
    let rest = b.iter().filter(|y| !a.iter().any(|x| same(x, y))).cloned();
    let mut all: Vec<_> = both.chain(rest).collect();
    all.sort_by(|x, y| (x.layer, &x.weight).cmp(&(y.layer, &y.weight)));
    all
}

/// Checks the gates of a profile.
pub(super) fn check(all: &[Gates]) -> Result<(), ProfileFault> {
    if all.len() > MOST || !all.is_sorted_by(|a, b| (a.layer, &a.weight) < (b.layer, &b.weight)) {
        return Err("its gates are not in order".to_owned());
    }
    all.iter().try_for_each(|g| g.check().map_err(|e| format!("layer {}: {e}", g.layer)))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(all: impl IntoIterator<Item = f32>) -> Gates {
        let mut gates = Gates::new(0, "gate_up".to_owned());
        all.into_iter().for_each(|x| gates.add(x));
        gates
    }

    #[test]
    fn gate_quantiles_and_shares_are_inverse() {
        let gates = of((1..=1000).map(|i| if i % 2 == 0 { i as f32 } else { -(i as f32) } / 1000.0));
        for share in [0.1, 0.3, 0.5, 0.9] {
            let t = gates.quantile(share);
            assert!((f64::from(t) - share).abs() < 0.02 * share, "{t} for {share}");
            assert!((gates.below(t).unwrap() - share).abs() < 1e-3, "{share}");
        }
        assert_eq!((gates.quantile(0.0), gates.below(0.0)), (0.0, Some(0.0)));
        assert!(gates.quantile(1.0) >= 1.0 && gates.below(2.0) == Some(1.0));
        assert_eq!((gates.counted(), of([f32::NAN]).below(1.0), of([]).quantile(0.5)), (1000, None, 0.0));
        // Magnitudes outside of all bins are in the outermost bins.
        assert_eq!(of([0.0, 1e-30, f32::INFINITY]).counted(), 3);
        assert!(of([0.0, 0.0, 1.0]).quantile(0.6) < 1e-6);
    }

    #[test]
    fn merged_gates_equal_those_of_one_longer_text() {
        let (a, b) = (of([0.1, 0.2]), of([0.4]));
        let other = Gates { layer: 1, ..of([0.3]) };
        let both = merge(std::slice::from_ref(&a), &[b.clone(), other.clone()]);
        assert_eq!(both, [of([0.1, 0.2, 0.4]), other.clone()]);
        assert_eq!(merge(&[b, other], &[a]), both);
        check(&both).unwrap();
        assert!(check(&[both[1].clone(), both[0].clone()]).is_err());
        assert!(check(&[Gates { bins: vec![1], ..of([]) }]).is_err());
        assert!(check(&[Gates { bins: vec![u64::MAX; BINS], ..of([]) }]).is_err());
    }
}
