//! Largest probabilities of the little pass of big-little decoding: the basis of γ (MoBiLE, §III-B).
//!
//! A profile keeps a histogram over tokens of calibration text. Every token follows tokens that were computed
//! with all experts. A token falls back if its probability does not exceed γ, so γ for a share of fallbacks
//! is a quantile.
#![expect(clippy::cast_possible_truncation, reason = "statistics: floats are clamped and rounded")]

use super::{MOST_TOKENS, ProfileFault};
use bincode::{Decode, Encode};

/// Number of bins over the probabilities from 0 to 1. Their edges are exact in f32.
const BINS: usize = 1024;
/// Limit of the experts per token, as in `model.toml`.
const MOST_EXPERTS: u32 = 1024;

/// Largest probabilities of tokens that were decoded with fewer experts.
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
pub struct Confidence {
    /// Experts per token of the little pass.
    pub experts: u32,
    /// Number of tokens by their largest probability. Bin `i` has those above `i / 1024`, up to
    /// `(i + 1) / 1024`.
    bins: Vec<u64>,
}

/// Lower edge of a bin.
fn edge(bin: usize) -> f64 {
    bin as f64 / BINS as f64
}

impl Confidence {
    /// An empty histogram of a little pass with this number of experts per token.
    pub fn new(experts: u32) -> Self {
        Self { experts, bins: vec![0; BINS] }
    }

    /// Counts a token. Without a largest probability it falls back for every γ, as at probability 0.
    pub fn add(&mut self, probability: Option<f64>) {
        let last = (BINS - 1) as f64;
        let bin = (probability.unwrap_or(0.0) * BINS as f64).ceil() - 1.0;
        self.bins[bin.clamp(0.0, last) as usize] += 1;
    }

    /// Number of counted tokens.
    pub fn tokens(&self) -> u64 {
        self.bins.iter().sum()
    }

    /// The probability that `share` of the tokens do not exceed: γ for this share of fallbacks. It is the
    /// edge of a bin whose [`Confidence::fallbacks`] come closest to the share, the lower one of two.
    pub fn quantile(&self, share: f64) -> f64 {
        let target = share.clamp(0.0, 1.0) * self.tokens() as f64;
        let (mut best, mut nearest, mut below) = (0, target, 0);
        for (bin, &n) in self.bins.iter().enumerate() {
            below += n;
            let distance = (below as f64 - target).abs();
            if distance < nearest {
                (best, nearest) = (bin + 1, distance);
            }
        }
        edge(best)
    }

    /// Share of the tokens that fall back with this γ; `None` if nothing was counted. γ is rounded down to
    /// the edge of a bin.
    pub fn fallbacks(&self, gamma: f64) -> Option<f64> {
        let all = self.tokens();
        let bins = (gamma.clamp(0.0, 1.0) * BINS as f64).floor() as usize;
        let below: u64 = self.bins.iter().take(bins).sum();
        (all > 0).then(|| below as f64 / all as f64)
    }

    /// Merges two histograms; `None` if their little passes have different numbers of experts.
    fn merge(&self, other: &Self) -> Option<Self> {
        let bins = self.bins.iter().zip(&other.bins).map(|(a, b)| a.saturating_add(*b)).collect();
        (self.experts == other.experts).then_some(Self { experts: self.experts, bins })
    }

    /// Checks the properties that readers rely on.
    pub(super) fn check(&self) -> Result<(), ProfileFault> {
        if self.bins.len() != BINS || !(1..=MOST_EXPERTS).contains(&self.experts) {
            return Err(format!("{} bins of confidences of {} experts", self.bins.len(), self.experts));
        }
        let sum = self.bins.iter().try_fold(0_u64, |sum, &n| sum.checked_add(n));
        if sum.is_some_and(|n| n <= MOST_TOKENS) {
            Ok(())
        } else {
            Err("more confidences than anyone can count".to_owned())
        }
    }
}

/// Merges the confidences of two profiles. One that only one profile has stays; those of different numbers of
/// experts are dropped.
pub(super) fn merge(a: Option<&Confidence>, b: Option<&Confidence>) -> Option<Confidence> {
    match (a, b) {
        (Some(a), Some(b)) => a.merge(b),
        (one, other) => one.or(other).cloned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(experts: u32, all: impl IntoIterator<Item = f64>) -> Confidence {
        let mut confidence = Confidence::new(experts);
        all.into_iter().for_each(|p| confidence.add(Some(p)));
        confidence
    }

    #[test]
    fn share_of_fallbacks_at_its_quantile_is_the_requested_one() {
        let even = of(2, (1..=1000).map(|i| f64::from(i) / 1000.0));
        assert_eq!(even.tokens(), 1000);
        for share in [0.1, 0.15, 0.2, 0.5, 0.9] {
            let gamma = even.quantile(share);
            assert!((gamma - share).abs() < 2e-3, "{gamma} for {share}");
            assert!((even.fallbacks(gamma).unwrap() - share).abs() < 1e-3, "{share}");
        }
        assert_eq!((even.quantile(0.0), even.fallbacks(0.0)), (0.0, Some(0.0)));
        assert_eq!((even.quantile(1.0), even.fallbacks(1.0)), (1.0, Some(1.0)));
        assert_eq!((even.quantile(-1.0), even.quantile(7.0)), (0.0, 1.0));
    }

    #[test]
    fn token_falls_back_if_its_probability_does_not_exceed_gamma() {
        let one = of(2, [0.5]);
        assert_eq!((one.fallbacks(0.5), one.fallbacks(0.5 - 1.0 / 1024.0)), (Some(1.0), Some(0.0)));
        assert_eq!((one.quantile(1.0), one.quantile(0.0)), (0.5, 0.0));
        // Tokens without a largest probability fall back unless γ is 0, and a certain one is kept.
        let mut ends = of(2, [1.0]);
        ends.add(None);
        assert_eq!(
            [0.0, 1.0 / 1024.0, 1023.0 / 1024.0].map(|g| ends.fallbacks(g)),
            [0.0, 0.5, 0.5].map(Some)
        );
    }

    #[test]
    fn quantile_is_the_edge_with_the_nearest_share() {
        // Two tokens of ten share a bin: 20 % or none.
        let tied = of(2, [0.1, 0.1, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95]);
        assert_eq!([0.05, 0.12].map(|share| tied.fallbacks(tied.quantile(share))), [0.0, 0.2].map(Some));
        // γ = 1 would decode certain tokens again, too.
        let certain = of(2, std::iter::repeat_n(1.0, 30).chain([0.2; 70]));
        assert_eq!(certain.fallbacks(certain.quantile(0.8)), Some(0.7));
        assert_eq!((Confidence::new(2).quantile(0.5), Confidence::new(2).fallbacks(0.5)), (0.0, None));
    }

    #[test]
    fn merged_confidences_equal_those_of_one_longer_text() {
        let (a, b) = (of(2, [0.1, 0.9]), of(2, [0.5]));
        let both = of(2, [0.1, 0.9, 0.5]);
        assert_eq!(merge(Some(&a), Some(&b)), Some(both.clone()));
        assert_eq!(merge(Some(&b), Some(&a)), Some(both));
        // That of one profile stays; those of different little passes are not comparable.
        assert_eq!((merge(Some(&a), None), merge(None, Some(&a))), (Some(a.clone()), Some(a.clone())));
        assert_eq!((merge(None, None), merge(Some(&a), Some(&of(3, [0.5])))), (None, None));
    }

    #[test]
    fn inconsistent_confidences_are_rejected() {
        of(2, [0.5]).check().unwrap();
        for wrong in [
            Confidence { bins: vec![1; BINS - 1], ..of(2, []) },
            Confidence { bins: vec![u64::MAX; BINS], ..of(2, []) },
            Confidence { bins: vec![MOST_TOKENS; BINS], ..of(2, []) },
            of(0, []),
            of(1025, []),
        ] {
            assert!(wrong.check().is_err(), "{} experts", wrong.experts);
        }
    }
}
