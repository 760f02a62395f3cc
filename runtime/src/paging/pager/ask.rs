//! A layer asks for its experts, and for those of the next layers.

use super::reads::want;
use super::{Held, Pager, State, Want, Why};
use crate::cache::{self, Key};
use crate::error::{Error, Result};
use crate::flash::Priority;
use std::sync::PoisonError;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

/// Bits of an expert whose two parts are there.
const WHOLE: u8 = 3;
/// Most tokens that are recorded.
const RECORDED: usize = 1 << 14;

/// What a step asks for.
#[derive(Clone, Copy, Debug)]
pub(in crate::paging) struct Asked<'a> {
    pub(in crate::paging) layer: usize,
    /// Experts in the order of the dispatch table.
    pub(in crate::paging) active: &'a [i32],
    /// Rows of the call.
    pub(in crate::paging) rows: usize,
    /// Experts per token of the call.
    pub(in crate::paging) k: usize,
    /// Layers whose scores there are, its own first.
    pub(in crate::paging) scores: usize,
    pub(in crate::paging) lanes: usize,
}

impl Pager {
    /// A layer asks for its experts: what is missing is read, in the order in which it will be computed.
    ///
    /// # Errors
    /// Experts that are not there; a reader that has broken down.
    pub(in crate::paging) fn fetch<'s>(
        &self,
        asked: Asked<'_>,
        score: &dyn Fn(usize, usize) -> &'s [f32],
    ) -> Result<()> {
        let Asked { layer, active, rows, lanes, .. } = asked;
        let Some(place) = self.places.get(layer) else { return Ok(()) };
        let mut stage = self.stage.write().unwrap_or_else(PoisonError::into_inner);
        stage.clear(lanes);
        let mut guard = self.lock();
        let state = &mut *guard;
        if self.broken.swap(false, Ordering::Relaxed) {
            self.reset(state);
        }
        self.take_news(state);
        let experts = place.shape.experts;
        state.chosen.clear();
        state.chosen.extend(
            active.iter().filter_map(|&e| u32::try_from(e).ok()).filter(|&e| e < experts).map(|e| e as u16),
        );
        self.receive(state, layer);
        let State { cache, ranking, chosen, events, .. } = state;
        events.clear();
        // A policy looks at the scores of a token; those of many tokens say nothing that their choices do not.
        let ranked = if rows == 1 && cache.depth() > 0 {
            ranking.of_logits(score(0, 0), place.shape.score)
        } else {
            &[]
        };
        cache.step(layer, chosen, ranked, |e| events.push(e)).map_err(|e| Error::Plan(e.to_string()))?;
        if let Some((trace, token)) = state.record.as_mut().filter(|_| rows == 1) {
            if layer == 0 {
                token.clear();
            }
            token.extend(&state.chosen);
            if layer + 1 == self.places.len() && trace.tokens() < RECORDED {
                // A token whose layers were not all seen is no token.
                let _ = trace.push(token, &[]);
            }
        }
        state.streams = state.events.iter().filter(|e| matches!(e, cache::Event::Stream(_))).count();
        stage.split = !self.make_way(state, state.streams);
        state.passed.fill(false);
        state.next = 0;
        for i in 0..state.events.len() {
            match state.events[i] {
                cache::Event::Evict(key) => self.evict(state, self.id(key)),
                cache::Event::Hit(key) => {
                    let id = self.id(key);
                    state.report.hits += 1;
                    let why = std::mem::take(&mut state.why[id]);
                    state.report.foreseen += u64::from(why == Why::Guessed);
                    self.hurry(state, id);
                }
                event @ (cache::Event::Load(key) | cache::Event::Stream(key)) => {
                    let id = self.id(key);
                    let streams = matches!(event, cache::Event::Stream(_));
                    state.report.streamed += u64::from(streams);
                    if std::mem::take(&mut state.why[id]) == Why::Guessed {
                        // A guest: there, or on its way.
                        state.report.hits += 1;
                        state.report.foreseen += 1;
                        self.hurry(state, id);
                        continue;
                    }
                    state.report.misses += 1;
                    let parts = if streams && stage.split { 1 } else { 2 };
                    want(state, Want { id, first: 0, parts }, Priority::Demand);
                }
            }
        }
        // First who is there, then who is on the way, then who has just been asked for, as they will come.
        for turn in 0..3 {
            for (at, &e) in active.iter().enumerate() {
                let Some(e) = usize::try_from(e).ok().filter(|&e| e < experts as usize) else { continue };
                let id = place.first + e;
                let whole = self.ready[id].load(Ordering::Acquire) == WHOLE;
                let when = match (&state.held[id], whole) {
                    (_, true) => 0,
                    (Held::Reading(_), _) => 1,
                    _ => 2,
                };
                if when == turn {
                    let key = self.keys[id];
                    stage.push(at, id, !state.cache.contains(key));
                }
            }
        }
        self.pump(state)?;
        self.look_ahead(state, asked, score);
        self.pump(state)
    }

    /// Reads ahead what the scores of the next layers promise.
    fn look_ahead<'s>(&self, state: &mut State, asked: Asked<'_>, score: &dyn Fn(usize, usize) -> &'s [f32]) {
        let Asked { layer, rows, scores, k, .. } = asked;
        let now = Instant::now();
        let stalled = Duration::from_nanos(self.stalled.load(Ordering::Relaxed));
        state.ahead.asked(layer, &state.chosen, now, stalled);
        if !self.foresees {
            return;
        }
        // A prompt uses nearly all experts of every layer: those of the next one are streamed in as they lie (PowerInfer-2,
        // §4.1.1).
        if let Some(next) = self
            .places
            .get(layer + 1)
            .filter(|p| rows > 1 && rows * p.shape.k as usize >= p.shape.experts as usize)
        {
            for expert in 0..next.shape.experts {
                let key = Key { layer: (layer + 1) as u16, expert: expert as u16 };
                if !self.read_surely(state, key) {
                    break;
                }
            }
            return;
        }
        if rows != 1 {
            return;
        }
        if let Some(place) = self.places.get(layer) {
            state.ahead.little(layer, k, place.shape, score(0, 0));
        }
        if state.ahead.known(layer) {
            let known = std::mem::take(&mut state.ahead);
            for &key in known.prefetches() {
                self.read_surely(state, key);
            }
            state.ahead = known;
            return;
        }
        if scores < 2 {
            return;
        }
        let stats = self.flash.stats();
        let pending: u64 = self.pending(state);
        let mut planned = std::mem::take(&mut state.ahead);
        let resident = |key: Key| state.cache.contains(key) || state.guests.contains(&self.id(key));
        let shape = |i: usize| self.places.get(layer + i).map(|p| (p.shape, p.bytes));
        planned.plan(layer, scores - 1, &shape, score, &resident, &stats, pending);
        for i in 0..planned.prefetches().len() {
            self.invite(state, planned.prefetches()[i]);
        }
        state.ahead = planned;
    }
}
