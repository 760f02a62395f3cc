//! What is to be read, what is being read, and what became of it.

use super::{Held, Pager, Reading, State, Want, Why};
use crate::error::Result;
use crate::flash::{self, Priority, ReadError, Ticket};
use crate::timeline::What;
use crate::unit::Half;
use std::collections::VecDeque;
use std::sync::atomic::Ordering;
use std::time::Instant;

impl Pager {
    /// What was read ahead is needed now.
    pub(super) fn hurry(&self, state: &mut State, id: usize) {
        match state.held[id] {
            Held::Reading(ticket) => self.flash.raise(ticket),
            // Still waiting for a frame among those that are read ahead.
            Held::Wanted => {
                state.queues[Priority::Demand as usize].push_back(Want { id, first: 0, parts: 2 });
            }
            // The cache thinks that it is there, and its read has failed.
            Held::No => want(state, Want { id, first: 0, parts: 2 }, Priority::Demand),
            Held::Here(_) => {}
        }
    }

    /// An expert leaves its frame.
    pub(super) fn evict(&self, state: &mut State, id: usize) {
        self.ready[id].store(0, Ordering::Relaxed);
        state.why[id] = Why::Asked;
        if let Held::Reading(ticket) = std::mem::take(&mut state.held[id]) {
            self.flash.cancel(ticket);
            state.forget(ticket);
        }
    }

    /// Starts reads as long as frames are free.
    pub(super) fn pump(&self, state: &mut State) -> Result<()> {
        for priority in [Priority::Demand, Priority::Prefetch] {
            while let Some(&want) = state.queues[priority as usize].front() {
                // It went, or came, since.
                if matches!(state.held[want.id], Held::Wanted) {
                    let place = self.place(want.id);
                    let Some(buffer) = self.flash.buffers().take(place.bytes) else { return Ok(()) };
                    let base = buffer.addr();
                    let first = (2 * want.id) as u32 + u32::from(want.first);
                    let ticket = self.flash.submit(first, u32::from(want.parts), priority, buffer)?;
                    state.held[want.id] = Held::Reading(ticket);
                    if let Some(reading) = state.reading.get_mut(ticket.buffer()) {
                        let ahead = priority == Priority::Prefetch;
                        *reading = Some(Reading { ticket, want, base, since: Instant::now(), ahead });
                    }
                }
                state.queues[priority as usize].pop_front();
            }
        }
        Ok(())
    }

    /// Bytes that were asked for and are not there.
    pub(super) fn pending(&self, state: &State) -> u64 {
        let wanted = state.queues.iter().flatten().filter(|w| matches!(state.held[w.id], Held::Wanted));
        let reading = state.reading.iter().flatten().map(|r| r.want);
        wanted.copied().chain(reading).map(|w| self.place(w.id).bytes).sum()
    }

    pub(super) fn take_news(&self, state: &mut State) {
        while let Some(event) = self.flash.poll() {
            self.hear(state, event);
        }
    }

    /// What became of a read.
    pub(super) fn hear(&self, state: &mut State, event: flash::Event) {
        let find = |state: &State, ticket: Ticket| {
            state.reading.get(ticket.buffer()).copied().flatten().filter(|r| r.ticket == ticket)
        };
        match event {
            flash::Event::Arrived { ticket, extent } => {
                if let Some(r) = find(state, ticket) {
                    self.arrived(&r, (extent as usize).saturating_sub(2 * r.want.id));
                }
            }
            flash::Event::Done { ticket, loaded } => {
                if let Some(r) = find(state, ticket) {
                    state.reading[ticket.buffer()] = None;
                    state.held[r.want.id] = Held::Here(loaded);
                    state.report.preloaded += u64::from(state.why[r.want.id] == Why::Start);
                    if let Some(timeline) = self.timeline.get() {
                        let (layer, expert) = self.name(r.want.id);
                        timeline.read(What::Read { layer, expert, ahead: r.ahead }, r.since);
                    }
                    for part in r.want.first..r.want.first + r.want.parts {
                        self.arrived(&r, usize::from(part));
                    }
                }
            }
            flash::Event::Failed { ticket, error } => {
                state.forget(ticket);
                // Its buffer may be another read's by now: only the extent says whose it was.
                let id = error.extent as usize / 2;
                if matches!(state.held.get(id), Some(Held::Reading(own)) if *own == ticket) {
                    self.ready[id].store(0, Ordering::Relaxed);
                    state.held[id] = Held::No;
                    // What nobody has asked for is read again if somebody does.
                    if state.why[id] == Why::Asked {
                        let error = ReadError { expert: Some(self.name(id)), ..error };
                        state.error.get_or_insert_with(|| Box::new(error));
                        self.broken.store(true, Ordering::Release);
                    }
                }
            }
            flash::Event::Cancelled { .. } => {}
        }
    }

    /// A part of an expert is there.
    fn arrived(&self, r: &Reading, part: usize) {
        let (key, place) = (self.keys[r.want.id], self.place(r.want.id));
        let skipped = if part > usize::from(r.want.first) { place.gap } else { 0 };
        let half = Half { layer: key.layer.into(), part };
        self.tables.set(half, key.expert.into(), r.base.plus(skipped));
        // Release: who sees the bit sees the address and the bytes.
        self.ready[r.want.id].fetch_or(1 << part, Ordering::Release);
    }

    /// Forgets everything: after an error the cache believes in experts that are not there.
    pub(super) fn reset(&self, state: &mut State) {
        for id in 0..self.keys.len() {
            self.evict(state, id);
        }
        state.queues.iter_mut().for_each(VecDeque::clear);
        state.guests.clear();
        state.cache.reset();
        state.error = None;
    }
}

impl State {
    /// A read has ended or was given up. Its buffer is free then, and may be that of another read before anybody hears of it.
    fn forget(&mut self, ticket: Ticket) {
        if let Some(reading) = self.reading.get_mut(ticket.buffer())
            && reading.is_some_and(|r| r.ticket == ticket)
        {
            *reading = None;
        }
    }
}

/// An expert is to be read.
pub(super) fn want(state: &mut State, want: Want, priority: Priority) {
    state.held[want.id] = Held::Wanted;
    state.queues[priority as usize].push_back(want);
}
