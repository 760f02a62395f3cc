//! A scheduler for a running plan: maps decisions to the frames of each layer, and determines the time of
//! moves.
//!
//! Moves for the next layer begin when the experts of this layer have been computed, and go on beside
//! attention and dense layers (TriMoE, §4.3). The frame of an evicted expert, which the next layer alone
//! reads, is written meanwhile. Everything else stays valid until the move has ended: an expert that changes
//! its memory is computed at its old place until then, and one that is brought to the GPU is computed
//! elsewhere or waited for.
//!
//! Whether a move has ended follows from the plan's times, so that equal calls get equal decisions. A unit
//! that is slower than its plan is waited for.

use super::placement::Layout;
use super::schedule::{Action, ExpertUnit, ScheduledUnit, Streamed};
use super::scheduler::ExpertScheduler;
use super::setup::Windows;
use crate::offload::cache::Key;
use crate::schedule::decision::{Decision, FrameTransfer, Transfer};
use crate::schedule::error::ScheduleError;

/// Makes the decisions for a running plan.
pub struct Running {
    pub(super) scheduler: ExpertScheduler,
    windows: Option<Windows>,
    /// By layer: the expert in each frame of the GPU's memory; `None` if another layer has used it.
    frames: Vec<Vec<Option<u16>>>,
    /// Experts of the last step in frames of other layers.
    lent: Vec<FrameTransfer>,
    /// Experts that move within the host's memories.
    moving: Vec<Key>,
    decision: Decision,
    counts: MoveCounts,
}

/// Counters of transfers so far. Times are those of the plan.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MoveCounts {
    /// Experts that were transferred to the GPU because a step needed them.
    pub fetched: u64,
    /// Experts whose moves have begun: to the GPU, to another layout, to another memory.
    pub begun: [u64; 3],
    /// Moves that did not end in their window: their layer's next step does not count on them.
    pub late: u64,
    /// Experts on the GPU whose step waited for such a move.
    pub awaited: u64,
    /// Steps of a prompt whose experts were all streamed through the frames of the GPU.
    pub streamed: u64,
}

/// Loads of a step of a layer.
#[derive(Clone, Copy, Debug)]
pub struct StepLoads<'a> {
    /// Tokens by expert.
    pub loads: &'a [u32],
    /// Rows of the step.
    pub rows: usize,
    /// Whether they belong to a prompt.
    pub prompt: bool,
}

impl Running {
    /// Creates it from a scheduler whose layers have their initial placements; experts move between steps in
    /// these windows (`None`: they stay). A layer has as many frames as experts that begin in one.
    pub fn new(mut scheduler: ExpertScheduler, windows: Option<Windows>) -> Self {
        scheduler.remove_free_frames();
        let layers = (0..scheduler.setup().layers).map_while(|l| scheduler.placement(l));
        let cached = |p: &super::Placement| {
            let cached = (0..).zip(p.places()).filter(|e| e.1.cached);
            cached.map(|e| Some(e.0)).collect()
        };
        Self {
            windows,
            frames: layers.map(cached).collect(),
            scheduler,
            lent: Vec::new(),
            moving: Vec::new(),
            decision: Decision::default(),
            counts: MoveCounts::default(),
        }
    }

    /// The scheduler.
    pub fn scheduler(&self) -> &ExpertScheduler {
        &self.scheduler
    }

    /// The expert in each frame, layer by layer; frames without one are left out.
    pub fn begins(&self) -> Vec<Key> {
        let key = |layer: usize, expert: u16| Key { layer: layer as u16, expert };
        let of = |(layer, frames): (usize, &Vec<Option<u16>>)| {
            frames.iter().flatten().map(|&e| key(layer, e)).collect()
        };
        self.frames.iter().enumerate().flat_map::<Vec<Key>, _>(of).collect()
    }

    /// The frame of an expert of the layer that was scheduled last, numbered over all layers.
    pub fn frame(&self, key: Key) -> Option<u32> {
        let layer = usize::from(key.layer);
        let own = self.frames.get(layer)?.iter().position(|&held| held == Some(key.expert));
        let lent = || self.lent.iter().find(|t| t.key == key).map(|t| t.frame);
        own.map(|frame| self.number(layer, frame)).or_else(lent)
    }

    /// Counters so far.
    pub fn counts(&self) -> MoveCounts {
        self.counts
    }

    /// Assigns the experts of a layer to units, and chooses the moves before the next layer's step. A prompt
    /// has no influence on the moves; if its experts are streamed through the frames, nothing moves.
    ///
    /// # Errors
    /// A layer that does not exist, or another number of experts than it has.
    pub fn divide(&mut self, layer: usize, step: StepLoads<'_>) -> Result<&Decision, ScheduleError> {
        let StepLoads { loads, rows, prompt } = step;
        self.decision.clear(loads.len());
        self.lent.clear();
        let frames = self.frames.get(layer).map_or(0, Vec::len);
        let schedule = self.scheduler.dispatch_in_frames(layer, loads, frames, prompt)?;
        self.decision.makespan_us = schedule.makespan_us;
        for (unit, chosen) in self.decision.units.iter_mut().zip(&schedule.units) {
            *unit = match chosen {
                Some(ScheduledUnit::Gpu) => ExpertUnit::Gpu,
                Some(ScheduledUnit::Near(_)) => ExpertUnit::Near,
                Some(ScheduledUnit::Cpu) | None => ExpertUnit::Cpu,
            };
        }
        let streamed = schedule.streamed;
        self.settle(layer);
        if streamed {
            self.stream(layer);
            return Ok(&self.decision);
        }
        self.transfer_missing(layer);
        let Some(windows) = &self.windows else { return Ok(&self.decision) };
        let next = (layer + 1) % self.frames.len().max(1);
        let window = windows.of(rows, prompt);
        let actions: Vec<Action> = self.scheduler.moves_for(next, window)?.iter().map(|m| m.action).collect();
        for action in actions {
            self.counts.late += u64::from(self.scheduler.is_under_way(next, action.expert()));
            self.begin(next, action);
        }
        Ok(&self.decision)
    }

    /// Finds the moves of a layer that have ended, and ends those that its step waits for.
    fn settle(&mut self, layer: usize) {
        let Self { scheduler, frames, moving, decision, counts, .. } = self;
        moving.retain(|&key| {
            let own = usize::from(key.layer) == layer;
            let late = own && scheduler.is_under_way(layer, key.expert);
            if own && !late {
                decision.moved.push(key);
            }
            !own || late
        });
        for &expert in frames.get(layer).into_iter().flatten().flatten() {
            let on_gpu = decision.units[usize::from(expert)] == ExpertUnit::Gpu;
            if on_gpu && scheduler.is_prefetched(layer, expert) {
                counts.awaited += 1;
                scheduler.end_move(layer, expert);
            }
        }
    }

    /// Transfers experts that the GPU is to run and does not hold, into frames of experts that it does not
    /// run now.
    fn transfer_missing(&mut self, layer: usize) {
        for expert in 0..self.decision.units.len() {
            let number = expert as u16;
            if self.decision.units[expert] != ExpertUnit::Gpu || self.frames[layer].contains(&Some(number)) {
                continue;
            }
            let units = &self.decision.units;
            let runs = |held: u16| units[usize::from(held)] == ExpertUnit::Gpu;
            let idle = self.frames[layer].iter().position(|held| !held.is_some_and(runs));
            // The schedule has no more experts on the GPU than there are frames.
            if let Some(frame) = idle {
                self.scheduler.record_transfer(layer, number, self.frames[layer][frame]);
                let transfer = self.assign_frame(layer, number, frame);
                self.decision.transfers.push(transfer);
                self.counts.fetched += 1;
            }
        }
    }

    /// Transfers all experts of a prompt that the GPU does not hold, into frames of all layers.
    fn stream(&mut self, layer: usize) {
        self.counts.streamed += 1;
        for Streamed { expert, layer: of, evicts } in self.scheduler.stream(layer) {
            let free = |(frame, held): (usize, &Option<u16>)| {
                let is_free = held.is_none_or(|e| self.scheduler.is_prefetched(of, e));
                let number = self.number(of, frame);
                is_free && !self.lent.iter().any(|t| t.frame == number)
            };
            let mut frames = self.frames[of].iter().enumerate();
            let frame = match evicts {
                Some(_) => frames.position(|f| *f.1 == evicts),
                None => frames.position(free),
            };
            let Some(frame) = frame else { continue };
            if let Some(held) = self.frames[of][frame] {
                self.scheduler.evict(of, held);
            }
            let transfer = if of == layer {
                self.assign_frame(layer, expert, frame)
            } else {
                self.frames[of][frame] = None;
                let key = Key { layer: layer as u16, expert };
                let lent = FrameTransfer { key, frame: self.number(of, frame) };
                self.lent.push(lent);
                Transfer::ToFrame(lent)
            };
            self.decision.transfers.push(transfer);
            self.counts.fetched += 1;
        }
    }

    /// Begins a move that the scheduler has decided, when the experts of this layer have been computed.
    fn begin(&mut self, layer: usize, action: Action) {
        let kind = match action {
            Action::Prefetch { expert, evict } => {
                let mut frames = self.frames[layer].iter();
                let Some(frame) = frames.position(|&held| held == evict) else { return };
                let transfer = self.assign_frame(layer, expert, frame);
                self.decision.moves.push(transfer);
                0
            }
            Action::Relayout { expert, to } => {
                self.relocate(layer, expert, to);
                1
            }
            Action::Rebalance { expert, to, .. } => {
                self.relocate(layer, expert, Layout::Local(to));
                2
            }
        };
        self.counts.begun[kind] += 1;
    }

    fn relocate(&mut self, layer: usize, expert: u16, to: Layout) {
        let key = Key { layer: layer as u16, expert };
        self.moving.push(key);
        self.decision.moves.push(Transfer::Relocate { key, to: to.memory() });
    }

    fn assign_frame(&mut self, layer: usize, expert: u16, frame: usize) -> Transfer {
        self.frames[layer][frame] = Some(expert);
        let key = Key { layer: layer as u16, expert };
        Transfer::ToFrame(FrameTransfer { key, frame: self.number(layer, frame) })
    }

    /// Number of a layer's frame over all layers.
    fn number(&self, layer: usize, frame: usize) -> u32 {
        (self.frames[..layer].iter().map(Vec::len).sum::<usize>() + frame) as u32
    }
}
