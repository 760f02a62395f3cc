//! Reading experts before they are requested (HybriMoE, §IV-C).
//!
//! The gates of the next layers, applied to this layer's hidden state, give scores. [`prefetch`] compares the
//! gain of reading an expert with the delay of other reads. Its inputs are measured as the model runs: the
//! time of a layer without waiting, the speed of the disk, and how often such scores are right.

use crate::offload::cache::evicted::EvictedTokens;
use crate::offload::cache::odds::Odds;
use crate::offload::cache::prefetch::{self, Candidate, DEPTH, LookaheadLayer, Prefetch};
use crate::offload::cache::{CachedLayer, EvictedExpertCounts, Key, Ranking};
use moec_ir::plan::PagedLayer;
use std::time::Duration;

/// Weight of the newest in a moving average.
const NEWEST: f64 = 0.1;
/// Bytes after which the speed of the disk counts as known.
const KNOWN: u64 = 16 << 20;

/// Progress of the disk so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DiskProgress {
    /// Bytes that it has read.
    pub bytes: u64,
    /// Time with a read in flight.
    pub busy: Duration,
}

/// Predictions, and buffers for planning.
#[derive(Default)]
pub(super) struct Ahead {
    depth: usize,
    ranking: Option<Ranking>,
    /// Experts that were predicted for each layer and were not in memory, with their ranks, by layers ahead.
    predicted: Vec<[Vec<(u16, usize)>; DEPTH]>,
    /// Frequency with which such experts are requested, by layers ahead.
    odds: [Odds; DEPTH],
    /// Seconds of a layer, without waiting.
    layer_seconds: f64,
    last: Option<(usize, Duration, Duration)>,
    /// Time when the first layer requested experts.
    began: Option<Duration>,
    candidates: [Vec<Candidate>; DEPTH],
    planned: Vec<Prefetch>,
    keys: Vec<Key>,
    /// Experts that are read first if a token is decoded again.
    evicted: EvictedTokens,
}

impl Ahead {
    /// Creates predictions for these layers, at most `depth` of them ahead.
    pub(super) fn new(layers: &[CachedLayer], depth: usize) -> Self {
        let most = layers.iter().map(|l| l.experts).max().unwrap_or(0);
        let k = layers.iter().map(|l| l.k).max().unwrap_or(0);
        let room = || std::array::from_fn(|_| Vec::with_capacity(2 * k));
        Self {
            depth: depth.min(DEPTH),
            ranking: Some(Ranking::new(most, 2 * k)),
            predicted: layers.iter().map(|_| room()).collect(),
            odds: std::array::from_fn(|_| Odds::new(2 * k, k)),
            candidates: std::array::from_fn(|_| Vec::with_capacity(2 * k)),
            planned: Vec::with_capacity(DEPTH * 2 * k),
            keys: Vec::with_capacity(DEPTH * 2 * k),
            evicted: EvictedTokens::new(layers.len(), k),
            ..Self::default()
        }
    }

    /// Records that a layer requests experts: learns how right the predictions were, and how long the layer
    /// before took.
    pub(super) fn requested(&mut self, layer: usize, chosen: &[u16], now: Duration, stalled: Duration) {
        self.began.get_or_insert(now);
        if let Some((before, at, had_stalled)) = self.last.replace((layer, now, stalled))
            && before + 1 == layer
        {
            let time =
                now.saturating_sub(at).saturating_sub(stalled.saturating_sub(had_stalled)).as_secs_f64();
            self.layer_seconds = if self.layer_seconds > 0.0 { mix(self.layer_seconds, time) } else { time };
        }
        let Some(predicted) = self.predicted.get_mut(layer) else { return };
        for (experts, odds) in predicted.iter_mut().zip(&mut self.odds) {
            experts.drain(..).for_each(|(expert, place)| odds.learn(place, chosen.contains(&expert)));
        }
    }

    /// Records the request of a layer of a token that is decoded with `k` experts; `scores` are the router's.
    /// Remembers the experts that a full call would request, and detects such a call.
    pub(super) fn little(
        &mut self,
        layer: usize,
        k: usize,
        shape: PagedLayer,
        scores: &[f32],
        chosen: &[u16],
    ) {
        let full = shape.k as usize;
        self.evicted.begin(layer, k < full);
        if k < full
            && let Some(ranking) = &mut self.ranking
        {
            for &(expert, _) in ranking.of_logits(scores, shape.score).iter().take(full) {
                self.evicted.name(layer, expert);
            }
        }
        self.evicted.count(layer, chosen.iter().copied());
    }

    /// Records that a call with other rows came between.
    pub(super) fn forget(&mut self) {
        self.evicted.forget();
    }

    /// Experts of tokens that were decoded again.
    pub(super) fn again(&self) -> EvictedExpertCounts {
        self.evicted.counts()
    }

    /// Finds the experts that the next layers will request if the token is decoded again. Returns whether
    /// they are known.
    pub(super) fn known(&mut self, layer: usize) -> bool {
        self.keys.clear();
        if self.evicted.of(layer).is_none() {
            return false;
        }
        for layer in layer + 1..=layer + self.depth {
            let experts = self.evicted.of(layer).into_iter().flatten();
            self.keys.extend(experts.map(|&expert| Key { layer: layer as u16, expert }));
        }
        true
    }

    /// Fills [`Ahead::prefetches`] for a layer that has scores for up to `scores` layers ahead.
    #[allow(clippy::too_many_arguments, reason = "all are read once, from one place")]
    pub(super) fn plan<'s>(
        &mut self,
        layer: usize,
        scores: usize,
        shape: &dyn Fn(usize) -> Option<(PagedLayer, u64)>,
        score: &dyn Fn(usize) -> &'s [f32],
        resident: &dyn Fn(Key) -> bool,
        now: Duration,
        disk: DiskProgress,
        pending: u64,
    ) {
        self.keys.clear();
        let seconds = disk.busy.as_secs_f64();
        let Some(ranking) = &mut self.ranking else { return };
        if disk.bytes < KNOWN || seconds <= 0.0 || self.layer_seconds <= 0.0 {
            return;
        }
        let rate = disk.bytes as f64 / seconds;
        let mut looks: [Option<LookaheadLayer<'_>>; DEPTH] = [None; DEPTH];
        let count = scores.min(self.depth);
        for ahead in 1..=count {
            let Some((shape, _)) = shape(ahead) else { break };
            let ranked = ranking.of_logits(score(ahead), shape.score);
            let candidates = &mut self.candidates[ahead - 1];
            let odds = &self.odds[ahead - 1];
            candidates.clear();
            candidates.extend(ranked.iter().enumerate().map(|(place, &(expert, _))| {
                let key = Key { layer: (layer + ahead) as u16, expert };
                Candidate { expert, probability: odds.of(place), resident: resident(key) }
            }));
            if let Some(predicted) = self.predicted.get_mut(layer + ahead) {
                let missing = candidates.iter().enumerate().filter(|(_, c)| !c.resident);
                predicted[ahead - 1].clear();
                predicted[ahead - 1].extend(missing.map(|(place, c)| (c.expert, place)));
            }
        }
        for (ahead, (look, candidates)) in looks.iter_mut().zip(&self.candidates).enumerate().take(count) {
            let Some((shape, bytes)) = shape(ahead + 1) else { break };
            let k = (shape.k as usize).max(1);
            *look = Some(LookaheadLayer {
                start: (ahead + 1) as f64 * self.layer_seconds + pending as f64 / rate,
                load: bytes as f64 / rate,
                compute: self.layer_seconds / k as f64,
                k,
                candidates,
            });
        }
        let there = looks.iter().take_while(|l| l.is_some()).count();
        let looks: [LookaheadLayer<'_>; DEPTH] = looks.map(|l| {
            l.unwrap_or(LookaheadLayer { start: 0.0, load: 0.0, compute: 0.0, k: 0, candidates: &[] })
        });
        let wear =
            self.began.map_or(0.0, |b| (seconds / now.saturating_sub(b).as_secs_f64().max(1e-9)).min(1.0));
        prefetch::plan(&looks[..there], pending as f64 / rate, wear, &mut self.planned);
        self.keys
            .extend(self.planned.iter().map(|p| Key { layer: (layer + p.ahead) as u16, expert: p.expert }));
    }

    /// Experts to prefetch, in order.
    pub(super) fn prefetches(&self) -> &[Key] {
        &self.keys
    }
}

fn mix(old: f64, new: f64) -> f64 {
    old + NEWEST * (new - old)
}
