//! Pinned experts are read in the background from the start, behind whatever a step asks for.

use super::reads::want;
use super::{Pager, Want};
use crate::cache::Key;
use crate::flash::Priority;

impl Pager {
    /// Asks for the pinned experts, in the order of the plan: the hottest first. Whoever is not there when a step needs it
    /// is read as any other expert.
    pub(super) fn preload(&self, pinned: &[Key]) {
        let mut guard = self.lock();
        let state = &mut *guard;
        for &key in pinned {
            // Their frames are set aside, so that nobody goes.
            if matches!(state.cache.ahead(key, |_| {}), Ok(true)) {
                let id = self.id(key);
                // Nobody has asked for it: a read that fails is nobody's error, and is done again on demand.
                state.guessed[id] = true;
                want(state, Want { id, first: 0, parts: 2 }, Priority::Prefetch);
            }
        }
        // A reader that has broken down is told to the first step: what is wanted stays so.
        let _ = self.pump(state);
    }
}
