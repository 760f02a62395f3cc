//! A layer asks for its experts, and for those of the next layers.

use super::Pager;
use crate::error::Result;
use crate::offload::paging::decider::{self, Scores, Seen};
use std::sync::PoisonError;
use std::sync::atomic::Ordering;
use std::time::Duration;

/// What a step asks for.
#[derive(Clone, Copy, Debug)]
pub(in crate::offload::paging) struct Asked<'a> {
    pub(in crate::offload::paging) layer: usize,
    /// Experts in the order of the dispatch table.
    pub(in crate::offload::paging) active: &'a [i32],
    /// Experts of the layer that other units compute.
    pub(in crate::offload::paging) beside: &'a [i32],
    /// Rows of the call.
    pub(in crate::offload::paging) rows: usize,
    /// Experts per token of the call.
    pub(in crate::offload::paging) k: usize,
    /// Layers whose scores there are, its own first.
    pub(in crate::offload::paging) scores: usize,
    pub(in crate::offload::paging) lanes: usize,
}

impl Pager {
    /// A layer asks for its experts: what is missing is read, in the order in which it will be computed.
    ///
    /// # Errors
    /// Experts that are not there; a reader that has broken down.
    pub(in crate::offload::paging) fn fetch<'s>(
        &self,
        asked: Asked<'_>,
        score: &dyn Fn(usize, usize) -> &'s [f32],
    ) -> Result<()> {
        let Asked { layer, active, beside, rows, k, scores, lanes } = asked;
        let mut stage = self.stage.write().unwrap_or_else(PoisonError::into_inner);
        stage.clear(lanes);
        if let Some(hooks) = self.hall.hooks {
            hooks.asks(layer, rows);
        }
        let mut guard = self.lock();
        let state = &mut *guard;
        self.take_news(state)?;
        // An error of a call that was given up is not this one's.
        self.hall.broken.store(false, Ordering::Relaxed);
        let first = |i: usize| score(i, 0);
        let asked = decider::Asked {
            layer,
            rows,
            k,
            active,
            beside,
            scored: scores,
            scores: Scores::There(&first),
            stalled: Duration::from_nanos(self.stalled.load(Ordering::Relaxed)),
            flash: Seen::default(),
        };
        state.desk.ask(&*self.flash, asked, &mut &self.hall)?;
        let decider = &state.desk.decider;
        stage.split = decider.split();
        for turn in decider.order() {
            stage.push(turn.place, turn.id, turn.passes);
        }
        Ok(())
    }
}
