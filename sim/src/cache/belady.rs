//! Belady's optimum: the bound that no policy passes, since it knows what comes.
//!
//! After every step the cache keeps, of what it held and what was just read, those experts that are used again
//! the soonest; a miss that comes back later than every other expert is not kept. With experts of one size this is
//! the least number of misses that is possible (L. A. Belady, 1966, with bypass).
//!
//! With experts of several sizes the best choice of whole experts is a hard problem. What is counted then is the
//! optimum of a cache that may keep parts of experts, byte by byte: no policy reads fewer bytes, though none may
//! reach it. The bound is one of bytes; hits count wholly resident experts, and bound nothing.

use super::replay::{CacheCounters, Replay};
use super::trace::Trace;
use moec_runtime::offload::cache::Id;
use std::cmp::Reverse;
use std::collections::BTreeSet;

/// Not used again: past every step.
const NEVER: u64 = u64::MAX;

/// Held experts where every next use is known.
pub struct Belady {
    capacity: u64,
    /// Bytes that are there, by number.
    resident: Vec<u64>,
    held: u64,
    /// The step that uses it again, by number.
    next: Vec<u64>,
    /// Held experts, the latest use first.
    order: BTreeSet<(Reverse<u64>, Id)>,
}

impl Belady {
    /// An empty cache of `capacity` bytes for `count` things.
    pub fn new(count: usize, capacity: u64) -> Self {
        let (resident, next, order) = (vec![0; count], vec![NEVER; count], BTreeSet::new());
        Self { capacity, resident, held: 0, next, order }
    }

    /// A step uses a thing of `bytes` that step `next` uses again. Gives how much of it was there.
    pub fn take(&mut self, id: Id, bytes: u64, next: u64) -> u64 {
        let own = std::mem::replace(&mut self.resident[id as usize], bytes);
        self.held += bytes - own;
        let was = std::mem::replace(&mut self.next[id as usize], next);
        self.order.remove(&(Reverse(was), id));
        self.order.insert((Reverse(next), id));
        own
    }

    /// The step ends: what is used again the latest goes.
    pub fn end(&mut self) {
        while self.held > self.capacity {
            let Some(&last @ (_, id)) = self.order.first() else { break };
            let own = &mut self.resident[id as usize];
            let goes = (self.held - self.capacity).min(*own);
            *own -= goes;
            self.held -= goes;
            if *own == 0 {
                self.order.remove(&last);
            }
        }
    }
}

/// By use, in order, the step that uses the same of `count` things again.
pub fn next_uses<I>(count: usize, steps: impl DoubleEndedIterator<Item = (u64, I)>) -> Vec<u64>
where
    I: DoubleEndedIterator<Item = Id>,
{
    let mut seen = vec![NEVER; count];
    let mut next = Vec::new();
    for (now, ids) in steps.rev() {
        next.extend(ids.rev().map(|id| std::mem::replace(&mut seen[id as usize], now)));
    }
    next.reverse();
    next
}

/// The least that a cache of `capacity` bytes must read on this trace, starting empty, counted over `folds`
/// folds.
pub fn optimum(trace: &Trace, capacity: u64, folds: usize) -> Replay {
    let experts = trace.experts();
    let layers = experts.layers();
    // Whole experts where all are equal: a remainder would hold a part of one.
    let capacity = experts.slot().map_or(capacity, |slot| capacity / slot * slot);
    let ids = |token: usize, layer: usize| {
        let first = experts.ids(layer).start;
        trace.step(token, layer).chosen.iter().map(move |&e| first + u32::from(e))
    };
    let (tokens, of) = (trace.tokens(), layers.len());
    let steps = (0..tokens * of).map(|n| (n as u64, ids(n / of, n % of)));
    let mut next = next_uses(experts.count(), steps).into_iter();
    let mut cache = Belady::new(experts.count(), capacity);
    let mut replay = Replay::new(of, folds.max(1));
    for (token, layer) in (0..tokens).flat_map(|t| (0..of).map(move |l| (t, l))) {
        let bytes = layers[layer].bytes;
        let mut counters = CacheCounters::default();
        for (id, next) in ids(token, layer).zip(&mut next) {
            counters.count(bytes, cache.take(id, bytes, next));
        }
        cache.end();
        replay.add(trace, token, layer, counters);
    }
    replay
}
