//! Bytes per token of several ways to read, on the same activations and in the same memory.
//!
//! The first reads every routed expert whole. The second reads gates of all neurons and the rest of active
//! ones (exact without a predictor). The third reads only active neurons, as with a perfect predictor. The
//! last is the lower bound for a cache of whole neurons, by Belady's rule.

use super::error::NeuronError;
use crate::cache::belady::{Belady, next_uses};
use crate::neurons::Activations;
use moec_runtime::offload::neurons::{Part, Regions, Segmented, Shape};

/// Bytes read per token, in the same memory.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Bytes {
    /// Whole routed experts, with LRU eviction.
    pub experts: f64,
    /// All gates stay in memory, and the other parts of active neurons are cached in the rest of it; `None`
    /// if the gates do not fit.
    pub gates: Option<f64>,
    /// Active neurons alone, with all memory in the cold region.
    pub neurons: f64,
    /// The same with half of the memory hot: the first clusters of every matrix, as many as fit, are resident
    /// from the start and stay.
    pub hot: f64,
    /// Lower bound for active neurons alone, each read and kept whole, in any initially empty cache of the
    /// same memory.
    pub least: f64,
}

/// Replays activations in a memory of `capacity` bytes, empty at first, and counts from token `from` on.
///
/// # Errors
/// [`NeuronError::Trace`] for activations that do not fit the shape or end before `from`, and errors of
/// [`Segmented::new`].
pub fn replay(
    activations: &Activations,
    shape: Shape,
    capacity: u64,
    from: usize,
) -> Result<Bytes, NeuronError> {
    let wrong = |what: &str| Err(NeuronError::Trace(what.to_owned()));
    if (shape.matrices, shape.neurons) != (activations.matrices, activations.neurons) {
        return wrong("they are of another shape than the cache");
    }
    let counted = activations.tokens.len().saturating_sub(from);
    if counted == 0 {
        return wrong("no token is left to count");
    }
    let mut neurons = Segmented::new(shape, Regions::of(capacity, 0, 0)?)?;
    let uses = activations.tokens.iter().flatten();
    if uses.clone().any(|u| u.0 >= shape.matrices || u.1.iter().any(|&n| n >= shape.neurons)) {
        return wrong("they name neurons that do not exist");
    }
    let per = |bytes: u64| bytes as f64 / counted as f64;
    let gate_bytes = shape.gate * u64::from(shape.matrices) * u64::from(shape.neurons);
    let gates = if let (Some(left), true) = (capacity.checked_sub(gate_bytes), shape.up_down > 0) {
        let up_down = Shape { gate: shape.up_down, up_down: 0, ..shape };
        let mut cache = Segmented::new(up_down, Regions::of(left, 0, 0)?)?;
        Some(per(run(&mut cache, activations, from)?))
    } else {
        None
    };
    Ok(Bytes {
        experts: per(whole_experts(activations, shape, capacity, from)?),
        gates,
        neurons: per(run(&mut neurons, activations, from)?),
        hot: per(run(&mut half_hot(shape, capacity)?, activations, from)?),
        least: per(least(activations, shape, capacity, from)),
    })
}

/// A cache whose hot region, half of the memory, holds the hottest clusters of every matrix.
fn half_hot(shape: Shape, capacity: u64) -> Result<Segmented, NeuronError> {
    let cluster = shape.cluster.min(shape.neurons);
    let all = shape.neuron_bytes() * u64::from(cluster) * u64::from(shape.matrices);
    let clusters = (capacity / 2 / all).min(u64::from(shape.clusters())) as u32;
    let mut cache = Segmented::new(shape, Regions::of(capacity, 0, u64::from(clusters) * all)?)?;
    for matrix in 0..shape.matrices {
        for cluster in 0..clusters {
            cache.cluster(matrix, cluster, |_| ())?;
        }
    }
    Ok(cache)
}

/// Bytes that a cache of neurons reads for neurons.
fn run(cache: &mut Segmented, activations: &Activations, from: usize) -> Result<u64, NeuronError> {
    for (at, token) in activations.tokens.iter().enumerate() {
        if at == from {
            cache.reset_counts();
        }
        for (matrix, active) in token {
            cache.begin();
            for &neuron in active {
                cache.neuron(*matrix, neuron, Part::Whole, |_| ())?;
            }
        }
    }
    Ok(cache.neurons().read)
}

/// Bytes that a cache of whole experts reads: the same cache, of which an expert is one neuron.
fn whole_experts(
    activations: &Activations,
    shape: Shape,
    capacity: u64,
    from: usize,
) -> Result<u64, NeuronError> {
    let gate = shape.neuron_bytes() * u64::from(shape.neurons);
    let experts = Shape { matrices: 1, neurons: shape.matrices, cluster: 1, gate, up_down: 0 };
    let mut cache = Segmented::new(experts, Regions::of(capacity, 0, 0)?)?;
    for (at, token) in activations.tokens.iter().enumerate() {
        if at == from {
            cache.reset_counts();
        }
        for &(expert, _) in token {
            cache.begin();
            cache.neuron(0, expert, Part::Whole, |_| ())?;
        }
    }
    Ok(cache.neurons().read)
}

/// The least bytes for active neurons.
fn least(activations: &Activations, shape: Shape, capacity: u64, from: usize) -> u64 {
    let (count, bytes) = (shape.matrices as usize * shape.neurons as usize, shape.neuron_bytes());
    let uses: Vec<_> = activations.tokens.iter().flatten().collect();
    let ids = |(matrix, active): &'_ (u32, Vec<u32>)| -> Vec<u32> {
        active.iter().map(|n| matrix * shape.neurons + n).collect()
    };
    let steps = uses.iter().enumerate().map(|(now, of)| (now as u64, ids(of).into_iter()));
    let mut next = next_uses(count, steps).into_iter();
    let mut cache = Belady::new(count, capacity / bytes * bytes);
    let mut read = 0;
    for (at, token) in activations.tokens.iter().enumerate() {
        for of in token {
            for (id, next) in ids(of).into_iter().zip(&mut next) {
                let there = cache.take(id, bytes, next);
                read += if at >= from { bytes - there } else { 0 };
            }
            cache.end();
        }
    }
    read
}

#[cfg(test)]
mod tests {
    use super::super::bundle::{Bundle, Phases, QuantFormat};
    use super::super::synthetic::Recipe;
    use super::*;

    /// Experts of OLMoE's shapes in 4 bits, a quarter of the layers' neurons for a test in a debug build.
    fn at(sparsity: f64) -> Bytes {
        let recipe = Recipe {
            layers: 2,
            experts: 16,
            k: 2,
            neurons: 512,
            sparsity,
            skew: 0.6,
            persistence: 0.6,
            tokens: 96,
            seed: 11,
        };
        let bundle = Bundle::new(2048, QuantFormat::Q4, 512, Phases::Two).unwrap();
        let shape = Shape {
            matrices: 32,
            neurons: 512,
            cluster: 64,
            gate: bundle.gate().bytes,
            up_down: bundle.up_down().bytes,
        };
        let all = shape.neuron_bytes() * 32 * 512;
        replay(&recipe.sample().unwrap(), shape, all / 2, 32).unwrap()
    }

    #[test]
    fn sparser_models_read_less_but_at_least_the_minimum() {
        let mut last = f64::INFINITY;
        for sparsity in [0.5, 0.7, 0.9] {
            let bytes = at(sparsity);
            assert!(
                bytes.least <= bytes.neurons && bytes.neurons < bytes.experts && bytes.hot < bytes.neurons,
                "{sparsity} {bytes:?}"
            );
            assert!(bytes.gates.unwrap() < bytes.experts, "{sparsity} {bytes:?}");
            assert!(bytes.neurons < last);
            last = bytes.neurons;
        }
    }

    #[test]
    fn inconsistent_replay_inputs_are_rejected() {
        let one =
            Activations { matrices: 1, neurons: 2, tokens: vec![vec![(0, vec![0, 1])], vec![(0, vec![1])]] };
        let shape = Shape { matrices: 1, neurons: 2, cluster: 1, gate: 10, up_down: 5 };
        let bytes = replay(&one, shape, 15, 0).unwrap();
        // With room for one neuron, the second is streamed, and read again later; the best cache keeps it.
        assert_eq!((bytes.neurons, bytes.least, bytes.experts), (22.5, 15.0, 30.0));
        assert_eq!(bytes.gates, None);
        // A cluster may be larger than a matrix.
        let huge = Shape { gate: 1 << 40, cluster: u32::MAX, ..shape };
        assert_eq!(replay(&one, huge, 1 << 43, 0).unwrap().hot, 0.0);
        assert!(replay(&one, shape, 15, 2).is_err());
        assert!(replay(&one, Shape { neurons: 3, ..shape }, 15, 0).is_err());
        let bad = Activations { tokens: vec![vec![(0, vec![2])]], ..one };
        assert!(replay(&bad, shape, 15, 0).is_err());
    }
}
