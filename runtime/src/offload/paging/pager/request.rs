//! Requests of a layer for its experts and for those of the next layers.

use super::Pager;
use crate::error::Result;
use crate::offload::paging::decider::{self, DiskProgress, Scores};
use std::sync::PoisonError;
use std::sync::atomic::Ordering;
use std::time::Duration;

/// Request of a step.
#[derive(Clone, Copy, Debug)]
pub(in crate::offload::paging) struct DispatchRequest<'a> {
    pub(in crate::offload::paging) layer: usize,
    /// Experts in the order of the dispatch table.
    pub(in crate::offload::paging) active: &'a [i32],
    /// Experts of the layer that other units compute.
    pub(in crate::offload::paging) accelerator_experts: &'a [i32],
    /// Rows of the call.
    pub(in crate::offload::paging) rows: usize,
    /// Experts per token of the call.
    pub(in crate::offload::paging) k: usize,
    /// Number of layers with scores, its own first.
    pub(in crate::offload::paging) scores: usize,
    pub(in crate::offload::paging) threads: usize,
}

impl Pager {
    /// Requests the experts of a layer: missing ones are read, in the order in which they will be computed.
    ///
    /// # Errors
    /// Experts that do not exist; a reader that has failed.
    pub(in crate::offload::paging) fn request_experts<'s>(
        &self,
        request: DispatchRequest<'_>,
        score: &dyn Fn(usize, usize) -> &'s [f32],
    ) -> Result<()> {
        let DispatchRequest { layer, active, accelerator_experts, rows, k, scores, threads } = request;
        let mut step_order = self.step_order.write().unwrap_or_else(PoisonError::into_inner);
        step_order.clear(threads);
        if let Some(hooks) = self.view.hooks {
            hooks.requested(layer, rows);
        }
        let mut guard = self.lock();
        let state = &mut *guard;
        self.handle_disk_events(state)?;
        // The error of a cancelled call is not this call's.
        self.view.broken.store(false, Ordering::Relaxed);
        let first = |i: usize| score(i, 0);
        let request = decider::ExpertRequest {
            layer,
            rows,
            k,
            active,
            accelerator_experts,
            scored: scores,
            scores: Scores::InMemory(&first),
            stalled: Duration::from_nanos(self.stalled.load(Ordering::Relaxed)),
            disk: DiskProgress::default(),
        };
        state.executor.request(&*self.disk, request, &mut &self.view)?;
        let decider = &state.executor.decider;
        step_order.split = decider.split();
        for expert in decider.order() {
            step_order.push(expert.place, expert.id, expert.bypasses);
        }
        Ok(())
    }
}
