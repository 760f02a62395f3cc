//! Magnitude of tokens' attention outputs: the saliency by which overflow is pruned (NPUMoE, §3.2).
#![expect(clippy::cast_possible_truncation, reason = "statistics: floats are clamped and rounded")]

use super::{MOST_TOKENS, ProfileFault};
use bincode::{Decode, Encode};

/// Bins per doubling of the norm.
const PER_OCTAVE: f64 = 8.0;
/// Number of bins; the middle one begins at a norm of 1, so they reach from 2⁻³² to 2³².
const BINS: usize = 512;

/// L2 norms of the attention outputs that a layer adds to the residual stream, one per token.
#[derive(Clone, Debug, PartialEq, Encode, Decode)]
pub struct Saliency {
    /// Layer.
    pub layer: u32,
    /// Sum of the norms.
    pub sum: f64,
    /// Tokens by the logarithm of their norm, [`PER_OCTAVE`] bins per doubling.
    bins: Vec<u64>,
}

impl Saliency {
    /// An empty histogram of a layer.
    pub fn new(layer: u32) -> Self {
        Self { layer, sum: 0.0, bins: vec![0; BINS] }
    }

    /// Counts a token, unless the norm is not finite.
    pub fn add(&mut self, norm: f64) {
        if norm.is_finite() && norm >= 0.0 {
            let bin = (norm.log2() * PER_OCTAVE).floor() + (BINS / 2) as f64;
            self.bins[bin.clamp(0.0, (BINS - 1) as f64) as usize] += 1;
            self.sum += norm;
        }
    }

    /// Number of counted tokens.
    pub fn tokens(&self) -> u64 {
        self.bins.iter().sum()
    }

    /// Mean norm; 0 if nothing was counted.
    pub fn mean(&self) -> f64 {
        let n = self.tokens();
        if n == 0 { 0.0 } else { self.sum / n as f64 }
    }

    /// The norm that a share `q` of the tokens does not exceed, to within a bin (9 %); 0 if nothing was
    /// counted.
    pub fn quantile(&self, q: f64) -> f64 {
        let target = (q.clamp(0.0, 1.0) * self.tokens() as f64).ceil().max(1.0) as u64;
        let mut seen = 0;
        for (bin, &n) in self.bins.iter().enumerate() {
            seen += n;
            if seen >= target {
                return ((bin as f64 + 0.5 - (BINS / 2) as f64) / PER_OCTAVE).exp2();
            }
        }
        0.0
    }

    /// Merges two; `None` if they are of different layers.
    pub fn merge(&self, other: &Self) -> Option<Self> {
        let sums = self.bins.iter().zip(&other.bins).map(|(a, b)| a.saturating_add(*b));
        (self.layer == other.layer).then(|| Self {
            layer: self.layer,
            sum: self.sum + other.sum,
            bins: sums.collect(),
        })
    }

    pub(super) fn check(&self) -> Result<(), ProfileFault> {
        if self.bins.len() != BINS {
            return Err(format!("{} bins of norms", self.bins.len()));
        }
        let tokens = self.bins.iter().try_fold(0_u64, |sum, &n| sum.checked_add(n));
        if tokens.is_none_or(|n| n > MOST_TOKENS) {
            return Err("more norms than anyone can read".to_owned());
        }
        if self.sum.is_finite() && self.sum >= 0.0 {
            Ok(())
        } else {
            Err(format!("a sum of norms of {}", self.sum))
        }
    }
}
