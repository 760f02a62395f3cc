//! Belady's optimum: the bound that no policy passes, since it knows what comes.
//!
//! After every step the cache keeps, of what it held and what was just read, those experts that are used again
//! the soonest; a miss that comes back later than everybody else is not kept. With experts of one size this is
//! the least number of misses that is possible (L. A. Belady, 1966, with bypass).
//!
//! With experts of several sizes the best choice of whole experts is a hard problem. What is counted then is the
//! optimum of a cache that may keep parts of experts, byte by byte: no policy reads fewer bytes, though none may
//! reach it. The bound is one of bytes; hits count wholly resident experts, and bound nothing.

use super::heap::Heap;
use super::replay::{Replay, Tally};
use super::trace::Trace;

/// Not used again: past every step, and exact in a float.
const NEVER: u64 = 1 << 52;

/// The least that a cache of `capacity` bytes must read on this trace, starting empty, counted over `folds`
/// stretches.
pub fn optimum(trace: &Trace, capacity: u64, folds: usize) -> Replay {
    let experts = trace.experts();
    let layers = experts.layers();
    // Whole experts where all are equal: a remainder would hold a part of one.
    let capacity = experts.slot().map_or(capacity, |slot| capacity / slot * slot);
    let next = next_uses(trace);
    let mut next = next.iter();
    let mut resident = vec![0_u64; experts.count()];
    // The latest use on top.
    let mut order = Heap::new(experts.count());
    let mut held = 0_u64;
    let mut replay = Replay::new(layers.len(), folds.max(1));
    for (token, layer, step) in trace.steps() {
        let (bytes, first) = (layers[layer].bytes, experts.ids(layer).start);
        let mut tally = Tally::default();
        for (&expert, &next) in step.chosen.iter().zip(&mut next) {
            let id = first + u32::from(expert);
            let own = &mut resident[id as usize];
            tally.count(bytes, *own);
            held += bytes - *own;
            *own = bytes;
            order.set(id, (-(next as f64), u64::from(id)));
        }
        while held > capacity {
            let Some(id) = order.least(|_| false) else { break };
            let own = &mut resident[id as usize];
            let goes = (held - capacity).min(*own);
            *own -= goes;
            held -= goes;
            if *own == 0 {
                order.remove(id);
            }
        }
        replay.add(trace, token, layer, tally);
    }
    replay
}

/// The step at which every use of an expert is followed by the next.
fn next_uses(trace: &Trace) -> Vec<u64> {
    let experts = trace.experts();
    let layers = experts.layers().len();
    let mut seen = vec![NEVER; experts.count()];
    let mut next = vec![NEVER; trace.accesses()];
    let mut at = trace.accesses();
    for token in (0..trace.tokens()).rev() {
        for layer in (0..layers).rev() {
            let now = (token * layers + layer) as u64;
            for &expert in trace.step(token, layer).chosen.iter().rev() {
                let last = &mut seen[(experts.ids(layer).start + u32::from(expert)) as usize];
                at -= 1;
                next[at] = std::mem::replace(last, now);
            }
        }
    }
    next
}
