//! Experts that were read ahead for one layer: guests, in frames that the cache does not have.
//!
//! A guess must not push out whom the policy keeps. A guest lies in a frame of those that experts pass through. When its layer
//! asks, it is used as whoever has just been read, and the policy says whether it stays; if it is not asked for it goes, and
//! what has not been read of it by then never is.

use super::reads::want;
use super::{Held, Pager, State, Want, Why};
use crate::cache::{self, Key};
use crate::flash::Priority;

impl Pager {
    /// A layer asks: its guests are guests no longer, and those that it does not ask for go. So do all that are left of a call
    /// that was given up.
    pub(super) fn receive(&self, state: &mut State, layer: usize) {
        for at in (0..state.guests.len()).rev() {
            let id = state.guests[at];
            let key = self.keys[id];
            let own = usize::from(key.layer);
            if layer == 0 || own <= layer {
                state.guests.swap_remove(at);
                if own != layer || !state.chosen.contains(&key.expert) {
                    self.evict(state, id);
                }
            }
        }
    }

    /// Leaves `streams` experts their frames: whether they get them, at the cost of guests for later layers.
    pub(super) fn make_way(&self, state: &mut State, streams: usize) -> bool {
        while streams + state.guests.len() > self.spare {
            let Some(id) = state.guests.pop() else { return false };
            self.evict(state, id);
        }
        true
    }

    /// Reads an expert that will be wanted for sure: into the cache, if the policy would keep it, else as a guest. Whether it
    /// is there or on its way.
    pub(super) fn read_surely(&self, state: &mut State, key: Key) -> bool {
        state.events.clear();
        let State { cache, events, .. } = &mut *state;
        if !matches!(cache.ahead(key, |e| events.push(e)), Ok(true)) {
            return self.invite(state, key);
        }
        for i in 0..state.events.len() {
            match state.events[i] {
                cache::Event::Evict(key) => self.evict(state, self.id(key)),
                cache::Event::Load(key) => {
                    // A guest that moves in is there already.
                    let id = self.id(key);
                    state.guests.retain(|&guest| guest != id);
                    if matches!(state.held[id], Held::No) {
                        guess(state, id);
                    }
                }
                cache::Event::Hit(_) | cache::Event::Stream(_) => {}
            }
        }
        true
    }

    /// Reads an expert that may be wanted. Whether it is there or on its way; it is not where no frame is left for it.
    pub(super) fn invite(&self, state: &mut State, key: Key) -> bool {
        let id = self.id(key);
        if state.cache.contains(key) || !matches!(state.held[id], Held::No) {
            return true;
        }
        if state.streams + state.guests.len() >= self.spare {
            return false;
        }
        state.guests.push(id);
        guess(state, id);
        true
    }
}

/// Reads an expert that nobody has asked for.
fn guess(state: &mut State, id: usize) {
    state.report.ahead += 1;
    state.why[id] = Why::Guessed;
    want(state, Want { id, first: 0, parts: 2 }, Priority::Prefetch);
}
