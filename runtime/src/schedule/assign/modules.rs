//! Experts that memory modules, the processor, and a unit with frames of each layer divide (TriMoE): [`crate::schedule::makespan`] decides.
//!
//! What moves for the layer that comes next is copied at the dispatch of this one. Weights of a layer are touched while no step of
//! it runs: its own dispatch has not ended yet, and the layer that comes next has not begun.

use super::{Assigned, Divider, Hands, Step, setup};
use crate::error::{Error, Result};
use crate::schedule::makespan::{Action, Home, Layout, MakespanError, Place, Placement, Scheduler, Window};
use moec_ir::plan::{Schedule, ScheduledLayer};

/// Divides experts between modules, the processor, and frames.
pub(super) struct Modules {
    scheduler: Scheduler,
    window: Option<Window>,
    layers: usize,
    /// By layer: the expert in each frame of the hot unit.
    frames: Vec<Vec<u32>>,
    /// Moves that wait until their layer's own next step.
    waiting: Vec<Action>,
}

fn bad(e: MakespanError) -> Error {
    Error::Plan(format!("its schedule: {e}"))
}

impl Modules {
    pub(super) fn new(s: &Schedule, experts: usize) -> Result<Self> {
        let setup = setup(s, experts).map_err(bad)?;
        let window = s.moves.then_some(setup.window);
        let mut scheduler = Scheduler::new(setup).map_err(bad)?;
        for (index, layer) in s.layers.iter().enumerate() {
            let placement =
                Placement::new(places(layer), s.modules as usize, s.frames as usize).map_err(bad)?;
            scheduler.place(index, &placement).map_err(bad)?;
        }
        let frames = s.layers.iter().map(|l| l.cached.clone()).collect();
        Ok(Self { scheduler, window, layers: s.layers.len(), frames, waiting: Vec::new() })
    }

    /// Brings the experts to the hot unit that it is to run and does not hold, in frames of those that it is not to run now.
    /// Where there is none, the processor runs them.
    ///
    /// # Safety
    /// As [`Divider::divide`].
    unsafe fn bring_missing(
        &mut self,
        layer: usize,
        kinds: &mut [usize],
        hands: &Hands<'_>,
        done: &mut Assigned,
    ) {
        for expert in 0..kinds.len() {
            if kinds[expert] != 1 || self.frames[layer].contains(&(expert as u32)) {
                continue;
            }
            let idle = self.frames[layer].iter().position(|&held| kinds[held as usize] != 1);
            match idle {
                Some(frame) => {
                    // SAFETY: the caller's promise.
                    unsafe { self.bring(layer, expert as u32, frame, hands) };
                    done.fetched += 1;
                }
                None => kinds[expert] = 0,
            }
        }
    }

    /// Does what the scheduler has decided to move.
    ///
    /// # Safety
    /// As [`Divider::divide`].
    unsafe fn act(
        &mut self,
        layer: usize,
        action: Action,
        hands: &Hands<'_>,
        done: &mut Assigned,
    ) -> Result<()> {
        match action {
            Action::Prefetch { expert, evict } => {
                let frames = &self.frames[layer];
                let here = frames.contains(&u32::from(expert));
                let frame = frames.iter().position(|&held| Some(held) == evict.map(u32::from));
                // What a step has brought since may have taken the frame.
                if let Some(frame) = frame.or(Some(0)).filter(|_| !here && !frames.is_empty()) {
                    // SAFETY: the caller's promise.
                    unsafe { self.bring(layer, u32::from(expert), frame, hands) };
                    done.moves[0] += 1;
                }
            }
            Action::Relayout { expert, to } => {
                relocate(layer, u32::from(expert), to.dimm(), hands)?;
                done.moves[1] += 1;
            }
            Action::Rebalance { expert, to, .. } => {
                relocate(layer, u32::from(expert), Some(to), hands)?;
                done.moves[2] += 1;
            }
        }
        Ok(())
    }

    /// Copies an expert into a frame of the hot unit, whose table then names it.
    ///
    /// # Safety
    /// As [`Divider::divide`].
    unsafe fn bring(&mut self, layer: usize, expert: u32, frame: usize, hands: &Hands<'_>) {
        let held = std::mem::replace(&mut self.frames[layer][frame], expert);
        // SAFETY: the caller's promise; nobody reads the expert that the frame held.
        unsafe {
            let places = hands.frame(layer, held as usize);
            hands.bring(layer, expert as usize, &places);
        }
    }
}

fn relocate(layer: usize, expert: u32, to: Option<u16>, hands: &Hands<'_>) -> Result<()> {
    match (hands.cold.and_then(|u| hands.units.get(u)), hands.layers[layer].set) {
        (Some(unit), Some(set)) => unit.relocate(set, expert, to.map(u32::from)),
        _ => Ok(()),
    }
}

impl Divider for Modules {
    unsafe fn divide(
        &mut self,
        step: &Step<'_>,
        hands: &Hands<'_>,
        kinds: &mut [usize],
        done: &mut Assigned,
    ) -> Result<()> {
        let layer = step.layer;
        for action in std::mem::take(&mut self.waiting) {
            // SAFETY: the caller's promise.
            unsafe { self.act(layer, action, hands, done)? };
        }
        let schedule = self.scheduler.dispatch(layer, step.loads).map_err(bad)?;
        done.makespan_us += schedule.makespan_us;
        for (kind, home) in kinds.iter_mut().zip(&schedule.homes) {
            *kind = match home {
                Some(Home::Gpu) => 1,
                Some(Home::Ndp(_)) => 2,
                Some(Home::Cpu) | None => 0,
            };
        }
        // SAFETY: the caller's promise.
        unsafe { self.bring_missing(layer, kinds, hands, done) };
        let Some(window) = self.window else { return Ok(()) };
        let next = (layer + 1) % self.layers;
        let moves = self.scheduler.moves_for(next, window).map_err(bad)?;
        let actions: Vec<Action> = moves.iter().map(|m| m.action).collect();
        if next == layer {
            self.waiting = actions;
            return Ok(());
        }
        for action in actions {
            // SAFETY: the caller's promise.
            unsafe { self.act(next, action, hands, done)? };
        }
        Ok(())
    }

    fn add(&self, done: &mut Assigned) {
        let tally = self.scheduler.tally();
        done.predicted = [tally.right, tally.experts];
    }
}

/// The places of a layer's experts when its first step begins.
fn places(layer: &ScheduledLayer) -> Vec<Place> {
    let layout = |m: i32| u16::try_from(m).map_or(Layout::Striped, Layout::Local);
    let cached = |e: usize| layer.cached.contains(&(e as u32));
    layer.modules.iter().enumerate().map(|(e, &m)| Place { layout: layout(m), cached: cached(e) }).collect()
}
