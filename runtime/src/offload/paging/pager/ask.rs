//! A layer asks for its experts, and for those of the next layers.

use super::{Pager, State};
use crate::error::Result;
use crate::offload::paging::decider::{self, Scores, Seen};
use crate::offload::paging::units::rows_each;
use std::sync::PoisonError;
use std::sync::atomic::Ordering;
use std::time::Duration;

/// Most tokens that are recorded.
const RECORDED: usize = 1 << 14;

/// Request of a step.
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
        stage.rows = rows_each(rows, k, active.len());
        if let Some(units) = self.units {
            self.flash.pass(units.between(layer, rows));
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
        state.desk.ask(&self.flash, asked, &mut &self.hall)?;
        let decider = &state.desk.decider;
        stage.split = decider.split();
        for turn in decider.order() {
            stage.push(turn.place, turn.id, turn.passes);
        }
        if rows == 1 {
            self.record(state, layer);
        }
        Ok(())
    }

    /// Records the experts that a token has chosen.
    fn record(&self, state: &mut State, layer: usize) {
        let Some((trace, token)) = &mut state.record else { return };
        if layer == 0 {
            token.clear();
        }
        token.extend(state.desk.decider.chosen());
        if layer + 1 == self.hall.places.len() && trace.tokens() < RECORDED {
            // A token whose layers were not all seen is no token.
            let _ = trace.push(token, &[]);
        }
    }
}
