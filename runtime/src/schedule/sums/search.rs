//! A local search that leaves plateaus.
//!
//! It checks whether a step can end by a *target* below the best makespan so far, and halves the range of
//! targets by the result. To reach a target it lowers the *excess*, the sum over all devices of the time past
//! the target. If two memories tie, a move that helps one of them leaves the makespan unchanged but lowers
//! the excess: so the search continues where refinement by the makespan stalls. If no move of one expert
//! lowers the excess, chains of two are tried: an expert moves to a unit, and one that is there makes room.
//! The work is bounded by a number of evaluated changes, not by a clock: the same step has the same schedule
//! everywhere.

use super::assignment::{Assignment, Effect, STRIPED, UNITS};
use super::bound::bound;
use super::exact::Exact;
use super::ticks::{Ticks, us};
use crate::schedule::scheduled::ExpertUnit;

/// Number of targets that are tried.
const TARGETS: usize = 12;
/// Evaluated changes per microsecond of the step. One takes some 20 nanoseconds, so this is half a percent of
/// the step.
const WEIGHED: f64 = 0.25;
/// Minimum and maximum number of evaluated changes.
const LIMITS: [usize; 2] = [500, 4000];
/// Number of experts up to which all assignments are tried, as in steps of one or two tokens.
const FEW: usize = 8;
/// Maximum number of partial assignments that are visited then.
const PARTS: usize = 1000;
/// The search ends when the range of targets is this fraction of the makespan.
const CLOSE: Ticks = 512;

/// Starts of the search: experts on the first unit that can compute them.
const STARTS: [(ExpertUnit, ExpertUnit); 3] = [
    (ExpertUnit::Near, ExpertUnit::Cpu),
    (ExpertUnit::Gpu, ExpertUnit::Cpu),
    (ExpertUnit::Cpu, ExpertUnit::Gpu),
];

/// Buffers of the search, kept from step to step.
#[derive(Clone, Debug, Default)]
pub(crate) struct Search {
    best: Assignment,
    target: Ticks,
    /// Excess of the memories.
    memories: Ticks,
    /// Number of changes that may still be evaluated.
    left: usize,
    scratch: Vec<Ticks>,
    exact: Exact,
}

impl Search {
    /// Improves an assignment, which never becomes worse.
    pub(crate) fn improve(&mut self, a: &mut Assignment) {
        self.best.copy_from(a);
        let [least, most] = LIMITS;
        self.left = ((us(a.makespan()) * WEIGHED) as usize).clamp(least, most);
        let bound = bound(a, &mut self.scratch);
        self.approach(a, bound);
        // A search that is stuck from one start may not be from another: localized experts first on their own
        // memory.
        for (unit, other) in STARTS {
            if self.left == 0 || close(bound, self.best.makespan()) {
                break;
            }
            for task in 0..a.tasks.len() {
                let t = &a.tasks[task];
                let to = [unit, other].into_iter().find(|&u| t.can(u)).unwrap_or(t.cheapest());
                a.reassign(task, to);
            }
            self.approach(a, bound);
        }
        a.copy_from(&self.best);
        if a.tasks.len() <= FEW && !close(bound, a.makespan()) {
            self.exact.improve(a, PARTS);
        }
    }

    /// Halves the range of targets, starting from an assignment, and keeps the best one found.
    fn approach(&mut self, a: &mut Assignment, bound: Ticks) {
        let mut high = self.best.makespan();
        let mut low = bound.min(high);
        for _ in 0..TARGETS {
            if close(low, high) || self.left == 0 {
                break;
            }
            self.target = low.midpoint(high);
            let reached = self.descend(a);
            let makespan = a.makespan();
            if makespan < high {
                high = makespan;
                self.best.copy_from(a);
            }
            if !reached {
                low = self.target.min(high);
            }
        }
    }

    /// Lowers the excess as far as possible; returns whether it is 0.
    fn descend(&mut self, a: &mut Assignment) -> bool {
        self.memories = a.memories.iter().map(|d| over(d + a.every, self.target)).sum();
        let mut excess = over(a.gpu, self.target) + over(a.cpu, self.target) + self.memories;
        while excess > 0 {
            let before = excess;
            excess = self.singles(a, excess);
            if excess == before {
                let Some([first, second]) = self.double(a, excess) else { return false };
                self.go(a, first);
                excess = self.go(a, second);
            }
        }
        true
    }

    /// Moves a task; returns the excess after it.
    fn go(&mut self, a: &mut Assignment, (task, to): (usize, ExpertUnit)) -> Ticks {
        a.reassign(task, to);
        self.memories = a.memories.iter().map(|d| over(d + a.every, self.target)).sum();
        over(a.gpu, self.target) + over(a.cpu, self.target) + self.memories
    }

    /// Makes, task by task, every move that lowers the excess; returns the excess after all.
    fn singles(&mut self, a: &mut Assignment, mut excess: Ticks) -> Ticks {
        for task in 0..a.tasks.len() {
            if !self.strains(a, task) {
                continue;
            }
            let (mut least, mut found) = (excess, None);
            for to in others(a, task) {
                self.left = self.left.saturating_sub(1);
                let after = self.after(a, a.change(task, to), a.tasks[task].memory);
                if after < least {
                    (least, found) = (after, Some((task, to)));
                }
            }
            if let Some(found) = found {
                excess = self.go(a, found);
            }
        }
        excess
    }

    /// A chain of two that lowers the excess: one task moves to a unit, and one that is there makes room.
    fn double(&mut self, a: &Assignment, excess: Ticks) -> Option<[(usize, ExpertUnit); 2]> {
        for first in 0..a.tasks.len() {
            if !self.strains(a, first) {
                continue;
            }
            for to in others(a, first) {
                let one = a.change(first, to);
                let memory = a.tasks[first].memory;
                for second in 0..a.tasks.len() {
                    let same = to != ExpertUnit::Near || a.tasks[second].memory == memory;
                    if second == first || a.units[second] != to || !same {
                        continue;
                    }
                    for then in others(a, second) {
                        self.left = self.left.saturating_sub(1);
                        let two = a.change(second, then);
                        if self.after_both(a, (one, memory), (two, a.tasks[second].memory)) < excess {
                            return Some([(first, to), (second, then)]);
                        }
                    }
                    if self.left == 0 {
                        return None;
                    }
                }
            }
        }
        None
    }

    /// Whether a task adds to a device that is past the target.
    fn strains(&self, a: &Assignment, task: usize) -> bool {
        let (t, effect) = (&a.tasks[task], a.tasks[task].effect(a.units[task]));
        let own = || a.memories.get(usize::from(t.memory)).is_some_and(|d| d + a.every > self.target);
        (effect.gpu > 0 && a.gpu > self.target)
            || (effect.cpu > 0 && a.cpu > self.target)
            || (effect.every > 0 && self.memories > 0)
            || (effect.memory > 0 && own())
    }

    /// Excess after a change.
    fn after(&self, a: &Assignment, change: Effect, memory: u16) -> Ticks {
        self.hosts(a, change) + self.memory(a, change.every, [(memory, change.memory), (STRIPED, 0)])
    }

    /// Excess after two changes.
    fn after_both(&self, a: &Assignment, one: (Effect, u16), two: (Effect, u16)) -> Ticks {
        let both = Effect {
            gpu: one.0.gpu + two.0.gpu,
            cpu: one.0.cpu + two.0.cpu,
            every: one.0.every + two.0.every,
            memory: 0,
        };
        let own = if one.1 == two.1 {
            [(one.1, one.0.memory + two.0.memory), (STRIPED, 0)]
        } else {
            [(one.1, one.0.memory), (two.1, two.0.memory)]
        };
        self.hosts(a, both) + self.memory(a, both.every, own)
    }

    fn hosts(&self, a: &Assignment, change: Effect) -> Ticks {
        over(a.gpu + change.gpu, self.target) + over(a.cpu + change.cpu, self.target)
    }

    /// Excess of the memories, after adding `every` to all and `own` to two of them.
    fn memory(&self, a: &Assignment, every: Ticks, own: [(u16, Ticks); 2]) -> Ticks {
        let after = a.every + every;
        let mut sum = match every {
            0 => self.memories,
            _ => a.memories.iter().map(|d| over(d + after, self.target)).sum(),
        };
        for (memory, change) in own {
            if let Some(time) = a.memories.get(usize::from(memory)) {
                sum += over(time + after + change, self.target) - over(time + after, self.target);
            }
        }
        sum
    }
}

/// Whether the range between two times is too small to search.
fn close(low: Ticks, high: Ticks) -> bool {
    high - low <= high / CLOSE
}

/// Time past the target.
fn over(time: Ticks, target: Ticks) -> Ticks {
    (time - target).max(0)
}

/// Units that a task could go to.
fn others(a: &Assignment, task: usize) -> impl Iterator<Item = ExpertUnit> + use<> {
    let (t, unit) = (a.tasks[task], a.units[task]);
    UNITS.into_iter().filter(move |&to| to != unit && t.can(to))
}
