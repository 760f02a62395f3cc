//! Who computes waits for an expert, and lets one go that only passed through.

use super::reads::want;
use super::{Pager, Want};
use crate::error::{Error, Result};
use crate::flash::Priority;
use crate::paging::stage::Stage;
use crate::timeline::What;
use crate::unit::{Half, Lane, Launch, StepFault};
use moec_ir::plan::Grid;
use std::sync::PoisonError;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

/// How long a lane waits for news before it looks whether another lane has taken them.
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
                && stage.streamed[at]
                && (stage.split || half.part == 1)
                && let Err(e) = self.let_go(&stage, at, half.part)
            {
                return launch.fail(StepFault::Flash(e));
            }
        }
    }

    /// A part of an expert that only passes through is computed.
    fn let_go(&self, stage: &Stage, at: usize, part: usize) -> Result<()> {
        let mut guard = self.lock();
        let state = &mut *guard;
        self.evict(state, stage.ids[at]);
        if part == 0 {
            // Down matrices are read in the order in which they will be computed, whoever was first to finish: with all
            // frames taken by later ones nobody would go on.
            state.passed[at] = true;
            while let Some(&id) = stage.ids.get(state.next)
                && (state.passed[state.next] || !stage.streamed[state.next])
            {
                if stage.streamed[state.next] {
                    want(state, Want { id, first: 1, parts: 1 }, Priority::Demand);
                }
                state.next += 1;
            }
        }
        self.pump(state)
    }

    /// Waits until a part of an expert may be used.
    fn wait(&self, id: usize, part: usize, lane: Lane) -> Result<()> {
        let there = || self.ready[id].load(Ordering::Acquire) & (1 << part) != 0;
        if there() {
            return Ok(());
        }
        let start = Instant::now();
        while !there() {
            if self.broken.load(Ordering::Acquire) {
                let error = self.lock().error.clone();
                return Err(error.map_or_else(|| Error::Plan("a read was given up".to_owned()), Error::Flash));
            }
            let event = self.flash.wait(Some(NEWS));
            let mut guard = self.lock();
            if let Some(event) = event {
                self.hear(&mut guard, event);
            }
            self.take_news(&mut guard);
            self.pump(&mut guard)?;
        }
        if let Some(timeline) = self.timeline.get() {
            let (layer, expert) = self.name(id);
            timeline.lane(lane.index, What::Wait { layer, expert }, start);
        }
        if lane.index == 0 {
            self.stalled.fetch_add(start.elapsed().as_nanos() as u64, Ordering::Relaxed);
        }
        Ok(())
    }
}
