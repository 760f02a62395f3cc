//! Requests of a layer's steps from a trace, and the part that memory lacks: one replay for each number of
//! hot neurons.

use super::error::NeuronError;
use crate::neurons::Activations;
use moec_runtime::offload::neurons::{Part, Regions, Segmented, Shape};

/// A trace of a layer's steps: each token of it stands for a batch ([`Activations::batched`]).
#[derive(Clone, Copy, Debug)]
pub struct Recorded<'a> {
    /// Active neurons, by rank: the most active first.
    pub activations: &'a Activations,
    /// Steps that fill the cache and are not counted.
    pub warmup: usize,
}

/// Cold neurons that a step requests, on average per matrix.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Demand {
    /// Active ones.
    pub active: f64,
    /// Active ones that memory lacks.
    pub missing: f64,
}

impl Recorded<'_> {
    /// Fails if the trace is for matrices with another number of neurons, or leaves no steps to count.
    pub(super) fn check(&self, neurons: usize) -> Result<(), NeuronError> {
        let wrong = |what: &str| Err(NeuronError::Trace(what.to_owned()));
        let of = self.activations;
        if of.neurons as usize != neurons {
            return wrong("they are of another layer than the tables");
        }
        if of.tokens.len() <= self.warmup {
            return wrong("no step is left to count");
        }
        let there = |&(matrix, ref active): &(u32, Vec<u32>)| {
            matrix < of.matrices
                && active.iter().all(|&n| n < of.neurons)
                && active.is_sorted_by(|a, b| a < b)
        };
        if !of.tokens.iter().flatten().all(there) || of.tokens.iter().any(Vec::is_empty) {
            return wrong("a step uses neurons that do not exist, no neurons, or not in order");
        }
        Ok(())
    }

    /// Requests of the counted steps for neurons after the first `hot` of each matrix, with nothing missing.
    pub(super) fn demand(&self, hot: usize) -> Vec<Demand> {
        let steps = self.activations.tokens.iter().skip(self.warmup);
        let active = |step: &Vec<(u32, Vec<u32>)>| {
            let cold = step.iter().map(|(_, active)| cold(active, hot).len()).sum::<usize>();
            Demand { active: cold as f64 / step.len() as f64, missing: 0.0 }
        };
        steps.map(active).collect()
    }

    /// The same with the neurons that a cache lacks. It holds `held` neurons of each matrix. The first `hot`
    /// of these stay, as far as there is room; of the others, those used longest ago are evicted.
    pub(super) fn replay(&self, hot: usize, held: usize, cluster: usize) -> Result<Vec<Demand>, NeuronError> {
        let of = self.activations;
        let shape = Shape {
            matrices: of.matrices,
            neurons: of.neurons,
            cluster: u32::try_from(cluster).unwrap_or(u32::MAX),
            gate: 1,
            up_down: 0,
        };
        // Hot neurons are never requested from the cache: they reduce its room.
        let room = held.saturating_sub(hot) as u64 * u64::from(of.matrices);
        let mut cache = Segmented::new(shape, Regions::of(room, 0, 0)?)?;
        let mut steps = Vec::with_capacity(of.tokens.len());
        for step in &of.tokens {
            cache.begin();
            let mut demand = Demand::default();
            for &(matrix, ref active) in step {
                let cold = cold(active, hot);
                let there: Vec<bool> = cold.iter().map(|&n| cache.holds(matrix, n, Part::Whole)).collect();
                // Resident neurons are used first, so that none is evicted that is still needed.
                for pass in [true, false] {
                    for (&neuron, _) in cold.iter().zip(&there).filter(|(_, there)| **there == pass) {
                        let found = cache.neuron(matrix, neuron, Part::Whole, |_| ())?;
                        demand.missing += f64::from(u8::from(found.read() > 0));
                    }
                }
                demand.active += cold.len() as f64;
            }
            let n = step.len() as f64;
            steps.push(Demand { active: demand.active / n, missing: demand.missing / n });
        }
        Ok(steps.split_off(self.warmup))
    }
}

/// The active neurons that are not hot.
fn cold(active: &[u32], hot: usize) -> &[u32] {
    &active[active.partition_point(|&n| (n as usize) < hot)..]
}
