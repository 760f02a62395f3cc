//! Moves before a layer's next step (TriMoE, §4.3).
//!
//! The step is scheduled with the expected loads. There are three kinds of moves. Hot experts that the GPU
//! does not hold are prefetched. Experts whose layout differs from that of their class change it. If one
//! memory takes longer than the mean by [`SKEW`], experts move from it to the most idle one.
//!
//! Each move is tried on the schedule. Its benefit is the decrease of the excess: the sum over the domains of
//! their time above the mean of all domains. The memories are one domain, and count with their slowest and
//! their mean. The makespan is no measure here: if only two moves together help, neither lowers it. Moves are
//! ranked by benefit, tried again in that order on the changed schedule, and made while their resources have
//! time.

use super::budget::{Budget, Needs};
use super::placement::{Layout, Place, Placement};
use super::predictor::{Class, misplaced};
use super::schedule::{Action, ExpertUnit, Move};
use crate::schedule::policy::Prediction;
use crate::schedule::sums::assignment::{Assignment, Effect, Task, UNITS};
use crate::schedule::sums::prices::Prices;
use crate::schedule::sums::refine::refine;
use crate::schedule::sums::ticks::{Ticks, us};

/// Multiple of the mean from which on a memory is too busy.
const SKEW: f64 = 1.1;
/// Maximum number of moves in one window.
const MOST: usize = 16;
/// Iterations of refinement of the expected step.
const ITERATIONS: usize = 64;

/// Decides on migration; its buffers are reused from step to step.
#[derive(Clone, Debug, Default)]
pub(crate) struct Migrator {
    step: Assignment,
    level: Ticks,
    /// Experts that were cached, evicted or moved in this window: each at most once.
    moved: Vec<u16>,
    /// Benefit and expert.
    ranked: Vec<(Ticks, usize)>,
}

/// Expected state of the layer.
pub(crate) struct ExpectedLayer<'a> {
    pub(crate) prices: &'a Prices,
    pub(crate) prediction: Prediction,
    pub(crate) layer: usize,
    /// Expected tokens by expert.
    pub(crate) loads: &'a [f32],
    /// Classes of the experts.
    pub(crate) classes: &'a [Class],
    /// Boundary of the cold class.
    pub(crate) cold: f64,
    pub(crate) memories: usize,
    /// Experts whose earlier move has not ended.
    pub(crate) under_way: &'a [u16],
}

impl Migrator {
    /// Moves experts of a layer and returns the moves.
    pub(crate) fn migrate(
        &mut self,
        expected: &ExpectedLayer<'_>,
        placement: &mut Placement,
        budget: &mut Budget,
        moves: &mut Vec<Move>,
    ) {
        let Prediction::Loads { relayout } = expected.prediction else { return };
        self.moved.clear();
        self.schedule(expected, placement);
        self.rank(expected, placement);
        let mut ranked = std::mem::take(&mut self.ranked);
        for &(_, expert) in &ranked {
            if moves.len() == MOST {
                break;
            }
            // Earlier moves may have changed the most idle memory, and the remaining gain.
            let Some(action) = self.choose_action(expected, placement, expert) else { continue };
            self.take(expected, placement, action, budget, moves);
        }
        ranked.clear();
        self.ranked = ranked;
        while relayout && moves.len() < MOST {
            let Some(action) = self.rebalance(expected, placement) else { return };
            if !self.take(expected, placement, action, budget, moves) {
                return;
            }
        }
    }

    /// Schedules the expected step; its tasks are numbered like the experts.
    fn schedule(&mut self, expected: &ExpectedLayer<'_>, placement: &Placement) {
        self.step.clear(expected.memories);
        for (expert, (&place, &load)) in placement.places().iter().zip(expected.loads).enumerate() {
            let task = expected.prices.expected(expert, place, f64::from(load));
            self.step.push(task, task.cheapest());
        }
        refine(&mut self.step, ITERATIONS);
        let a = &self.step;
        let mean = a.memories.iter().sum::<Ticks>() / a.memories.len().max(1) as Ticks + a.every;
        self.level = (a.gpu + a.cpu + mean) / 3;
    }

    /// Ranks all feasible moves with a gain, the best first.
    fn rank(&mut self, expected: &ExpectedLayer<'_>, placement: &Placement) {
        let mut ranked = std::mem::take(&mut self.ranked);
        ranked.clear();
        for expert in 0..self.step.tasks.len() {
            let action = self.choose_action(expected, placement, expert);
            let Some(action) = action else { continue };
            let benefit = self.benefit(expected, placement, action);
            if benefit > 0 {
                ranked.push((benefit, expert));
            }
        }
        ranked.sort_unstable_by_key(|r| (std::cmp::Reverse(r.0), r.1));
        self.ranked = ranked;
    }

    /// Move that an expert's class requires and its placement lacks.
    fn choose_action(
        &self,
        expected: &ExpectedLayer<'_>,
        placement: &Placement,
        expert: usize,
    ) -> Option<Action> {
        let (place, class) = (placement.places()[expert], *expected.classes.get(expert)?);
        let number = expert as u16;
        let load = f64::from(expected.loads[expert]);
        if expected.under_way.contains(&number) || !misplaced(place, class, load, expected.cold) {
            return None;
        }
        let relayout = expected.prediction == Prediction::Loads { relayout: true };
        match (class, place.layout) {
            (Class::Hot, _) => {
                let full = placement.cached() >= placement.frames();
                let evict = if full { Some(coldest(expected, placement, expert)?) } else { None };
                Some(Action::Prefetch { expert: number, evict })
            }
            (Class::Warm, Layout::Local(_)) if relayout => {
                Some(Action::Relayout { expert: number, to: Layout::Striped })
            }
            (Class::Cold, Layout::Striped) if relayout => {
                let idle = self.idlest()?;
                Some(Action::Relayout { expert: number, to: Layout::Local(idle) })
            }
            _ => None,
        }
    }

    /// The best move from the busiest memory to the most idle one, if they are uneven.
    fn rebalance(&mut self, expected: &ExpectedLayer<'_>, placement: &Placement) -> Option<Action> {
        let a = &self.step;
        let (from, &most) = a.memories.iter().enumerate().max_by_key(|d| (*d.1, std::cmp::Reverse(d.0)))?;
        let mean = a.memories.iter().sum::<Ticks>() as f64 / a.memories.len() as f64;
        let to = self.idlest()?;
        if usize::from(to) == from || most as f64 <= SKEW * mean {
            return None;
        }
        let from = from as u16;
        let mut best: Option<(Ticks, Action)> = None;
        for t in 0..self.step.tasks.len() {
            let there = self.step.tasks[t].memory == from && self.step.units[t] == ExpertUnit::Near;
            let number = t as u16;
            if !there || self.moved.contains(&number) || expected.under_way.contains(&number) {
                continue;
            }
            let action = Action::Rebalance { expert: number, from, to };
            let benefit = self.benefit(expected, placement, action);
            if benefit > best.map_or(0, |b| b.0) {
                best = Some((benefit, action));
            }
        }
        best.map(|b| b.1)
    }

    /// Makes a move if it gains and its resources have time; returns whether it was made.
    fn take(
        &mut self,
        expected: &ExpectedLayer<'_>,
        placement: &mut Placement,
        action: Action,
        budget: &mut Budget,
        moves: &mut Vec<Move>,
    ) -> bool {
        let benefit = self.benefit(expected, placement, action);
        let needs = needs(expected, placement, action);
        if benefit <= 0 {
            return false;
        }
        let Some(ends) = budget.take(&needs) else { return false };
        self.apply(expected, placement.places(), action);
        match action {
            Action::Prefetch { expert, evict } => {
                placement.prefetch(usize::from(expert), evict.map(usize::from));
                self.moved.extend(evict);
            }
            Action::Relayout { expert, to } => placement.relayout(usize::from(expert), to),
            Action::Rebalance { expert, to, .. } => {
                placement.relayout(usize::from(expert), Layout::Local(to));
            }
        }
        self.moved.push(action.expert());
        let (layer, benefit_us, time_us) = (expected.layer, us(benefit), needs.time());
        moves.push(Move { layer, action, benefit_us, time_us, ends });
        true
    }

    /// Decrease of the excess by an action.
    fn benefit(&mut self, expected: &ExpectedLayer<'_>, placement: &Placement, action: Action) -> Ticks {
        let before = self.excess();
        let undo = self.apply(expected, placement.places(), action);
        let after = self.excess();
        for (task, unit) in undo.into_iter().flatten().rev() {
            self.replace(task, unit);
        }
        before - after
    }

    /// Changes the expected step as an action would; returns the tasks and units that it replaces.
    fn apply(
        &mut self,
        expected: &ExpectedLayer<'_>,
        places: &[Place],
        action: Action,
    ) -> [Option<(Task, ExpertUnit)>; 2] {
        let cached = |e: u16, cached: bool| (e, Place { cached, ..places[usize::from(e)] });
        let moved = |e: u16, layout: Layout| (e, Place { layout, ..places[usize::from(e)] });
        let changes = match action {
            Action::Prefetch { expert, evict } => {
                [Some(cached(expert, true)), evict.map(|e| cached(e, false))]
            }
            Action::Relayout { expert, to } => [Some(moved(expert, to)), None],
            Action::Rebalance { expert, to, .. } => [Some(moved(expert, Layout::Local(to))), None],
        };
        changes.map(|change| {
            let (expert, place) = change?;
            let e = usize::from(expert);
            let before = (self.step.tasks[e], self.step.units[e]);
            let task = expected.prices.expected(e, place, f64::from(expected.loads[e]));
            self.replace(task, task.cheapest());
            let mut best = (self.excess(), task.cheapest());
            for unit in UNITS.into_iter().filter(|&u| task.can(u)) {
                self.step.reassign(e, unit);
                let excess = self.excess();
                if excess < best.0 {
                    best = (excess, unit);
                }
            }
            self.step.reassign(e, best.1);
            Some(before)
        })
    }

    fn replace(&mut self, task: Task, unit: ExpertUnit) {
        let e = usize::from(task.expert);
        let old = self.step.tasks[e];
        self.step.add(old.memory, Effect::default() - old.effect(self.step.units[e]));
        self.step.tasks[e] = task;
        self.step.units[e] = unit;
        self.step.add(task.memory, task.effect(unit));
    }

    fn excess(&self) -> Ticks {
        let a = &self.step;
        let over = |time: Ticks| (time - self.level).max(0);
        let memories =
            a.memories.iter().map(|d| over(d + a.every)).sum::<Ticks>() / a.memories.len().max(1) as Ticks;
        over(a.gpu) + over(a.cpu) + over(a.slowest()) + memories
    }

    fn idlest(&self) -> Option<u16> {
        self.step.memories.iter().enumerate().min_by_key(|d| *d.1).map(|d| d.0 as u16)
    }
}

/// Expert that a prefetch replaces: the cached one with the least expected load, if that is less than the new
/// one's.
fn coldest(expected: &ExpectedLayer<'_>, placement: &Placement, expert: usize) -> Option<u16> {
    let stays = |e: usize| !expected.under_way.contains(&(e as u16));
    let cached = placement.places().iter().enumerate().filter(|p| p.1.cached && stays(p.0));
    let least = cached.map(|p| p.0).min_by(|&a, &b| expected.loads[a].total_cmp(&expected.loads[b]))?;
    (expected.loads[least] < expected.loads[expert]).then_some(least as u16)
}

fn needs(expected: &ExpectedLayer<'_>, placement: &Placement, action: Action) -> Needs {
    let costs = expected.prices.costs();
    let layout = |e: u16| placement.places()[usize::from(e)].layout;
    match action {
        Action::Prefetch { expert, .. } => Needs::prefetch(costs, layout(expert)),
        Action::Relayout { expert, to } => {
            let memory = to.memory().or(layout(expert).memory()).unwrap_or(0);
            Needs::relayout(costs, memory, expected.memories)
        }
        Action::Rebalance { from, to, .. } => Needs::rebalance(costs, from, to),
    }
}
