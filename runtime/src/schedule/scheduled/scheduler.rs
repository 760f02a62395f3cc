//! Scheduler for all layers of a model, from step to step.

use super::budget::{Budget, Ends};
use super::initial::initial;
use super::migrate::{ExpectedLayer, Migrator};
use super::placement::{Place, Placement};
use super::predictor::{Class, PredictionCounters, Predictor, boundary, classes, misplaced};
use super::schedule::{Action, ExpertUnit, Move, Schedule, ScheduledUnit, Streamed};
use super::setup::{Setup, Window};
use crate::schedule::error::ScheduleError;
use crate::schedule::policy::{Solver, Units};
use crate::schedule::sums::assignment::{Assignment, Task};
use crate::schedule::sums::hottest::hottest;
use crate::schedule::sums::prices::Prices;
use crate::schedule::sums::refine::refine;
use crate::schedule::sums::search::Search;
use crate::schedule::sums::ticks::{Ticks, ticks, us};
use std::cmp::Reverse;

/// Maximum number of iterations of the paper's refinement.
const ITERATIONS: usize = 256;

/// Assigns the experts of every step of a layer to units, and chooses the moves before the layer's next step.
///
/// It holds the placement and the expected load of the experts of all layers. It has no clock and uses no
/// random numbers: the same steps have the same schedules. Its memory stops growing after a few steps.
#[derive(Clone, Debug)]
pub struct ExpertScheduler {
    setup: Setup,
    prices: Prices,
    placements: Vec<Placement>,
    /// Boundary of cold experts, by layer.
    cold: Vec<f64>,
    predictor: Predictor,
    budget: Budget,
    /// Moves that have not ended; placements have their experts where they were.
    under_way: Vec<UnderWay>,
    counters: PredictionCounters,
    schedule: Schedule,
    // Buffers kept for reuse.
    step: Assignment,
    search: Search,
    migrator: Migrator,
    by_load: Vec<usize>,
    /// Experts that the GPU has no frame for in this step.
    refused: Vec<u16>,
    order: Vec<(f64, u16)>,
    expected: Vec<Class>,
    actual: Vec<Class>,
    before: Vec<Place>,
    moving: Vec<u16>,
}

/// A move of an expert of a layer that has not ended.
#[derive(Clone, Copy, Debug)]
struct UnderWay {
    layer: usize,
    action: Action,
    ends: Ends,
}

impl UnderWay {
    fn is_of(&self, layer: usize, expert: u16) -> bool {
        (self.layer, self.action.expert()) == (layer, expert)
    }
}

impl ExpertScheduler {
    /// Creates a scheduler in which all experts of a layer have equal loads; [`ExpertScheduler::profile`]
    /// sets others.
    ///
    /// # Errors
    /// As [`Setup::check`].
    pub fn new(setup: Setup) -> Result<Self, ScheduleError> {
        setup.check()?;
        let prices = Prices::new(setup.costs.clone(), setup.system.units, setup.memories);
        let Setup { layers, experts, memories, frames, .. } = setup;
        let even = vec![1.0; experts];
        let cold = boundary(&prices, memories, frames, even.iter().copied(), &mut Vec::new());
        let placement = initial(&prices, setup.system.gpu_residents, &even, memories, frames, cold);
        Ok(Self {
            prices,
            placements: vec![placement; layers],
            cold: vec![cold; layers],
            predictor: Predictor::new(layers, experts),
            budget: Budget::new(memories),
            under_way: Vec::new(),
            counters: PredictionCounters::default(),
            schedule: Schedule::default(),
            step: Assignment::default(),
            search: Search::default(),
            migrator: Migrator::default(),
            by_load: Vec::new(),
            refused: Vec::new(),
            order: Vec::new(),
            expected: Vec::new(),
            actual: Vec::new(),
            before: Vec::new(),
            moving: Vec::new(),
            setup,
        })
    }

    /// Places a layer's experts by recorded loads (mean tokens of a step, by expert), and expects these loads
    /// in the layer's first step.
    ///
    /// # Errors
    /// [`ScheduleError::Layer`], [`ScheduleError::Loads`].
    pub fn profile(&mut self, layer: usize, loads: &[f64]) -> Result<(), ScheduleError> {
        self.check(layer, loads.len())?;
        self.predictor.begin(layer, loads);
        let loads: Vec<f64> = self.predictor.expected(layer).iter().map(|&l| f64::from(l)).collect();
        let Setup { memories, frames, .. } = self.setup;
        let cold = boundary(&self.prices, memories, frames, loads.iter().copied(), &mut self.order);
        self.cold[layer] = cold;
        self.placements[layer] =
            initial(&self.prices, self.setup.system.gpu_residents, &loads, memories, frames, cold);
        Ok(())
    }

    /// Sets the placement of a layer's experts.
    ///
    /// # Errors
    /// [`ScheduleError::Layer`], [`ScheduleError::Loads`], and those of [`Placement::new`] if the placement
    /// has more memories or frames than the scheduler.
    pub fn place(&mut self, layer: usize, placement: &Placement) -> Result<(), ScheduleError> {
        self.check(layer, placement.places().len())?;
        let Setup { memories, frames, .. } = self.setup;
        self.placements[layer] = Placement::new(placement.places().to_vec(), memories, frames)?;
        Ok(())
    }

    /// Assigns the experts of a step of a layer to units; `loads` are the tokens by expert.
    ///
    /// # Errors
    /// [`ScheduleError::Layer`], [`ScheduleError::Loads`].
    pub fn dispatch(&mut self, layer: usize, loads: &[u32]) -> Result<&Schedule, ScheduleError> {
        self.check(layer, loads.len())?;
        self.refused.clear();
        self.end_moves(layer);
        self.assign(layer, loads);
        self.report(false);
        self.observe(layer, loads);
        Ok(&self.schedule)
    }

    /// As [`Self::dispatch`], with at most `frames` experts on the GPU. Experts for which no frame is left
    /// are assigned again, without the GPU. The rows of a prompt (`prompt`) are scheduled, but have no
    /// influence on the expected loads: equation 8 follows decode steps (TriMoE, §4.3). If the system's
    /// prompts are on the GPU, or on the best units and the GPU alone is faster, all their experts go to the
    /// GPU ([`Schedule::streamed`]), as long as the frames of all layers hold them: then [`Self::stream`]
    /// must follow.
    ///
    /// # Errors
    /// As [`Self::dispatch`].
    pub fn dispatch_in_frames(
        &mut self,
        layer: usize,
        loads: &[u32],
        frames: usize,
        prompt: bool,
    ) -> Result<&Schedule, ScheduleError> {
        self.check(layer, loads.len())?;
        self.refused.clear();
        self.end_moves(layer);
        loop {
            self.assign(layer, loads);
            let before = self.refused.len();
            self.refuse(layer, loads, frames);
            if self.refused.len() == before {
                break;
            }
        }
        let streamed = prompt && self.streams(layer, loads);
        self.report(streamed);
        if !prompt {
            self.observe(layer, loads);
        }
        Ok(&self.schedule)
    }

    /// Assigns all experts of a prompt to the GPU if they shall be streamed there.
    fn streams(&mut self, layer: usize, loads: &[u32]) -> bool {
        let forced = match self.setup.system.prefill {
            Solver::Gpu => true,
            Solver::Best => false,
            _ => return false,
        };
        let active = loads.iter().filter(|&&n| n > 0).count();
        let frames: usize = self.placements.iter().map(Placement::frames).sum();
        if self.setup.costs.gpu.is_none() || active > frames {
            return false;
        }
        let scheduled = self.step.clone();
        let (mut calc, mut transfer): (Ticks, Ticks) = (0, 0);
        self.step.clear(self.setup.memories);
        for (expert, (&place, &tokens)) in self.placements[layer].places().iter().zip(loads).enumerate() {
            if tokens > 0 {
                let task = self.prices.task(expert, place, tokens);
                (calc, transfer) = (calc + task.calc, transfer + task.transfer);
                self.step.push(task, ExpertUnit::Gpu);
            }
        }
        let possible = self.step.tasks.iter().all(|t| t.can(ExpertUnit::Gpu));
        let alone = calc.max(transfer).max(self.step.slowest());
        let streams = possible && (forced || alone < scheduled.makespan());
        if !streams {
            self.step = scheduled;
        }
        streams
    }

    /// Gives a frame to every expert of a streamed step that the GPU does not hold: frames of its own layer
    /// first, then of those before it, whose next steps are the farthest. The evicted experts are no longer
    /// cached.
    pub fn stream(&mut self, layer: usize) -> Vec<Streamed> {
        let Some(own) = self.placements.get(layer) else { return Vec::new() };
        let on_gpu = |e: usize| self.schedule.units.get(e) == Some(&Some(ScheduledUnit::Gpu));
        let experts: Vec<u16> = (0..)
            .zip(own.places())
            .filter(|&(e, p)| on_gpu(usize::from(e)) && !p.cached)
            .map(|e| e.0)
            .collect();
        let mut frames = Vec::new();
        let layers = self.placements.len();
        for of in (0..layers).map(|back| (layer + layers - back) % layers) {
            let p = &self.placements[of];
            let cached = (0..).zip(p.places()).filter(|(_, place)| place.cached).map(|e| e.0);
            let idle = cached.filter(|&e| of != layer || !on_gpu(usize::from(e)));
            frames.extend(idle.map(|e| (of, Some(e))));
            frames.extend((p.cached()..p.frames()).map(|_| (of, None)));
        }
        let given = experts.into_iter().zip(frames);
        let given: Vec<_> =
            given.map(|(expert, (layer, evicts))| Streamed { expert, layer, evicts }).collect();
        for &Streamed { expert, layer: of, evicts } in &given {
            if of == layer {
                self.record_transfer(layer, expert, evicts);
            } else if let Some(evicted) = evicts {
                self.evict(of, evicted);
            }
        }
        given
    }

    /// An expert has lost its frame.
    pub(crate) fn evict(&mut self, layer: usize, expert: u16) {
        self.forget_prefetch(layer, expert);
        if let Some(placement) = self.placements.get_mut(layer) {
            let place = placement.places()[usize::from(expert)];
            placement.set(expert.into(), Place { cached: false, ..place });
        }
    }

    fn forget_prefetch(&mut self, layer: usize, expert: u16) {
        self.under_way.retain(|m| !(m.is_of(layer, expert) && matches!(m.action, Action::Prefetch { .. })));
    }

    /// Whether the move of an expert has not ended.
    pub(crate) fn is_under_way(&self, layer: usize, expert: u16) -> bool {
        self.under_way.iter().any(|m| m.is_of(layer, expert))
    }

    /// Whether an expert is under way to a frame.
    pub(crate) fn is_prefetched(&self, layer: usize, expert: u16) -> bool {
        let prefetch = |m: &UnderWay| matches!(m.action, Action::Prefetch { .. });
        self.under_way.iter().any(|m| m.is_of(layer, expert) && prefetch(m))
    }

    /// Ends the move of an expert, which a step waits for.
    pub(crate) fn end_move(&mut self, layer: usize, expert: u16) {
        let placement = &mut self.placements[layer];
        self.under_way.retain(|m| {
            let own = m.is_of(layer, expert);
            if own {
                placement.arrive(m.action);
            }
            !own
        });
    }

    /// Placement of a layer when its moves that are under way have ended.
    #[cfg(test)]
    pub(super) fn planned(&self, layer: usize) -> Placement {
        let mut placement = self.placements[layer].clone();
        self.under_way.iter().filter(|m| m.layer == layer).for_each(|m| placement.arrive(m.action));
        placement
    }

    /// Ends the moves of a layer whose time has passed.
    pub(super) fn end_moves(&mut self, layer: usize) {
        let (placement, budget) = (&mut self.placements[layer], &self.budget);
        self.under_way.retain(|m| {
            let ended = m.layer == layer && budget.has_ended(m.ends);
            if ended {
                placement.arrive(m.action);
            }
            !ended
        });
    }

    /// Refuses the GPU to experts beyond its frames: first to those that it does not hold, with few tokens.
    fn refuse(&mut self, layer: usize, loads: &[u32], frames: usize) {
        let places = self.placements[layer].places();
        let on_gpu = |(task, unit): (&Task, &ExpertUnit)| {
            (*unit == ExpertUnit::Gpu).then_some(usize::from(task.expert))
        };
        self.by_load.clear();
        self.by_load.extend(self.step.tasks.iter().zip(&self.step.units).filter_map(on_gpu));
        self.by_load.sort_by_key(|&e| (!places[e].cached, Reverse(loads[e]), e));
        let refused = self.by_load.iter().skip(frames).map(|&e| e as u16);
        let new = refused.filter(|e| !self.refused.contains(e)).collect::<Vec<_>>();
        self.refused.extend(new);
    }

    /// Assigns the experts with tokens to units.
    fn assign(&mut self, layer: usize, loads: &[u32]) {
        let places = self.placements[layer].places();
        self.step.clear(self.setup.memories);
        for (expert, (&place, &tokens)) in places.iter().zip(loads).enumerate() {
            if tokens > 0 {
                let mut task = self.prices.task(expert, place, tokens);
                if self.refused.contains(&(expert as u16)) {
                    task.refuse_gpu();
                }
                self.step.push(task, task.cheapest());
            }
        }
        match self.setup.system.decode {
            Solver::Refined => refine(&mut self.step, ITERATIONS),
            Solver::Best => {
                refine(&mut self.step, ITERATIONS);
                self.search.improve(&mut self.step);
            }
            Solver::Hottest(rest) => {
                // If NDP units compute the rest, rows travel over the link to the GPU, and the balance
                // includes them.
                let row = if rest == ExpertUnit::Near { ticks(self.setup.costs.row_us) } else { 0 };
                hottest(&mut self.step, &mut self.by_load, rest, loads, row);
            }
            // Each expert is where it costs least; solvers without sums were refused.
            Solver::Cheapest | Solver::Paper(_) | Solver::Fixed | Solver::Gpu | Solver::Cpu => {}
        }
    }

    /// Removes the frames that hold no expert.
    pub(crate) fn remove_free_frames(&mut self) {
        self.placements.iter_mut().for_each(Placement::remove_free_frames);
    }

    /// Records that an expert was transferred to the GPU in place of another, by no decision of
    /// [`Self::moves_for`].
    pub(crate) fn record_transfer(&mut self, layer: usize, expert: u16, evicted: Option<u16>) {
        if let Some(e) = evicted {
            self.forget_prefetch(layer, e);
        }
        if let Some(placement) = self.placements.get_mut(layer) {
            placement.prefetch(usize::from(expert), evicted.map(usize::from));
        }
    }

    /// Chooses the moves before a layer's next step, in a window on the links. The placement has the moved
    /// experts at their new places once their moves have ended: in this window, or in a later one.
    ///
    /// # Errors
    /// [`ScheduleError::Layer`].
    pub fn moves_for(&mut self, layer: usize, window: Window) -> Result<&[Move], ScheduleError> {
        self.check(layer, self.setup.experts)?;
        let Setup { memories, frames, .. } = self.setup;
        self.budget.open(window);
        self.schedule.moves.clear();
        let loads = self.predictor.expected(layer);
        let expected = loads.iter().map(|&l| f64::from(l));
        let cold = boundary(&self.prices, memories, frames, expected.clone(), &mut self.order);
        self.cold[layer] = cold;
        classes(&self.prices, frames, cold, expected, &mut self.order, &mut self.expected);
        // As if the moves that have not ended had.
        self.moving.clear();
        self.before.clear();
        self.before.extend(self.placements[layer].places());
        for m in self.under_way.iter().filter(|m| m.layer == layer) {
            self.placements[layer].arrive(m.action);
            self.moving.push(m.action.expert());
        }
        let expected_layer = ExpectedLayer {
            prices: &self.prices,
            prediction: self.setup.system.prediction,
            layer,
            loads,
            classes: &self.expected,
            cold,
            memories,
            under_way: &self.moving,
        };
        let (placement, moves) = (&mut self.placements[layer], &mut self.schedule.moves);
        self.migrator.migrate(&expected_layer, placement, &mut self.budget, moves);
        let late = moves.iter().filter(|m| !self.budget.has_ended(m.ends));
        self.under_way.extend(late.map(|&Move { action, ends, .. }| UnderWay { layer, action, ends }));
        for m in self.under_way.iter().filter(|m| m.layer == layer) {
            let expert = usize::from(m.action.expert());
            placement.set(expert, self.before[expert]);
        }
        Ok(&self.schedule.moves)
    }

    /// Schedules a step of a layer, and then the moves for the next layer, in the window of the setup.
    ///
    /// # Errors
    /// [`ScheduleError::Layer`], [`ScheduleError::Loads`].
    pub fn step(&mut self, layer: usize, loads: &[u32]) -> Result<&Schedule, ScheduleError> {
        self.dispatch(layer, loads)?;
        let next = (layer + 1) % self.setup.layers.max(1);
        self.moves_for(next, self.setup.window)?;
        Ok(&self.schedule)
    }

    /// Its settings.
    pub fn setup(&self) -> &Setup {
        &self.setup
    }

    /// Places of the experts of a layer.
    pub fn placement(&self, layer: usize) -> Option<&Placement> {
        self.placements.get(layer)
    }

    /// Predictor of loads.
    pub fn predictor(&self) -> &Predictor {
        &self.predictor
    }

    /// Counts of right predictions so far.
    pub fn counters(&self) -> PredictionCounters {
        self.counters
    }

    fn check(&self, layer: usize, loads: usize) -> Result<(), ScheduleError> {
        let Setup { layers, experts, .. } = self.setup;
        if layer >= layers {
            return Err(ScheduleError::Layer { layer, layers });
        }
        if loads != experts {
            return Err(ScheduleError::Loads { found: loads, experts });
        }
        Ok(())
    }

    /// Writes the schedule.
    fn report(&mut self, streamed: bool) {
        let (a, s) = (&self.step, &mut self.schedule);
        s.streamed = streamed;
        s.units.clear();
        s.units.resize(self.setup.experts, None);
        s.near_us.clear();
        s.near_us.resize(self.setup.memories, 0.0);
        s.moves.clear();
        let (mut calc, mut transfer): (Ticks, Ticks) = (0, 0);
        for (task, unit) in a.tasks.iter().zip(&a.units) {
            let chosen = match unit {
                ExpertUnit::Gpu => ScheduledUnit::Gpu,
                ExpertUnit::Cpu => ScheduledUnit::Cpu,
                ExpertUnit::Near => ScheduledUnit::Near(task.memory),
            };
            s.units[usize::from(task.expert)] = Some(chosen);
            match unit {
                ExpertUnit::Gpu => (calc, transfer) = (calc + task.calc, transfer + task.transfer),
                ExpertUnit::Cpu => {}
                ExpertUnit::Near => s.near_us[usize::from(task.memory)] += us(task.cost(ExpertUnit::Near)),
            }
        }
        // A GPU that computes alone overlaps with the transfers of others: the slower of the two sums counts.
        let Units { cpu, near, .. } = self.setup.system.units;
        let gpu = if (cpu || near) && !streamed { a.gpu } else { calc.max(transfer) };
        s.gpu_us = us(gpu);
        s.cpu_us = us(a.cpu);
        s.memory_us.clear();
        s.memory_us.extend(a.memories.iter().map(|d| us(d + a.every)));
        s.makespan_us = us(gpu.max(a.cpu).max(a.slowest()));
    }

    /// Compares expected and actual loads, and updates the predictor.
    fn observe(&mut self, layer: usize, loads: &[u32]) {
        let (frames, cold) = (self.setup.frames, self.cold[layer]);
        let expected = self.predictor.expected(layer).iter().map(|&l| f64::from(l));
        classes(&self.prices, frames, cold, expected, &mut self.order, &mut self.expected);
        let actual = loads.iter().map(|&l| f64::from(l));
        classes(&self.prices, frames, cold, actual, &mut self.order, &mut self.actual);
        let places = self.placements[layer].places().iter().zip(self.predictor.expected(layer));
        for (((&place, &load), &expected), &actual) in places.zip(&self.expected).zip(&self.actual) {
            let moves = misplaced(place, expected, f64::from(load), cold);
            let right = expected == actual;
            self.counters.experts += 1;
            self.counters.right += u64::from(right);
            self.counters.decisions += u64::from(moves);
            self.counters.paid += u64::from(moves && right);
        }
        self.predictor.observe(layer, loads);
    }
}
