//! Replay of recorded routing through a cache, with counts.

use super::trace::Trace;
use moec_runtime::offload::cache::{Cache, CacheError, Event, Key, Setting};
use std::ops::AddAssign;

/// Counts of a replay.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CacheCounters {
    /// Uses of experts that were resident.
    pub hits: u64,
    /// Uses of experts that were not resident.
    pub misses: u64,
    /// Bytes of the experts that were used.
    pub used: u64,
    /// Bytes that were read for them.
    pub read: u64,
}

impl CacheCounters {
    /// Uses of experts.
    pub fn accesses(&self) -> u64 {
        self.hits + self.misses
    }

    /// Share of the used bytes that were resident: the share of hits if all experts have the same size. 0
    /// without uses.
    pub fn hit_rate(&self) -> f64 {
        if self.used == 0 { 0.0 } else { (self.used - self.read) as f64 / self.used as f64 }
    }

    /// Counts a use of an expert of `bytes` of which `resident` were resident.
    pub(super) fn count(&mut self, bytes: u64, resident: u64) {
        let hit = resident >= bytes;
        self.hits += u64::from(hit);
        self.misses += u64::from(!hit);
        self.used += bytes;
        self.read += bytes - resident.min(bytes);
    }
}

impl AddAssign for CacheCounters {
    fn add_assign(&mut self, other: Self) {
        self.hits += other.hits;
        self.misses += other.misses;
        self.used += other.used;
        self.read += other.read;
    }
}

/// The counts of a run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Replay {
    /// By layer.
    pub layers: Vec<CacheCounters>,
    /// By fold of the trace; all folds but one have the same number of tokens.
    pub folds: Vec<CacheCounters>,
}

impl Replay {
    pub(super) fn new(layers: usize, folds: usize) -> Self {
        Self { layers: vec![CacheCounters::default(); layers], folds: vec![CacheCounters::default(); folds] }
    }

    /// Counts of all layers.
    pub fn total(&self) -> CacheCounters {
        self.layers.iter().fold(CacheCounters::default(), |mut sum, l| {
            sum += *l;
            sum
        })
    }

    pub(super) fn add(&mut self, trace: &Trace, token: usize, layer: usize, counters: CacheCounters) {
        let fold = fold(trace, self.folds.len(), token);
        self.layers[layer] += counters;
        self.folds[fold] += counters;
    }
}

/// The fold of a token.
pub(super) fn fold(trace: &Trace, folds: usize, token: usize) -> usize {
    token * folds / trace.tokens().max(1)
}

/// Runs a trace through a cache of `capacity` bytes that starts empty, counting over `folds` folds. The cache
/// is kept from one sequence of the trace to the next, as in a program that answers one after the other.
///
/// # Errors
/// None that a trace of these experts can cause.
pub fn replay(trace: &Trace, capacity: u64, setting: &Setting, folds: usize) -> Result<Replay, CacheError> {
    replay_pinned(trace, capacity, setting, &[], folds)
}

/// Like [`replay`], with experts that are never evicted. Their first use counts as a miss: they have to be
/// read once.
///
/// # Errors
/// As [`Cache::with_pinned`].
pub fn replay_pinned(
    trace: &Trace,
    capacity: u64,
    setting: &Setting,
    pinned: &[Key],
    folds: usize,
) -> Result<Replay, CacheError> {
    let layers = trace.experts().layers();
    let mut cache = Cache::with_pinned(trace.experts(), capacity, setting, pinned)?;
    let mut replay = Replay::new(layers.len(), folds.max(1));
    for (token, layer, step) in trace.steps() {
        let bytes = layers[layer].bytes;
        let mut counters = CacheCounters::default();
        cache.step(layer, step.chosen, step.ranked, |event| match event {
            Event::Hit(_) => counters.count(bytes, bytes),
            Event::Load(_) | Event::Stream(_) => counters.count(bytes, 0),
            Event::Evict(_) => {}
        })?;
        replay.add(trace, token, layer, counters);
    }
    Ok(replay)
}
