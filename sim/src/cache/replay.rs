//! Runs recorded routing through a cache, and counts.

use super::trace::Trace;
use moec_runtime::offload::cache::{Cache, CacheError, Event, Key, Setting};
use std::ops::AddAssign;

/// Counts of a replay.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Tally {
    /// Uses of experts that were resident.
    pub hits: u64,
    /// Uses of experts that were not.
    pub misses: u64,
    /// Bytes of the experts that were used.
    pub used: u64,
    /// Bytes that had to be read for them.
    pub read: u64,
}

impl Tally {
    /// Uses of experts.
    pub fn accesses(&self) -> u64 {
        self.hits + self.misses
    }

    /// Share of the used bytes that were resident: the share of hits where all experts are equally large. 0 where
    /// nothing was used.
    pub fn hit_rate(&self) -> f64 {
        if self.used == 0 { 0.0 } else { (self.used - self.read) as f64 / self.used as f64 }
    }

    /// Counts a use of an expert of `bytes` of which `resident` were there.
    pub(super) fn count(&mut self, bytes: u64, resident: u64) {
        let hit = resident >= bytes;
        self.hits += u64::from(hit);
        self.misses += u64::from(!hit);
        self.used += bytes;
        self.read += bytes - resident.min(bytes);
    }
}

impl AddAssign for Tally {
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
    pub layers: Vec<Tally>,
    /// By stretch of the trace; all stretches have the same number of tokens, but for one.
    pub folds: Vec<Tally>,
}

impl Replay {
    pub(super) fn new(layers: usize, folds: usize) -> Self {
        Self { layers: vec![Tally::default(); layers], folds: vec![Tally::default(); folds] }
    }

    /// Of all layers.
    pub fn total(&self) -> Tally {
        self.layers.iter().fold(Tally::default(), |mut sum, l| {
            sum += *l;
            sum
        })
    }

    pub(super) fn add(&mut self, trace: &Trace, token: usize, layer: usize, tally: Tally) {
        let fold = fold(trace, self.folds.len(), token);
        self.layers[layer] += tally;
        self.folds[fold] += tally;
    }
}

/// The stretch of a trace that a token lies in.
pub(super) fn fold(trace: &Trace, folds: usize, token: usize) -> usize {
    token * folds / trace.tokens().max(1)
}

/// Runs a trace through a cache of `capacity` bytes that starts empty, counting over `folds` stretches. The cache
/// lives on from one sequence of the trace to the next, as in a program that answers one after the other.
///
/// # Errors
/// None that a trace of these experts can cause.
pub fn replay(trace: &Trace, capacity: u64, setting: &Setting, folds: usize) -> Result<Replay, CacheError> {
    replay_pinned(trace, capacity, setting, &[], folds)
}

/// The same with experts that never go. Their first use counts as a miss: they have to be read once.
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
        let mut tally = Tally::default();
        cache.step(layer, step.chosen, step.ranked, |event| match event {
            Event::Hit(_) => tally.count(bytes, bytes),
            Event::Load(_) | Event::Stream(_) => tally.count(bytes, 0),
            Event::Evict(_) => {}
        })?;
        replay.add(trace, token, layer, tally);
    }
    Ok(replay)
}
