//! Who computes waits for an expert, and lets one go that only passed through.

use super::{Pager, ago};
use crate::error::{Error, Result};
use crate::exec::timeline::What;
use crate::exec::unit::{Half, Lane, Launch, StepFault};
use crate::offload::paging::decider::News;
use crate::offload::paging::stage::Stage;
use moec_ir::plan::Grid;
use std::sync::PoisonError;
use std::sync::atomic::Ordering;
use std::time::Duration;

/// Time that a lane waits for events before it looks whether another lane has taken them.
const NEWS: Duration = Duration::from_micros(200);

impl Pager {
    /// A lane's share of a step over the active experts: `call` runs a range of its items.
    pub(crate) fn run(&self, half: Half, launch: &Launch<'_>, lane: Lane, call: &dyn Fn(usize, usize)) {
        let Grid::Experts { tiles, .. } = launch.grid else { return };
        let tiles = tiles as usize;
        let stage = self.stage.read().unwrap_or_else(PoisonError::into_inner);
        let pieces = stage.pieces;
        loop {
            let item = launch.taken.fetch_add(1, Ordering::Relaxed);
            let (at, piece) = (item / pieces, item % pieces);
            let (Some(&place), Some(&id)) = (stage.order.get(at), stage.ids.get(at)) else { return };
            if let Err(e) = self.wait(id, half.part, lane) {
                return launch.fail(StepFault::Flash(e));
            }
            call(place * tiles + tiles * piece / pieces, place * tiles + tiles * (piece + 1) / pieces);
            if stage.computed(at, half.part)
                && let Err(e) = self.computed(&stage, at, half)
            {
                // No lane is to wait for this one.
                self.hall.broken.store(true, Ordering::Release);
                return launch.fail(StepFault::Flash(e));
            }
        }
    }

    /// A part of an expert is computed, by whatever lanes.
    fn computed(&self, stage: &Stage, at: usize, half: Half) -> Result<()> {
        if let Some(hooks) = self.hall.hooks {
            hooks.computed(half);
        }
        if stage.streamed[at] && (stage.split || half.part == 1) {
            let news = News::Computed { at, part: half.part as u8 };
            self.lock().desk.news(&*self.flash, news, &mut &self.hall)?;
        }
        Ok(())
    }

    /// Waits until a part of an expert may be used. The time of the first lane counts.
    fn wait(&self, id: usize, part: usize, lane: Lane) -> Result<()> {
        if self.hall.is_ready(id, part) {
            return Ok(());
        }
        let start = self.flash.now();
        while !self.hall.is_ready(id, part) {
            self.go_on()?;
            // Events are handled under the lock, so that they are handled in the order in which they were sent.
            self.flash.news(Some(NEWS));
            self.take_news(&mut self.lock())?;
        }
        let time = self.flash.now().saturating_sub(start);
        if let Some(timeline) = self.hall.timeline.get() {
            let (layer, expert) = self.hall.name(id);
            timeline.lane(lane.index, What::Wait { layer, expert }, ago(time));
        }
        if lane.index == 0 {
            self.stalled.fetch_add(time.as_nanos() as u64, Ordering::Relaxed);
        }
        Ok(())
    }

    /// Whether the call goes on.
    ///
    /// # Errors
    /// Why it does not.
    fn go_on(&self) -> Result<()> {
        if !self.hall.broken.load(Ordering::Acquire) {
            return Ok(());
        }
        let error = self.lock().desk.error.clone();
        Err(error.map_or_else(|| Error::internal("a read was given up"), Error::Read))
    }
}
