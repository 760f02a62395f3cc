//! Requests of a layer for its experts and for those of the next layers.

use super::{Decider, ExpertRequest, ExpertState, PendingRead, ReadReason, RequestedExpert};
use crate::error::{Error, Result};
use crate::offload::cache::{self, Key};
use crate::offload::disk::Priority;
use std::time::Duration;

impl Decider {
    /// Handles the request of a layer: missing experts are read in the order in which they will be computed.
    pub(super) fn requested(&mut self, now: Duration, request: ExpertRequest<'_>) -> Result<()> {
        let ExpertRequest { layer, active, accelerator_experts, rows, scores, .. } = request;
        self.order.clear();
        self.chosen.clear();
        let Some(&place) = self.layers.get(layer) else { return Ok(()) };
        if self.broken {
            self.reset();
        }
        let experts = place.shape.experts;
        let known = |&e: &i32| u32::try_from(e).ok().filter(|&e| e < experts);
        self.chosen.extend(active.iter().filter_map(known).map(|e| e as u16));
        let key = |e: u32| Key { layer: layer as u16, expert: e as u16 };
        let held = |e: &u32| self.cache.contains(key(*e)) && !active.contains(&(*e as i32));
        self.chosen.extend(accelerator_experts.iter().filter_map(known).filter(held).map(|e| e as u16));
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
        self.split = !self.free_staging(self.streams);
        self.gate_up_done.fill(false);
        self.next = 0;
        for i in 0..self.events.len() {
            match self.events[i] {
                cache::Event::Evict(key) => self.evict(self.id(key)),
                cache::Event::Hit(key) => {
                    let id = self.id(key);
                    self.counts.hits += 1;
                    let why = std::mem::take(&mut self.read_reasons[id]);
                    self.counts.predicted += u64::from(why == ReadReason::Prefetched);
                    self.raise_priority(id);
                }
                event @ (cache::Event::Load(key) | cache::Event::Stream(key)) => {
                    let id = self.id(key);
                    let streams = matches!(event, cache::Event::Stream(_));
                    self.counts.streamed += u64::from(streams);
                    if std::mem::take(&mut self.read_reasons[id]) == ReadReason::Prefetched {
                        // A prefetched entry: in memory, or being read.
                        self.counts.hits += 1;
                        self.counts.predicted += 1;
                        self.raise_priority(id);
                        continue;
                    }
                    self.counts.misses += 1;
                    let parts = if streams && self.split { 1 } else { 2 };
                    self.enqueue_read(PendingRead { id, first: 0, parts }, Priority::Demand, streams);
                }
            }
        }
        // First experts in memory, then those being read, then those just requested, in the order of their
        // arrival.
        for group in 0..3 {
            for (at, e) in active.iter().enumerate() {
                let Some(e) = known(e) else { continue };
                let id = place.first + e as usize;
                let expert_group = match (self.locations[id], self.is_whole(id)) {
                    (_, true) => 0,
                    (ExpertState::Reading(_), _) => 1,
                    _ => 2,
                };
                if expert_group == group {
                    let bypasses = !self.cache.contains(self.keys[id]);
                    self.order.push(RequestedExpert { place: at, id, bypasses });
                }
            }
        }
        self.start_reads();
        self.look_ahead(now, request);
        self.start_reads();
        Ok(())
    }

    /// Whether an expert is never read from disk, since another memory holds it.
    fn is_elsewhere(&self, key: Key) -> bool {
        self.elsewhere.binary_search(&key).is_ok()
    }

    /// Reads ahead the experts that the scores of the next layers predict.
    fn look_ahead(&mut self, now: Duration, request: ExpertRequest<'_>) {
        let ExpertRequest { layer, rows, k, scored, scores, stalled, disk, .. } = request;
        self.ahead.requested(layer, &self.chosen, now, stalled);
        if rows != 1 {
            self.ahead.forget();
        }
        if !self.predicts {
            return;
        }
        // A prompt uses nearly all experts of every layer: those of the next one are read in their order
        // (PowerInfer-2, §4.1.1).
        if let Some(next) = self
            .layers
            .get(layer + 1)
            .filter(|p| rows > 1 && rows * p.shape.k as usize >= p.shape.experts as usize)
        {
            for expert in 0..next.shape.experts {
                let key = Key { layer: (layer + 1) as u16, expert: expert as u16 };
                if self.is_elsewhere(key) {
                    continue;
                }
                if !self.read_required(key) {
                    break;
                }
            }
            return;
        }
        if rows != 1 {
            return;
        }
        if let Some(place) = self.layers.get(layer) {
            self.ahead.little(layer, k, place.shape, scores.of(0), &self.chosen);
        }
        if self.ahead.known(layer) {
            let known = std::mem::take(&mut self.ahead);
            for &key in known.prefetches() {
                if !self.is_elsewhere(key) {
                    self.read_required(key);
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
            self.cache.contains(key) || self.prefetched.contains(&self.id(key)) || self.is_elsewhere(key)
        };
        let shape = |i: usize| self.layers.get(layer + i).map(|p| (p.shape, p.bytes));
        planned.plan(layer, scored - 1, &shape, &|i| scores.of(i), &resident, now, disk, pending);
        for i in 0..planned.prefetches().len() {
            self.prefetch(planned.prefetches()[i]);
        }
        self.ahead = planned;
    }
}
