//! Experts that were read ahead for one layer: guests, in frames that the cache does not have.
//!
//! A prediction must not evict an expert that the policy keeps. A guest lies in a frame of those that experts pass through. When its layer
//! asks, it is used as one that has just been read, and the policy says whether it stays; if it is not asked for it goes, and
//! what has not been read of it by then never is.

use super::{Decider, Held, Want, Why};
use crate::offload::cache::{self, Key};
use crate::offload::flash::Priority;

impl Decider {
    /// A layer asks: its guests are guests no longer, and those that it does not ask for go. So do all that are left of a call
    /// that was given up.
    pub(super) fn receive(&mut self, layer: usize) {
        for at in (0..self.guests.len()).rev() {
            let id = self.guests[at];
            let key = self.keys[id];
            let own = usize::from(key.layer);
            if layer == 0 || own <= layer {
                self.guests.swap_remove(at);
                if own != layer || !self.chosen.contains(&key.expert) {
                    self.evict(id);
                }
            }
        }
    }

    /// Leaves `streams` experts their frames: whether they get them, at the cost of guests for later layers.
    pub(super) fn make_way(&mut self, streams: usize) -> bool {
        while streams + self.guests.len() > self.spare {
            let Some(id) = self.guests.pop() else { return false };
            self.evict(id);
        }
        true
    }

    /// Reads an expert that will be wanted for sure: into the cache, if the policy would keep it, else as a guest. Whether it
    /// is there or on its way.
    pub(super) fn read_surely(&mut self, key: Key) -> bool {
        self.events.clear();
        let Self { cache, events, .. } = &mut *self;
        if !matches!(cache.ahead(key, |e| events.push(e)), Ok(true)) {
            return self.invite(key);
        }
        for i in 0..self.events.len() {
            match self.events[i] {
                cache::Event::Evict(key) => self.evict(self.id(key)),
                cache::Event::Load(key) => {
                    // A guest that moves in is there already.
                    let id = self.id(key);
                    self.guests.retain(|&guest| guest != id);
                    if self.held[id] == Held::No {
                        self.guess(id);
                    }
                }
                cache::Event::Hit(_) | cache::Event::Stream(_) => {}
            }
        }
        true
    }

    /// Reads an expert that may be wanted. Whether it is there or on its way; it is not where no frame is left for it.
    pub(super) fn invite(&mut self, key: Key) -> bool {
        let id = self.id(key);
        if self.cache.contains(key) || self.held[id] != Held::No {
            return true;
        }
        // A pinned expert has a frame of its own, and moves back into it after an error.
        if self.cache.is_pinned(key) && matches!(self.cache.ahead(key, |_| {}), Ok(true)) {
            self.guess(id);
            return true;
        }
        if self.streams + self.guests.len() >= self.spare {
            return false;
        }
        self.guests.push(id);
        self.guess(id);
        true
    }

    /// Reads an expert that was not requested.
    fn guess(&mut self, id: usize) {
        self.counts.ahead += 1;
        self.why[id] = Why::Guessed;
        let passes = !self.cache.contains(self.keys[id]);
        self.want(Want { id, first: 0, parts: 2 }, Priority::Prefetch, passes);
    }
}
