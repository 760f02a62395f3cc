//! Synthetic traces of activations: which neurons of which experts every token uses, with a given sparsity,
//! skew and persistence.
//!
//! Neuron `i` of a matrix is active with a frequency that falls with a power of its rank, as in measured
//! models (PowerInfer-2, Figure 2). From token to token it keeps its state with the given persistence, so
//! that neighbouring tokens share neurons (§7.2.4).

use super::error::NeuronError;
use crate::neurons::Activations;
use moec_runtime::serving::sampler::SplitMix64;

/// Parameters of a trace.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Recipe {
    /// Layers.
    pub layers: u32,
    /// Experts of a layer.
    pub experts: u32,
    /// Experts per token, each as likely as any other; an expert is kept from token to token with the
    /// persistence.
    pub k: u32,
    /// Neurons of an expert.
    pub neurons: u32,
    /// Share of the neurons of a routed expert that are not active, on average.
    pub sparsity: f64,
    /// Exponent of the frequencies by rank; 0: all neurons are alike.
    pub skew: f64,
    /// Probability that a neuron keeps its state without being sampled again, 0 to below 1.
    pub persistence: f64,
    /// Tokens.
    pub tokens: u32,
    /// Seed; the same seed gives the same trace.
    pub seed: u64,
}

/// Samples neurons by their frequencies, independently each time.
#[derive(Clone, Debug)]
pub struct Independent(SplitMix64);

impl Independent {
    /// Creates a sampler; the same seed gives the same samples.
    pub fn new(seed: u64) -> Self {
        Self(SplitMix64(seed))
    }

    /// The active neurons, by their index among the frequencies, each a share of 1.
    pub fn active(&mut self, frequencies: impl Iterator<Item = f64>) -> Vec<u32> {
        frequencies.enumerate().filter(|&(_, f)| self.0.unit() < f).map(|(i, _)| i as u32).collect()
    }
}

/// Maximum number of neurons, and of uses of neurons over all tokens.
const MOST: u64 = 1 << 28;

impl Recipe {
    /// The frequency of every neuron, the most active first: `min(1, c · (1 + i)^-skew)`, with `c` such that
    /// their mean is what the sparsity leaves.
    pub fn frequencies(&self) -> Vec<f64> {
        let raw: Vec<f64> = (0..self.neurons).map(|i| (1.0 + f64::from(i)).powf(-self.skew)).collect();
        let expected_active = (1.0 - self.sparsity) * f64::from(self.neurons);
        let mean_at = |c: f64| raw.iter().map(|r| (c * r).min(1.0)).sum::<f64>();
        let (mut low, mut high) = (0.0, f64::from(self.neurons).powf(self.skew));
        for _ in 0..100 {
            let middle = f64::midpoint(low, high);
            if mean_at(middle) < expected_active { low = middle } else { high = middle }
        }
        raw.into_iter().map(|r| (high * r).min(1.0)).collect()
    }

    /// A trace.
    ///
    /// # Errors
    /// [`NeuronError::Trace`] for invalid shares, no or more than all experts per token, or too much to hold.
    pub fn sample(&self) -> Result<Activations, NeuronError> {
        let wrong = |what: &str| Err(NeuronError::Trace(what.to_owned()));
        let share = |v: f64| (0.0..=1.0).contains(&v);
        if !share(self.sparsity) || !share(self.persistence) || self.persistence >= 1.0 {
            return wrong("sparsity is a share of 1, and persistence one below 1");
        }
        if !(0.0..=8.0).contains(&self.skew) {
            return wrong("skew is 0 to 8");
        }
        if self.k == 0 || self.k > self.experts || self.layers == 0 || self.neurons == 0 {
            return wrong("there are layers with experts and neurons, and a token uses 1 to all experts");
        }
        let product = |of: [u32; 3]| of.iter().try_fold(1_u64, |p, &n| p.checked_mul(n.into()));
        let all = product([self.layers, self.experts, self.neurons]);
        let used =
            product([self.layers, self.k, self.neurons]).and_then(|n| n.checked_mul(self.tokens.into()));
        let fits = |n: Option<u64>| n.is_some_and(|n| n <= MOST);
        if !fits(all) || !fits(used) {
            return wrong("this many neurons over this many tokens are too many: 2^28 are the most");
        }
        Ok(self.sample_checked())
    }

    fn sample_checked(&self) -> Activations {
        let frequencies = self.frequencies();
        let mut random = SplitMix64(self.seed);
        let matrices = self.layers * self.experts;
        let mut state = vec![false; matrices as usize * self.neurons as usize];
        let mut fresh = vec![true; matrices as usize];
        let mut routed: Vec<Vec<u32>> = vec![Vec::new(); self.layers as usize];
        let tokens = (0..self.tokens).map(|_| {
            let mut token = Vec::with_capacity(self.layers as usize * self.k as usize);
            for layer in 0..self.layers {
                let chosen = &mut routed[layer as usize];
                chosen.retain(|_| random.unit() < self.persistence);
                while chosen.len() < self.k as usize {
                    let expert = (random.unit() * f64::from(self.experts)) as u32;
                    if !chosen.contains(&expert) {
                        chosen.push(expert);
                    }
                }
                chosen.sort_unstable();
                for &expert in chosen.iter() {
                    let matrix = layer * self.experts + expert;
                    let first = matrix as usize * self.neurons as usize;
                    let anew = std::mem::take(&mut fresh[matrix as usize]);
                    let states = &mut state[first..first + self.neurons as usize];
                    for (s, &f) in states.iter_mut().zip(&frequencies) {
                        if anew || random.unit() >= self.persistence {
                            *s = random.unit() < f;
                        }
                    }
                    let active = states.iter().enumerate().filter(|s| *s.1).map(|s| s.0 as u32);
                    token.push((matrix, active.collect()));
                }
            }
            token
        });
        Activations { matrices, neurons: self.neurons, tokens: tokens.collect() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const RECIPE: Recipe = Recipe {
        layers: 2,
        experts: 6,
        k: 2,
        neurons: 300,
        sparsity: 0.8,
        skew: 0.7,
        persistence: 0.5,
        tokens: 60,
        seed: 3,
    };

    #[test]
    fn a_trace_has_the_sparsity_and_the_order_that_was_requested() {
        for sparsity in [0.0, 0.5, 0.9] {
            let sampled = Recipe { sparsity, ..RECIPE }.sample().unwrap();
            assert!((sampled.sparsity() - sparsity).abs() < 0.02, "{sparsity} {}", sampled.sparsity());
            let mut uses = vec![0; 300];
            for n in sampled.tokens.iter().flatten().flat_map(|u| &u.1) {
                uses[*n as usize] += 1;
            }
            assert!(sparsity == 0.0 || uses[..100].iter().sum::<u32>() > uses[200..].iter().sum());
        }
        assert_eq!(RECIPE.sample().unwrap(), RECIPE.sample().unwrap());
    }

    #[test]
    fn neurons_activate_at_their_frequencies() {
        let mut random = Independent::new(9);
        let mut counts = [0; 3];
        for _ in 0..1000 {
            random.active([0.0, 0.3, 1.0].into_iter()).iter().for_each(|&n| counts[n as usize] += 1);
        }
        assert!(counts[0] == 0 && (250..350).contains(&counts[1]) && counts[2] == 1000, "{counts:?}");
    }

    #[test]
    fn persistence_shares_neurons_between_neighbours() {
        let shared = |persistence| {
            let sampled =
                Recipe { experts: 1, k: 1, layers: 1, skew: 0.0, persistence, ..RECIPE }.sample().unwrap();
            let both =
                |w: &[Vec<(u32, Vec<u32>)>]| w[1][0].1.iter().filter(|n| w[0][0].1.contains(n)).count();
            sampled.tokens.windows(2).map(both).sum::<usize>()
        };
        assert!(shared(0.8) > 2 * shared(0.0));
    }

    #[test]
    fn invalid_neuron_recipes_are_rejected() {
        for bad in [
            Recipe { sparsity: 1.1, ..RECIPE },
            Recipe { persistence: 1.0, ..RECIPE },
            Recipe { skew: f64::NAN, ..RECIPE },
            Recipe { k: 7, ..RECIPE },
            Recipe { layers: 0, ..RECIPE },
            Recipe { tokens: u32::MAX, ..RECIPE },
        ] {
            assert!(bad.sample().is_err());
        }
    }
}
