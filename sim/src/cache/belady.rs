//! Belady's optimum: a bound for all policies, with knowledge of future uses.
//!
//! After every step the cache keeps those experts, held or just read, that are used again the soonest. A miss
//! whose next use is later than that of every other expert is not kept. With experts of one size this gives
//! the least possible number of misses (L. A. Belady, 1966, with bypass).
//!
//! With experts of several sizes the best choice of whole experts is a hard problem. The result is then the
//! optimum of a cache that may keep parts of experts: no policy reads fewer bytes, but possibly none reaches
//! it. Only bytes are a bound; hits count wholly resident experts, and are no bound.

use super::replay::{CacheCounters, Replay};
use super::trace::Trace;
use moec_runtime::offload::cache::Id;
use std::cmp::Reverse;
use std::collections::BTreeSet;

/// Next use of an expert that is not used again: after every step.
const NEVER: u64 = u64::MAX;

/// Cache of experts whose next uses are known.
pub struct Belady {
    capacity: u64,
    /// Resident bytes, by number.
    resident: Vec<u64>,
    held: u64,
    /// Step of the next use, by number.
    next: Vec<u64>,
    /// Held experts, the latest use first.
    order: BTreeSet<(Reverse<u64>, Id)>,
}

impl Belady {
    /// Creates an empty cache of `capacity` bytes for `count` items.
    pub fn new(count: usize, capacity: u64) -> Self {
        let (resident, next, order) = (vec![0; count], vec![NEVER; count], BTreeSet::new());
        Self { capacity, resident, held: 0, next, order }
    }

    /// A step uses an item of `bytes` that step `next` uses again. Returns its resident bytes.
    pub fn take(&mut self, id: Id, bytes: u64, next: u64) -> u64 {
        let own = std::mem::replace(&mut self.resident[id as usize], bytes);
        self.held += bytes - own;
        let was = std::mem::replace(&mut self.next[id as usize], next);
        self.order.remove(&(Reverse(was), id));
        self.order.insert((Reverse(next), id));
        own
    }

    /// Ends a step: evicts what is used again the latest.
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

/// For each use, in order, the step that uses the same of `count` items again.
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

/// The least bytes that a cache of `capacity` bytes, initially empty, must read on this trace, counted over
/// `folds` folds.
pub fn optimum(trace: &Trace, capacity: u64, folds: usize) -> Replay {
    let experts = trace.experts();
    let layers = experts.layers();
    // Whole experts if all have the same size: a remainder would hold a part of one.
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
