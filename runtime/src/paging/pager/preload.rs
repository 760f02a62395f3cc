//! What the cache begins with is read in the background from the start, behind whatever a step asks for: pinned experts, then
//! those that recorded routing used most.

use super::reads::want;
use super::{Pager, State, Want, Why};
use crate::cache::Key;
use crate::flash::Priority;

impl Pager {
    /// Asks for the pinned experts, in the order of the plan, then for as many others as the cache holds, by their recorded
    /// `uses` (`[layer][expert]`): the hottest first. Whoever is not there when a step needs it is read as any other expert.
    pub(super) fn preload(&self, pinned: &[Key], uses: &[u32]) {
        let mut guard = self.lock();
        let state = &mut *guard;
        for &key in pinned {
            // Their frames are set aside, so that nobody goes.
            if matches!(state.cache.ahead(key, |_| {}), Ok(true)) {
                self.begin_with(state, key);
            }
        }
        let mut hottest = Vec::new();
        if !uses.is_empty() {
            state.cache.warm(uses, |key| hottest.push(key));
        }
        for key in hottest {
            self.begin_with(state, key);
        }
        // A reader that has broken down is told to the first step: what is wanted stays so.
        let _ = self.pump(state);
    }

    /// Nobody has asked for it: a read that fails is nobody's error, and is done again on demand.
    fn begin_with(&self, state: &mut State, key: Key) {
        let id = self.id(key);
        state.why[id] = Why::Start;
        want(state, Want { id, first: 0, parts: 2 }, Priority::Prefetch);
    }
}
