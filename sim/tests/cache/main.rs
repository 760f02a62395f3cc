//! Tests of the cache of experts: policies, replays and choices, compared with hand-computed traces and slow
//! models.
#![allow(clippy::cast_possible_truncation, reason = "numbers of tests are small")]
#![allow(clippy::unwrap_used, clippy::panic, reason = "what fails here fails the test")]

mod allocation;
mod choices;
mod pinned;
mod policies;
mod properties;
mod settings;
mod synthetic;
mod warm;

use moec_runtime::offload::cache::{CachedLayer, Event, ExpertIndex, Setting};
use moec_sim::cache::{CacheCounters, Trace, replay};

/// Layers of experts of one byte each; `k` are used per token.
pub(crate) fn experts(layers: usize, experts: usize, k: usize) -> ExpertIndex {
    ExpertIndex::uniform(layers, CachedLayer { experts, k, bytes: 1 }).unwrap()
}

/// One layer of `n` experts; every token uses one.
pub(crate) fn one_layer(n: usize, uses: &[u16]) -> Trace {
    let mut trace = Trace::new(experts(1, n, 1), false);
    for &e in uses {
        trace.push(&[e], &[]).unwrap();
    }
    trace
}

pub(crate) fn setting(text: &str) -> Setting {
    text.parse().unwrap()
}

pub(crate) fn total(trace: &Trace, capacity: u64, text: &str) -> CacheCounters {
    replay(trace, capacity, &setting(text), 1).unwrap().total()
}

/// Result of each use of a trace: `h` for a hit, `m` for a miss, `s` for a miss that is not kept.
pub(crate) fn letters(trace: &Trace, capacity: u64, text: &str) -> String {
    let mut cache = moec_runtime::offload::cache::Cache::new(trace.experts(), capacity, &setting(text));
    let mut out = String::new();
    for (_, layer, step) in trace.steps() {
        cache
            .step(layer, step.chosen, step.ranked, |event| match event {
                Event::Hit(_) => out.push('h'),
                Event::Load(_) => out.push('m'),
                Event::Stream(_) => out.push('s'),
                Event::Evict(_) => {}
            })
            .unwrap();
    }
    out
}
