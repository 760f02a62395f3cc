//! Prefetched entries: experts that were read ahead for one layer, in staging frames.
//!
//! A prediction must not evict an expert that the policy keeps, so a prefetched entry is in a staging frame.
//! When its layer requests it, it is used like one that has just been read, and the policy decides whether it
//! stays. If it is not requested, it is evicted, and the rest of it is not read.

use super::{Decider, ExpertState, PendingRead, ReadReason};
use crate::offload::cache::{self, Key};
use crate::offload::disk::Priority;

impl Decider {
    /// Handles the prefetched entries when a layer requests its experts: its own are no longer marked as
    /// prefetched, and those that it does not request are evicted. Entries left over from a cancelled call
    /// are evicted, too.
    pub(super) fn receive(&mut self, layer: usize) {
        for at in (0..self.prefetched.len()).rev() {
            let id = self.prefetched[at];
            let key = self.keys[id];
            let own = usize::from(key.layer);
            if layer == 0 || own <= layer {
                self.prefetched.swap_remove(at);
                if own != layer || !self.chosen.contains(&key.expert) {
                    self.evict(id);
                }
            }
        }
    }

    /// Frees staging frames for `streams` experts by evicting prefetched entries for later layers. Returns
    /// whether there are enough.
    pub(super) fn free_staging(&mut self, streams: usize) -> bool {
        while streams + self.prefetched.len() > self.staging {
            let Some(id) = self.prefetched.pop() else { return false };
            self.evict(id);
        }
        true
    }

    /// Reads an expert that is certain to be requested: into the cache if the policy would keep it, else as a
    /// prefetched entry. Returns whether it is in memory or being read.
    pub(super) fn read_required(&mut self, key: Key) -> bool {
        self.events.clear();
        let Self { cache, events, .. } = &mut *self;
        if !matches!(cache.ahead(key, |e| events.push(e)), Ok(true)) {
            return self.prefetch(key);
        }
        for i in 0..self.events.len() {
            match self.events[i] {
                cache::Event::Evict(key) => self.evict(self.id(key)),
                cache::Event::Load(key) => {
                    // A prefetched entry that the cache admits is in memory already.
                    let id = self.id(key);
                    self.prefetched.retain(|&entry| entry != id);
                    if self.locations[id] == ExpertState::OnDisk {
                        self.read_ahead(id);
                    }
                }
                cache::Event::Hit(_) | cache::Event::Stream(_) => {}
            }
        }
        true
    }

    /// Reads an expert that may be requested. Returns whether it is in memory or being read; false if no
    /// frame is left for it.
    pub(super) fn prefetch(&mut self, key: Key) -> bool {
        let id = self.id(key);
        if self.cache.contains(key) || self.locations[id] != ExpertState::OnDisk {
            return true;
        }
        // A pinned expert has a frame of its own, and moves back into it after an error.
        if self.cache.is_pinned(key) && matches!(self.cache.ahead(key, |_| {}), Ok(true)) {
            self.read_ahead(id);
            return true;
        }
        if self.streams + self.prefetched.len() >= self.staging {
            return false;
        }
        self.prefetched.push(id);
        self.read_ahead(id);
        true
    }

    /// Reads an expert that was not requested.
    fn read_ahead(&mut self, id: usize) {
        self.counts.ahead += 1;
        self.read_reasons[id] = ReadReason::Prefetched;
        let bypasses = !self.cache.contains(self.keys[id]);
        self.enqueue_read(PendingRead { id, first: 0, parts: 2 }, Priority::Prefetch, bypasses);
    }
}
