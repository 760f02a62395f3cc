//! Recorded activations: neurons that tokens use.

use super::replay::replay;
use moec_runtime::offload::neurons::Shape;
use moec_runtime::offload::paging::Hooks;
use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};

/// The routed experts of every token and layer, with their active neurons.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Activations {
    /// Matrices: experts of all layers, numbered consecutively.
    pub matrices: u32,
    /// Neurons of a matrix.
    pub neurons: u32,
    /// By token: matrices in the order of layers, each with its active neurons in order.
    pub tokens: Vec<Vec<(u32, Vec<u32>)>>,
}

impl Activations {
    /// Neurons of routed experts that are not active, as a share.
    pub fn sparsity(&self) -> f64 {
        let uses = self.tokens.iter().flatten();
        let (active, all) =
            uses.fold((0_u64, 0_u64), |(a, n), u| (a + u.1.len() as u64, n + u64::from(self.neurons)));
        if all == 0 { 0.0 } else { 1.0 - active as f64 / all as f64 }
    }

    /// Frequency of each neuron's activation, as a share of the uses of its matrix, by rank: the mean over
    /// all matrices, the most active first.
    pub fn frequencies(&self) -> Vec<f64> {
        let mut counts = vec![0_u64; self.neurons as usize];
        let mut uses = 0_u64;
        for (_, active) in self.tokens.iter().flatten() {
            uses += 1;
            for &n in active {
                if let Some(count) = counts.get_mut(n as usize) {
                    *count += 1;
                }
            }
        }
        counts.sort_unstable_by(|a, b| b.cmp(a));
        counts.into_iter().map(|n| n as f64 / uses.max(1) as f64).collect()
    }

    /// Steps of `batch` sequences that are decoded together. The trace is cut into `batch` sections of equal
    /// length; step `i` uses the union of what the `i`-th tokens of all sections use. The remainder of the
    /// trace is dropped.
    #[must_use]
    pub fn batched(&self, batch: usize) -> Self {
        let steps = self.tokens.len() / batch.max(1);
        let step = |at: usize| {
            let mut of: BTreeMap<u32, Vec<u32>> = BTreeMap::new();
            for token in self.tokens.iter().skip(at).step_by(steps.max(1)).take(batch) {
                for (matrix, active) in token {
                    of.entry(*matrix).or_default().extend(active);
                }
            }
            let sorted = |(matrix, mut active): (u32, Vec<u32>)| {
                active.sort_unstable();
                active.dedup();
                (matrix, active)
            };
            of.into_iter().map(sorted).collect()
        };
        Self { tokens: (0..steps).map(step).collect(), ..*self }
    }
}

/// Hooks of a run whose neurons are read from disk: records the needs of tokens that are decoded one by one.
/// A unit of neurons that are read together counts as one neuron.
#[derive(Debug)]
pub struct Recorder {
    /// First expert of every layer, counted over all layers.
    firsts: Vec<u32>,
    recorded: Mutex<Recorded>,
}

/// Completed tokens, and the one in progress.
#[derive(Debug)]
struct Recorded {
    activations: Activations,
    token: Vec<(u32, Vec<u32>)>,
}

impl Recorder {
    /// For layers of so many experts, of which none has more than `neurons`.
    pub fn new(experts: &[u32], neurons: u32) -> Self {
        let mut matrices = 0;
        let first = |n: &u32| {
            matrices += n;
            matrices - n
        };
        let firsts = experts.iter().map(first).collect();
        let activations = Activations { matrices, neurons, tokens: Vec::new() };
        Self { firsts, recorded: Mutex::new(Recorded { activations, token: Vec::new() }) }
    }

    /// Neurons that Belady's optimum with `frames` frames would have read, and all uses of neurons by tokens;
    /// `None` if nothing was recorded.
    pub fn least_read(&self, frames: u32) -> Option<(u64, u64)> {
        let recorded = self.recorded.lock().unwrap_or_else(PoisonError::into_inner);
        let Activations { matrices, neurons, ref tokens } = recorded.activations;
        let shape = Shape { matrices, neurons, cluster: neurons, gate: 1, up_down: 0 };
        let least = replay(&recorded.activations, shape, frames.into(), 0).ok()?.least;
        let used: u64 = tokens.iter().flatten().map(|(_, units)| units.len() as u64).sum();
        Some(((least * tokens.len() as f64).round() as u64, used))
    }
}

impl Hooks for Recorder {
    fn needs(&self, layer: usize, rows: usize, needed: &mut dyn Iterator<Item = (u32, &[u32])>) {
        let Some(first) = self.firsts.get(layer).filter(|_| rows == 1) else { return };
        let mut recorded = self.recorded.lock().unwrap_or_else(PoisonError::into_inner);
        let Recorded { activations, token } = &mut *recorded;
        if layer == 0 {
            token.clear();
        }
        token.extend(needed.map(|(expert, units)| (first + expert, units.to_vec())));
        if layer + 1 == self.firsts.len() {
            activations.tokens.push(std::mem::take(token));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn batch_activates_the_union_of_its_sequences() {
        let token = |matrix, active: &[u32]| vec![(matrix, active.to_vec())];
        let tokens = vec![token(0, &[1]), token(1, &[2]), token(0, &[0, 1]), token(0, &[2]), token(1, &[0])];
        let of = Activations { matrices: 2, neurons: 3, tokens };
        let two = of.batched(2);
        assert_eq!(two.tokens, [token(0, &[0, 1]), vec![(0, vec![2]), (1, vec![2])]]);
        assert_eq!(of.batched(1), of);
        assert_eq!(two.frequencies(), [2.0 / 3.0, 1.0 / 3.0, 1.0 / 3.0]);
    }
}
