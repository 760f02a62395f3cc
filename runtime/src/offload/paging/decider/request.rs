//! Requests of a layer for its experts and for those of the next layers.

use super::{Decider, ExpertRequest, ExpertState, Turn, Want, Why};
use crate::error::{Error, Result};
use crate::offload::cache::{self, Key};
use crate::offload::disk::Priority;
use std::time::Duration;

impl Decider {
    /// Handles the request of a layer: missing experts are read in the order in which they will be computed.
    pub(super) fn requested(&mut self, now: Duration, request: ExpertRequest<'_>) -> Result<()> {
        let ExpertRequest { layer, active, beside, rows, scores, .. } = request;
        self.order.clear();
        self.chosen.clear();
        let Some(&place) = self.places.get(layer) else { return Ok(()) };
        if self.broken {
            self.reset();
        }
        let experts = place.shape.experts;
        let known = |&e: &i32| u32::try_from(e).ok().filter(|&e| e < experts);
        self.chosen.extend(active.iter().filter_map(known).map(|e| e as u16));
        let key = |e: u32| Key { layer: layer as u16, expert: e as u16 };
        let held = |e: &u32| self.cache.contains(key(*e)) && !active.contains(&(*e as i32));
        self.chosen.extend(beside.iter().filter_map(known).filter(held).map(|e| e as u16));
        self.receive(layer);
        let Self { cache, ranking, chosen, events, .. } = &mut *self;
        events.clear();
        // A policy looks at the scores of a token; those of many tokens say nothing that their choices do
        // not.
        let ranked = if rows == 1 && cache.depth() > 0 {
            ranking.of_logits(scores.of(0), place.shape.score)
        } else {
            &[]
        };
        cache.step(layer, chosen, ranked, |e| events.push(e)).map_err(Error::plan)?;
        self.streams = self.events.iter().filter(|e| matches!(e, cache::Event::Stream(_))).count();
        self.split = !self.make_way(self.streams);
        self.passed.fill(false);
        self.next = 0;
        for i in 0..self.events.len() {
            match self.events[i] {
                cache::Event::Evict(key) => self.evict(self.id(key)),
                cache::Event::Hit(key) => {
                    let id = self.id(key);
                    self.counts.hits += 1;
                    let why = std::mem::take(&mut self.why[id]);
                    self.counts.predicted += u64::from(why == Why::Prefetched);
                    self.hurry(id);
                }
                event @ (cache::Event::Load(key) | cache::Event::Stream(key)) => {
                    let id = self.id(key);
                    let streams = matches!(event, cache::Event::Stream(_));
                    self.counts.streamed += u64::from(streams);
                    if std::mem::take(&mut self.why[id]) == Why::Prefetched {
                        // A prefetched entry: in memory, or being read.
                        self.counts.hits += 1;
                        self.counts.predicted += 1;
                        self.hurry(id);
                        continue;
                    }
                    self.counts.misses += 1;
                    let parts = if streams && self.split { 1 } else { 2 };
                    self.want(Want { id, first: 0, parts }, Priority::Demand, streams);
                }
            }
        }
        // First experts in memory, then those being read, then those just requested, in the order of their
        // arrival.
        for turn in 0..3 {
            for (at, e) in active.iter().enumerate() {
                let Some(e) = known(e) else { continue };
                let id = place.first + e as usize;
                let when = match (self.held[id], self.is_whole(id)) {
                    (_, true) => 0,
                    (ExpertState::Reading(_), _) => 1,
                    _ => 2,
                };
                if when == turn {
                    let passes = !self.cache.contains(self.keys[id]);
                    self.order.push(Turn { place: at, id, passes });
                }
            }
        }
        self.pump();
        self.look_ahead(now, request);
        self.pump();
        Ok(())
    }

    /// Whether an expert is never read from disk, since another memory holds it.
    fn lives_elsewhere(&self, key: Key) -> bool {
        self.elsewhere.binary_search(&key).is_ok()
    }

    /// Reads ahead the experts that the scores of the next layers predict.
    fn look_ahead(&mut self, now: Duration, request: ExpertRequest<'_>) {
        let ExpertRequest { layer, rows, k, scored, scores, stalled, disk, .. } = request;
        self.ahead.requested(layer, &self.chosen, now, stalled);
        if !self.predicts {
            return;
        }
        // A prompt uses nearly all experts of every layer: those of the next one are read in their order
        // (PowerInfer-2, §4.1.1).
        if let Some(next) = self
            .places
            .get(layer + 1)
            .filter(|p| rows > 1 && rows * p.shape.k as usize >= p.shape.experts as usize)
        {
            for expert in 0..next.shape.experts {
                let key = Key { layer: (layer + 1) as u16, expert: expert as u16 };
                if self.lives_elsewhere(key) {
                    continue;
                }
                if !self.read_surely(key) {
                    break;
                }
            }
            return;
        }
        if rows != 1 {
            return;
        }
        if let Some(place) = self.places.get(layer) {
            self.ahead.little(layer, k, place.shape, scores.of(0));
        }
        if self.ahead.known(layer) {
            let known = std::mem::take(&mut self.ahead);
            for &key in known.prefetches() {
                if !self.lives_elsewhere(key) {
                    self.read_surely(key);
                }
            }
            self.ahead = known;
            return;
        }
        if scored < 2 {
            return;
        }
        let pending = self.pending();
        let mut planned = std::mem::take(&mut self.ahead);
        let resident = |key: Key| {
            self.cache.contains(key) || self.prefetched.contains(&self.id(key)) || self.lives_elsewhere(key)
        };
        let shape = |i: usize| self.places.get(layer + i).map(|p| (p.shape, p.bytes));
        planned.plan(layer, scored - 1, &shape, &|i| scores.of(i), &resident, now, disk, pending);
        for i in 0..planned.prefetches().len() {
            self.invite(planned.prefetches()[i]);
        }
        self.ahead = planned;
    }
}
