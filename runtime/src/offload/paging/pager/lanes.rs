//! Computing threads: wait for an expert, and release one that only passed through.
//!
//! Under virtual time all lanes together are one modelled unit: they take their turns in the order of the stage, so that what
//! is decided does not depend on which thread of this machine was first.

use super::{Pager, ago};
use crate::error::{Error, Result};
use crate::exec::timeline::What;
use crate::exec::unit::{Half, Lane, Launch, StepFault};
use crate::offload::paging::decider::News;
use crate::offload::paging::stage::Stage;
use moec_ir::plan::Grid;
use std::sync::PoisonError;
use std::sync::atomic::Ordering;
use std::thread;
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
            let there = match self.units {
                None => self.wait(id, half.part, lane, lane.index == 0),
                Some(_) => self.wait_in_turn(&stage, [at, piece], id, half.part, lane),
            };
            if let Err(e) = there {
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
        if let Some(units) = self.units {
            self.flash.pass(units.expert(half.layer, half.part, stage.rows));
        }
        if stage.streamed[at] && (stage.split || half.part == 1) {
            let news = News::Computed { at, part: half.part as u8 };
            self.lock().desk.news(&self.flash, news, &mut &self.hall)?;
        }
        stage.end(at, half.part);
        Ok(())
    }

    /// Waits until a part of an expert may be used. The time `counts` where it is that of the first lane.
    fn wait(&self, id: usize, part: usize, lane: Lane, counts: bool) -> Result<()> {
        if self.hall.is_ready(id, part) {
            return Ok(());
        }
        let clock = self.flash.clock();
        let start = clock.now();
        while !self.hall.is_ready(id, part) {
            self.go_on()?;
            // Events are handled under the lock, so that they are handled in the order in which they were sent.
            self.flash.news(Some(NEWS));
            self.take_news(&mut self.lock())?;
        }
        let time = clock.now().saturating_sub(start);
        if let Some(timeline) = self.hall.timeline.get() {
            let (layer, expert) = self.hall.name(id);
            timeline.lane(lane.index, What::Wait { layer, expert }, ago(time));
        }
        if counts {
            self.stalled.fetch_add(time.as_nanos() as u64, Ordering::Relaxed);
        }
        Ok(())
    }

    /// Under virtual time: waits for a part of an expert when every expert before it has been computed. The lane with its first
    /// piece lets time pass until it is there, others follow.
    fn wait_in_turn(
        &self,
        stage: &Stage,
        [at, piece]: [usize; 2],
        id: usize,
        part: usize,
        lane: Lane,
    ) -> Result<()> {
        let first = piece == 0;
        while if first { !stage.is_turn(at, part) } else { !self.hall.is_ready(id, part) } {
            self.go_on()?;
            thread::yield_now();
        }
        if first { self.wait(id, part, lane, true) } else { Ok(()) }
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
