//! Scheduler for all layers of a model, from step to step.

use super::budget::Budget;
use super::initial::initial;
use super::migrate::{ExpectedLayer, Migrator};
use super::placement::Placement;
use super::predictor::{Class, PredictionCounters, Predictor, boundary, classes, misplaced};
use super::schedule::{ExpertUnit, Move, Schedule, ScheduledUnit};
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
        self.assign(layer, loads);
        self.report();
        self.observe(layer, loads);
        Ok(&self.schedule)
    }

    /// As [`Self::dispatch`], with at most `frames` experts on the GPU. Experts for which no frame is left
    /// are assigned again, without the GPU. The rows of a prompt (`prompt`) are scheduled, but have no
    /// influence on the expected loads: equation 8 follows decode steps (TriMoE, §4.3).
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
        loop {
            self.assign(layer, loads);
            let before = self.refused.len();
            self.refuse(layer, loads, frames);
            if self.refused.len() == before {
                break;
            }
        }
        self.report();
        if !prompt {
            self.observe(layer, loads);
        }
        Ok(&self.schedule)
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
    pub(crate) fn record_transfer(&mut self, layer: usize, expert: u16, evicted: u16) {
        if let Some(placement) = self.placements.get_mut(layer) {
            placement.prefetch(usize::from(expert), Some(usize::from(evicted)));
        }
    }

    /// Chooses the moves before a layer's next step, in a window on the links, and updates the placement.
    ///
    /// # Errors
    /// [`ScheduleError::Layer`].
    pub fn moves_for(&mut self, layer: usize, window: Window) -> Result<&[Move], ScheduleError> {
        self.check(layer, self.setup.experts)?;
        let Setup { memories, frames, .. } = self.setup;
        self.budget.open(window, &self.setup.costs);
        self.schedule.moves.clear();
        let loads = self.predictor.expected(layer);
        let expected = loads.iter().map(|&l| f64::from(l));
        let cold = boundary(&self.prices, memories, frames, expected.clone(), &mut self.order);
        self.cold[layer] = cold;
        classes(&self.prices, frames, cold, expected, &mut self.order, &mut self.expected);
        let expected_layer = ExpectedLayer {
            prices: &self.prices,
            prediction: self.setup.system.prediction,
            layer,
            loads,
            classes: &self.expected,
            cold,
            memories,
        };
        let (placement, moves) = (&mut self.placements[layer], &mut self.schedule.moves);
        self.migrator.migrate(&expected_layer, placement, &mut self.budget, moves);
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
    fn report(&mut self) {
        let (a, s) = (&self.step, &mut self.schedule);
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
        let gpu = if cpu || near { a.gpu } else { calc.max(transfer) };
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
