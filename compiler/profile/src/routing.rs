//! Experts that the tokens chose.

use super::{MOST, MOST_TOKENS, ProfileFault};
use bincode::{Decode, Encode};

/// Routing of one layer.
#[derive(Clone, Debug, PartialEq, Encode, Decode)]
pub struct Routing {
    /// Layer.
    pub layer: u32,
    /// Experts per token.
    pub k: u32,
    /// Tokens routed.
    pub tokens: u64,
    /// Tokens that chose each expert.
    pub chosen: Vec<u64>,
    /// Sum of the routing weights of each expert.
    pub weight: Vec<f64>,
    /// Tokens that chose both experts of a pair: row after row of the pairs `(a, b)` with `a < b`.
    pub together: Vec<u64>,
}

/// Pairs of `experts` experts.
const fn pairs(experts: usize) -> usize {
    experts * experts.saturating_sub(1) / 2
}

impl Routing {
    /// Routing of a layer before any token.
    pub fn new(layer: u32, k: u32, experts: usize) -> Self {
        Self {
            layer,
            k,
            tokens: 0,
            chosen: vec![0; experts],
            weight: vec![0.0; experts],
            together: vec![0; pairs(experts)],
        }
    }

    /// Index of a pair in `together`; `None` for an expert with itself.
    pub fn pair(&self, a: usize, b: usize) -> Option<usize> {
        let (a, b) = (a.min(b), a.max(b));
        let n = self.chosen.len();
        (a < b && b < n).then(|| a * (2 * n - a - 1) / 2 + b - a - 1)
    }

    /// Tokens that chose both experts.
    pub fn both(&self, a: usize, b: usize) -> u64 {
        self.pair(a, b).and_then(|i| self.together.get(i)).copied().unwrap_or(0)
    }

    /// Pairs by the number of tokens that chose both, descending, ties by index.
    pub fn closest(&self, most: usize) -> Vec<(usize, usize, u64)> {
        let n = self.chosen.len();
        let all = (0..n).flat_map(|a| (a + 1..n).map(move |b| (a, b)));
        let mut all: Vec<_> = all.map(|(a, b)| (a, b, self.both(a, b))).filter(|p| p.2 > 0).collect();
        all.sort_by_key(|p| std::cmp::Reverse(p.2));
        all.truncate(most);
        all
    }

    /// Experts that at least one token chose.
    pub fn used(&self) -> usize {
        self.chosen.iter().filter(|&&n| n > 0).count()
    }

    /// Load of the busiest expert divided by the mean load; 1 is balance. 0 if nothing was routed.
    pub fn imbalance(&self) -> f64 {
        let max = self.chosen.iter().copied().max().unwrap_or(0);
        let sum: u64 = self.chosen.iter().sum();
        if sum == 0 { 0.0 } else { max as f64 * self.chosen.len() as f64 / sum as f64 }
    }

    /// Mean routing weight of an expert over the tokens that chose it; 0 if there are none.
    pub fn mean_weight(&self, expert: usize) -> f64 {
        match (self.weight.get(expert), self.chosen.get(expert)) {
            (Some(&sum), Some(&n)) if n > 0 => sum / n as f64,
            _ => 0.0,
        }
    }

    /// Experts by load, the least used first, ties by index.
    pub fn least_used(&self) -> Vec<usize> {
        let mut order: Vec<usize> = (0..self.chosen.len()).collect();
        order.sort_by_key(|&e| self.chosen[e]);
        order
    }

    /// Experts that fewer than `tokens` tokens chose.
    pub fn below(&self, tokens: u64) -> Vec<usize> {
        (0..self.chosen.len()).filter(|&e| self.chosen[e] < tokens).collect()
    }

    /// Merges two; `None` if they are of different layers or shapes.
    pub fn merge(&self, other: &Self) -> Option<Self> {
        let fits = self.layer == other.layer && self.k == other.k && self.chosen.len() == other.chosen.len();
        fits.then(|| Self {
            layer: self.layer,
            k: self.k,
            tokens: self.tokens.saturating_add(other.tokens),
            chosen: self.chosen.iter().zip(&other.chosen).map(|(a, b)| a.saturating_add(*b)).collect(),
            weight: self.weight.iter().zip(&other.weight).map(|(a, b)| a + b).collect(),
            together: self.together.iter().zip(&other.together).map(|(a, b)| a.saturating_add(*b)).collect(),
        })
    }

    pub(super) fn check(&self) -> Result<(), ProfileFault> {
        let experts = self.chosen.len();
        if !(1..=MOST).contains(&experts) || self.weight.len() != experts {
            return Err(format!("{experts} experts with {} weights", self.weight.len()));
        }
        if self.tokens > MOST_TOKENS || self.k == 0 || self.k as usize > experts {
            return Err(format!("{} tokens, {} of {experts} experts each", self.tokens, self.k));
        }
        let chosen: u128 = self.chosen.iter().map(|&n| u128::from(n)).sum();
        if chosen != u128::from(self.tokens) * u128::from(self.k) {
            return Err(format!("{chosen} choices of {} tokens, {} each", self.tokens, self.k));
        }
        let together: u128 = self.together.iter().map(|&n| u128::from(n)).sum();
        let each = pairs(self.k as usize) as u128;
        if self.together.len() != pairs(experts) || together != u128::from(self.tokens) * each {
            return Err(format!("{together} pairs of choices of {} tokens, {each} each", self.tokens));
        }
        if self.weight.iter().all(|w| w.is_finite()) {
            Ok(())
        } else {
            Err("a routing weight that is not finite".to_owned())
        }
    }
}
