//! Waits of computing threads for experts, and the release of experts that bypass the cache.

use super::{Pager, ago};
use crate::error::{Error, Result};
use crate::exec::timeline::What;
use crate::exec::unit::{ExpertPart, Launch, LayerPart, PoolThread, StepFault};
use crate::offload::paging::decider::FrameEvent;
use crate::offload::paging::step_order::StepOrder;
use moec_ir::plan::Grid;
use std::sync::PoisonError;
use std::sync::atomic::Ordering;
use std::time::Duration;

/// Time that a thread waits for events before it looks whether another thread has taken them.
const POLL_INTERVAL: Duration = Duration::from_micros(200);

impl Pager {
    /// A thread's share of a step over the active experts: `call` runs a range of its items.
    pub(crate) fn run(
        &self,
        layer_part: LayerPart,
        launch: &Launch<'_>,
        thread: PoolThread,
        call: &dyn Fn(usize, usize),
    ) {
        let Grid::Experts { tiles, .. } = launch.grid else { return };
        let tiles = tiles as usize;
        let step_order = self.step_order.read().unwrap_or_else(PoisonError::into_inner);
        let shares = step_order.shares;
        loop {
            let item = launch.taken.fetch_add(1, Ordering::Relaxed);
            let (at, share) = (item / shares, item % shares);
            let (Some(&place), Some(&id)) = (step_order.order.get(at), step_order.ids.get(at)) else {
                return;
            };
            if let Err(e) = self.wait(id, layer_part.part.index(), thread) {
                return launch.fail(StepFault::Disk(e));
            }
            call(place * tiles + tiles * share / shares, place * tiles + tiles * (share + 1) / shares);
            if step_order.computed(at, layer_part.part.index())
                && let Err(e) = self.computed(&step_order, at, layer_part)
            {
                // No other thread may wait for this one.
                self.view.broken.store(true, Ordering::Release);
                return launch.fail(StepFault::Disk(e));
            }
        }
    }

    /// Records that a thread has computed its share of a part of an expert.
    fn computed(&self, step_order: &StepOrder, at: usize, layer_part: LayerPart) -> Result<()> {
        if let Some(hooks) = self.view.hooks {
            hooks.computed(layer_part);
        }
        if step_order.streamed[at] && (step_order.split || layer_part.part == ExpertPart::Down) {
            let event = FrameEvent::Computed { at, part: layer_part.part.index() as u8 };
            self.lock().executor.publish_frame_event(&*self.disk, event, &mut &self.view)?;
        }
        Ok(())
    }

    /// Waits until a part of an expert may be used. The time of the first thread counts.
    fn wait(&self, id: usize, part: usize, thread: PoolThread) -> Result<()> {
        if self.view.is_ready(id, part) {
            return Ok(());
        }
        let start = self.disk.now();
        while !self.view.is_ready(id, part) {
            self.check_broken()?;
            // Events are handled under the lock, so that they are handled in the order in which they were
            // sent.
            self.disk.wait_for_event(Some(POLL_INTERVAL));
            self.handle_disk_events(&mut self.lock())?;
        }
        let time = self.disk.now().saturating_sub(start);
        if let Some(timeline) = self.view.timeline.get() {
            let (layer, expert) = self.view.name(id);
            timeline.record(thread.index, What::Wait { layer, expert }, ago(time));
        }
        if thread.index == 0 {
            self.stalled.fetch_add(time.as_nanos() as u64, Ordering::Relaxed);
        }
        Ok(())
    }

    /// Fails if the call cannot go on.
    ///
    /// # Errors
    /// The reason.
    fn check_broken(&self) -> Result<()> {
        if !self.view.broken.load(Ordering::Acquire) {
            return Ok(());
        }
        let error = self.lock().executor.error.clone();
        Err(error.map_or_else(|| Error::internal("a read was given up"), Error::Read))
    }
}
