//! The least makespan there is, for few experts: depth first, cut where a part already takes as long as the best.

use super::assignment::{Assignment, Effect, UNITS};
use super::ticks::Ticks;
use crate::schedule::scheduled::ExpertUnit;

/// Buffers beside the assignment, kept from step to step.
#[derive(Clone, Debug, Default)]
pub(crate) struct Exact {
    order: Vec<usize>,
    part: Assignment,
    least: Ticks,
    best: Vec<ExpertUnit>,
    /// Parts that may still be looked at.
    left: usize,
}

impl Exact {
    /// Improves an assignment to a best one, or as far as looking at `limit` parts goes. Whether it is a best one.
    /// Every time only grows with more tasks, so a part bounds the whole.
    pub(crate) fn improve(&mut self, a: &mut Assignment, limit: usize) -> bool {
        self.order.clear();
        self.order.extend(0..a.tasks.len());
        // The dearest first: their choices cut most.
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
