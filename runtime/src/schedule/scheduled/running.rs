//! A scheduler for a running plan: maps decisions to the frames of each layer, and determines the time of
//! moves.
//!
//! Moves for the next layer are made at the dispatch of this one. The weights of a layer are changed only
//! while no step of it runs: either its own dispatch has not ended, or it is the next layer and has not
//! begun.

use super::placement::Layout;
use super::schedule::{Action, ExpertUnit, ScheduledUnit};
use super::scheduler::ExpertScheduler;
use super::setup::Window;
use crate::offload::cache::Key;
use crate::schedule::decision::{Decision, FrameTransfer, Transfer};
use crate::schedule::error::ScheduleError;

/// Makes the decisions for a running plan.
pub struct Running {
    scheduler: ExpertScheduler,
    window: Option<Window>,
    /// By layer: the expert in each frame of the GPU's memory.
    frames: Vec<Vec<u16>>,
    /// Moves that wait until their layer's own next step.
    waiting: Vec<Action>,
    decision: Decision,
    fetched: u64,
    moves: [u64; 3],
}

impl Running {
    /// Creates it from a scheduler whose layers have their initial placements; `moves`: whether experts move
    /// between steps. A layer has as many frames as experts that begin in one.
    pub fn new(mut scheduler: ExpertScheduler, moves: bool) -> Self {
        scheduler.remove_free_frames();
        let layers = (0..scheduler.setup().layers).map_while(|l| scheduler.placement(l));
        let cached = |p: &super::Placement| {
            let cached = (0..).zip(p.places()).filter(|e| e.1.cached);
            cached.map(|e| e.0).collect()
        };
        Self {
            window: moves.then_some(scheduler.setup().window),
            frames: layers.map(cached).collect(),
            scheduler,
            waiting: Vec::new(),
            decision: Decision::default(),
            fetched: 0,
            moves: [0; 3],
        }
    }

    /// The scheduler.
    pub fn scheduler(&self) -> &ExpertScheduler {
        &self.scheduler
    }

    /// The expert in each frame, layer by layer.
    pub fn begins(&self) -> Vec<Key> {
        let key = |layer: usize, expert: &u16| Key { layer: layer as u16, expert: *expert };
        let of = |(layer, frames): (usize, &Vec<u16>)| frames.iter().map(move |e| key(layer, e)).collect();
        self.frames.iter().enumerate().flat_map::<Vec<Key>, _>(of).collect()
    }

    /// Number of experts that were transferred because a step needed them. Then the numbers of experts that
    /// were transferred, given another layout, and moved to another memory ahead of a step.
    pub fn counts(&self) -> (u64, [u64; 3]) {
        (self.fetched, self.moves)
    }

    /// Assigns the experts of a layer to units, and chooses the moves before its next step or before that of
    /// the next layer. A `prompt` has no influence on the moves.
    ///
    /// # Errors
    /// A layer that does not exist, or another number of experts than it has.
    pub fn divide(&mut self, layer: usize, loads: &[u32], prompt: bool) -> Result<&Decision, ScheduleError> {
        self.decision.clear(loads.len());
        for action in std::mem::take(&mut self.waiting) {
            self.act(layer, action);
        }
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
        self.transfer_missing(layer);
        let Some(window) = self.window else { return Ok(&self.decision) };
        let next = (layer + 1) % self.frames.len().max(1);
        let actions: Vec<Action> = self.scheduler.moves_for(next, window)?.iter().map(|m| m.action).collect();
        if next == layer {
            self.waiting = actions;
        } else {
            for action in actions {
                self.act(next, action);
            }
        }
        Ok(&self.decision)
    }

    /// Transfers experts that the GPU is to run and does not hold, into frames of experts that it does not
    /// run now.
    fn transfer_missing(&mut self, layer: usize) {
        for expert in 0..self.decision.units.len() {
            if self.decision.units[expert] != ExpertUnit::Gpu || self.frames[layer].contains(&(expert as u16))
            {
                continue;
            }
            let units = &self.decision.units;
            let idle =
                self.frames[layer].iter().position(|&held| units[usize::from(held)] != ExpertUnit::Gpu);
            // The schedule has no more experts on the GPU than there are frames.
            if let Some(frame) = idle {
                self.scheduler.record_transfer(layer, expert as u16, self.frames[layer][frame]);
                self.transfer_to_frame(layer, expert as u16, frame);
                self.fetched += 1;
            }
        }
    }

    /// Carries out a move that the scheduler has decided.
    fn act(&mut self, layer: usize, action: Action) {
        match action {
            Action::Prefetch { expert, evict } => {
                // All frames hold an expert from the start, and so a prefetch evicts one.
                let frame = self.frames[layer].iter().position(|&held| Some(held) == evict);
                if let Some(frame) = frame {
                    self.transfer_to_frame(layer, expert, frame);
                    self.moves[0] += 1;
                }
            }
            Action::Relayout { expert, to } => {
                self.relocate(layer, expert, to);
                self.moves[1] += 1;
            }
            Action::Rebalance { expert, to, .. } => {
                self.relocate(layer, expert, Layout::Local(to));
                self.moves[2] += 1;
            }
        }
    }

    fn relocate(&mut self, layer: usize, expert: u16, to: Layout) {
        let key = Key { layer: layer as u16, expert };
        self.decision.transfers.push(Transfer::Relocate { key, to: to.memory() });
    }

    fn transfer_to_frame(&mut self, layer: usize, expert: u16, frame: usize) {
        self.frames[layer][frame] = expert;
        let before: usize = self.frames[..layer].iter().map(Vec::len).sum();
        let key = Key { layer: layer as u16, expert };
        self.decision
            .transfers
            .push(Transfer::ToFrame(FrameTransfer { key, frame: (before + frame) as u32 }));
    }
}
