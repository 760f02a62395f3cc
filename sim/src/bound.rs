//! The least that any cache would have read for the tokens of a run.

use crate::cache::optimum;
use crate::neurons::replay::replay;
use moec_runtime::offload::paging::Used;

/// Bytes that a cache which knows what comes (Belady's) would have read for recorded tokens, and what they used in all. None where
/// nothing was recorded.
pub fn least_read(used: &Used) -> Option<(u64, u64)> {
    match used {
        Used::Experts { trace, capacity, bytes } => {
            let tally = optimum(trace, *capacity, 1).total();
            Some((tally.misses * bytes, tally.accesses() * bytes))
        }
        Used::Neurons { activations, shape, capacity } => {
            let least = replay(activations, *shape, *capacity, 0).ok()?.least;
            let units: u64 = activations.tokens.iter().flatten().map(|(_, units)| units.len() as u64).sum();
            Some(((least * activations.tokens.len() as f64).round() as u64, units * shape.gate))
        }
    }
}
