//! Exact search for the least makespan, for few experts: depth first, pruned where a partial assignment
//! already takes as long as the best.

use super::assignment::{Assignment, Effect, UNITS};
use super::ticks::Ticks;
use crate::schedule::scheduled::ExpertUnit;

/// Buffers of the search, kept from step to step.
#[derive(Clone, Debug, Default)]
pub(crate) struct Exact {
    order: Vec<usize>,
    part: Assignment,
    least: Ticks,
    best: Vec<ExpertUnit>,
    /// Number of partial assignments that may still be visited.
    left: usize,
}

impl Exact {
    /// Improves an assignment to an optimal one, or as far as `limit` partial assignments allow. Returns
    /// whether it is optimal. A time only grows with more tasks, so a partial assignment bounds its
    /// completions.
    pub(crate) fn improve(&mut self, a: &mut Assignment, limit: usize) -> bool {
        self.order.clear();
        self.order.extend(0..a.tasks.len());
        // The most expensive tasks first: their choices prune most.
        let least = |t: usize| a.tasks[t].cost(a.tasks[t].cheapest());
        self.order.sort_unstable_by_key(|&t| (std::cmp::Reverse(least(t)), t));
        self.part.clear(a.memories.len());
        self.least = a.makespan();
        self.best.clone_from(&a.units);
        self.left = limit;
        self.descend(a);
        for (task, &unit) in self.best.iter().enumerate() {
            a.reassign(task, unit);
        }
        self.left > 0
    }

    fn descend(&mut self, a: &Assignment) {
        if self.part.makespan() >= self.least || self.left == 0 {
            return;
        }
        self.left -= 1;
        let Some(&task) = self.order.get(self.part.units.len()) else {
            self.least = self.part.makespan();
            for (&task, &unit) in self.order.iter().zip(&self.part.units) {
                self.best[task] = unit;
            }
            return;
        };
        let t = &a.tasks[task];
        for unit in UNITS.into_iter().filter(|&u| t.can(u)) {
            self.part.units.push(unit);
            self.part.add(t.memory, t.effect(unit));
            self.descend(a);
            self.part.add(t.memory, Effect::default() - t.effect(unit));
            self.part.units.pop();
        }
    }
}
