//! Bottleneck-aware refinement as in the paper (TriMoE, §4.2).
//!
//! Each iteration takes the device that determines the makespan, the expert that costs most on it, and the
//! one of the other two units that gives the least makespan. A tie goes to the unit whose time grows less.
//! The refinement ends when that makespan is no smaller. So it stalls where two devices tie: no move of one
//! expert helps both.

use super::assignment::{Assignment, Device, UNITS};
use super::ticks::Ticks;
use crate::schedule::scheduled::ExpertUnit;

/// Improves an assignment by at most `limit` moves.
pub(crate) fn refine(a: &mut Assignment, limit: usize) {
    for _ in 0..limit {
        let makespan = a.makespan();
        let Some((task, to, new)) = best(a) else { return };
        if new >= makespan {
            return;
        }
        a.reassign(task, to);
    }
}

/// The move of one iteration, and the makespan after it.
fn best(a: &Assignment) -> Option<(usize, ExpertUnit, Ticks)> {
    let bottleneck = a.bottleneck();
    let unit = match bottleneck {
        Device::Gpu => ExpertUnit::Gpu,
        Device::Cpu => ExpertUnit::Cpu,
        Device::Memory(_) => ExpertUnit::Near,
    };
    let here = (0..a.tasks.len()).filter(|&t| a.is_on(t, bottleneck));
    // Of equal costs, the first.
    let task = here.rev().max_by_key(|&t| a.tasks[t].cost(unit))?;
    let others = UNITS.into_iter().filter(|&to| to != unit && a.tasks[task].can(to));
    let after = |to: ExpertUnit| (makespan_after(a, task, to), a.tasks[task].cost(to), to);
    let (makespan, _, to) = others.map(after).min_by_key(|o| (o.0, o.1))?;
    Some((task, to, makespan))
}

/// The makespan if a task were on another unit.
fn makespan_after(a: &Assignment, task: usize, to: ExpertUnit) -> Ticks {
    let change = a.change(task, to);
    let memory = usize::from(a.tasks[task].memory);
    let own = |(d, &time): (usize, &Ticks)| if d == memory { time + change.memory } else { time };
    let slowest = a.memories.iter().enumerate().map(own).max().map_or(0, |d| d + a.every + change.every);
    (a.gpu + change.gpu).max(a.cpu + change.cpu).max(slowest)
}
