//! Neurons that a token requests.
//!
//! Two assumptions. *How often*: the share of tokens that request a neuron falls as a power of its rank in
//! its layer, up to all of them. The exponent is fitted to the two shares of §2.2, the factor to the model's
//! activated parameters. *When*: a neuron keeps its state from token to token, except for those that are
//! sampled again. Their number is sampled for each token, the same in all layers, from a lognormal
//! distribution. Its mean is fitted to a hit rate, its deviation to a 99th percentile.
//!
//! Experts are sampled uniformly for every token.

use super::models::{Model, TOGETHER};
use crate::random::Random;
use std::ops::Range;
use std::sync::Arc;

/// The exponent. §2.2: under 1 % of the neurons are white in Figure 2 at one token, 75 % at 32.
pub const EXPONENT: f64 = 0.364;
/// White: a neuron that is requested this often.
pub const WHITE: f64 = 0.999;
/// Deviation of the logarithm of the novelty of a token. §7.2.4: a mean of 3.5 % of misses, 18.9 % at the
/// 99th percentile.
pub const SPREAD: f64 = 1.5;

/// Frequency of requests for each neuron of a matrix, the most frequent first, where the mean is `active`.
pub fn popularity(active: f64, neurons: usize) -> Vec<f64> {
    let ranks: Vec<f64> = (0..neurons).map(|i| ((i as f64 + 0.5) / neurons as f64).powf(-EXPONENT)).collect();
    let mean = |factor: f64| ranks.iter().map(|r| (factor * r).min(1.0)).sum::<f64>() / neurons as f64;
    let (mut low, mut high) = (0.0, 1.0);
    for _ in 0..40 {
        let middle = f64::midpoint(low, high);
        if mean(middle) < active { low = middle } else { high = middle }
    }
    ranks.iter().map(|r| (high * r).min(1.0)).collect()
}

/// Neurons of a range of ranks that at least one of `batch` tokens requests, and how often all tokens do:
/// expected numbers.
pub fn expected(popularity: &[f64], range: Range<usize>, batch: usize) -> (f64, f64) {
    let of = &popularity[range];
    let union = of.iter().map(|p| 1.0 - (1.0 - p).powi(batch as i32)).sum();
    (union, of.iter().sum::<f64>() * batch as f64)
}

/// Neurons of one expert of one layer that a token requests.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Routed {
    /// Expert.
    pub expert: u32,
    /// Neurons by rank, in order; and whether they turn out to be active.
    pub neurons: Vec<(u32, bool)>,
}

/// Requested, and active.
const REQUESTED: u8 = 1;
const ACTIVE: u8 = 2;

/// The tokens of a sequence, one after the other.
#[derive(Clone, Debug)]
pub struct Activity {
    random: Random,
    model: Model,
    popularity: Arc<[f64]>,
    /// By layer: the state of each neuron, expert after expert.
    layers: Vec<Vec<u8>>,
}

impl Activity {
    /// Of so many layers.
    pub fn new(model: &Model, layers: usize, seed: u64) -> Self {
        let mut random = Random::new(seed);
        let popularity: Arc<[f64]> = popularity(model.active, model.inner).into();
        let layers = (0..layers)
            .map(|_| (0..model.neurons()).map(|n| drawn(&mut random, popularity[n % model.inner])).collect())
            .collect();
        Self { random, model: *model, popularity, layers }
    }

    /// Frequency of requests for neurons, by rank.
    pub fn popularity(&self) -> &[f64] {
        &self.popularity
    }

    /// Neurons that the next token requests, by layer.
    pub fn token(&mut self) -> Vec<Vec<Routed>> {
        let off = SPREAD * self.random.normal() - SPREAD * SPREAD / 2.0;
        let novelty = (self.model.novelty * off.exp()).clamp(1e-9, 1.0);
        (0..self.layers.len()).map(|l| self.layer(l, novelty)).collect()
    }

    fn layer(&mut self, layer: usize, novelty: f64) -> Vec<Routed> {
        let Self { random, model, popularity, layers, .. } = self;
        let states = &mut layers[layer];
        // The distance to the next neuron that is sampled again is geometric.
        let step = |random: &mut Random| {
            let skipped = (1.0 - random.unit()).ln() / (1.0 - novelty).max(1e-300).ln();
            1 + skipped.min(1e9) as usize
        };
        let mut next = step(random) - 1;
        while let Some(state) = states.get_mut(next) {
            *state = drawn(random, popularity[next % model.inner]);
            next += step(random);
        }
        let mut experts: Vec<u32> = Vec::with_capacity(model.k);
        while experts.len() < model.k {
            let expert = random.below(model.experts) as u32;
            if !experts.contains(&expert) {
                experts.push(expert);
            }
        }
        let requested = |&expert: &u32| {
            let of = &states[expert as usize * model.inner..][..model.inner];
            let requested = of.iter().enumerate().filter(|s| *s.1 & REQUESTED != 0);
            Routed { expert, neurons: requested.map(|(n, s)| (n as u32, s & ACTIVE != 0)).collect() }
        };
        experts.iter().map(requested).collect()
    }
}

fn drawn(random: &mut Random, popularity: f64) -> u8 {
    if random.unit() >= popularity {
        0
    } else if random.unit() < TOGETHER {
        REQUESTED | ACTIVE
    } else {
        REQUESTED
    }
}

#[cfg(test)]
mod tests {
    use super::super::models::{BAMBOO, MIXTRAL};
    use super::*;

    #[test]
    fn activation_shares_match_figure_2() {
        let p = popularity(BAMBOO.active, BAMBOO.inner);
        let white = |batch| p.iter().filter(|&&p| 1.0 - (1.0 - p).powi(batch) > WHITE).count() as f64;
        let [one, many] = [1, 32].map(|b| white(b) / p.len() as f64);
        assert!(one < 0.01 && (many - 0.75).abs() < 0.01, "{one} {many}");
        let (union, all) = expected(&p, 0..p.len(), 1);
        assert!((union / p.len() as f64 - BAMBOO.active).abs() < 1e-6 && (union - all).abs() < 1e-6);
    }

    #[test]
    fn token_activity_has_its_rate_and_persistence() {
        let mut of = Activity::new(&MIXTRAL, 1, 3);
        let (mut requested, mut active) = (0, 0);
        for _ in 0..20 {
            let [layer] = &of.token()[..] else { panic!("one layer") };
            assert!(layer.len() == 2 && layer[0].expert != layer[1].expert);
            requested += layer.iter().map(|r| r.neurons.len()).sum::<usize>();
            active += layer.iter().flat_map(|r| &r.neurons).filter(|n| n.1).count();
        }
        let share = requested as f64 / (40 * MIXTRAL.inner) as f64;
        assert!((share / MIXTRAL.active - 1.0).abs() < 0.05, "{share}");
        assert!((active as f64 / requested as f64 - TOGETHER).abs() < 0.02);
        let mut of = Activity::new(&BAMBOO, 1, 3);
        let [a, b] = [0, 1].map(|_| of.token().remove(0).remove(0).neurons);
        let again = b.iter().filter(|n| a.binary_search_by_key(&n.0, |m| m.0).is_ok()).count();
        assert!(again as f64 > 0.6 * b.len() as f64, "{again} of {}", b.len());
    }
}
