//! Solver of the systems that TriMoE is compared with: a cut through the experts by load, between two units.

use super::assignment::Assignment;
use super::ticks::Ticks;
use crate::schedule::scheduled::ExpertUnit;

/// Assigns experts on the GPU to it and the others to `rest`, if that can compute them. Then as many of the
/// hottest of these go to the GPU as make the step shortest. `loads` are tokens by expert. `row` is the time
/// of one token's row to `rest` and back; rows travel one after the other, in parallel to the makespan.
pub(crate) fn hottest(
    a: &mut Assignment,
    order: &mut Vec<usize>,
    rest: ExpertUnit,
    loads: &[u32],
    row: Ticks,
) {
    let tokens = |a: &Assignment, t: usize| loads.get(usize::from(a.tasks[t].expert)).copied().unwrap_or(0);
    order.clear();
    let mut rows = 0;
    for t in 0..a.tasks.len() {
        if a.tasks[t].cached || !a.tasks[t].can(rest) {
            a.reassign(t, a.tasks[t].cheapest());
        } else {
            a.reassign(t, rest);
            rows += Ticks::from(tokens(a, t)) * row;
            order.push(t);
        }
    }
    order.sort_unstable_by_key(|&t| (std::cmp::Reverse(tokens(a, t)), t));
    let length = |a: &Assignment, rows: Ticks| a.gpu.max(a.cpu.max(a.slowest()) + rows);
    let (mut least, mut count) = (length(a, rows), 0);
    for (i, &t) in order.iter().enumerate() {
        if !a.tasks[t].can(ExpertUnit::Gpu) {
            break;
        }
        a.reassign(t, ExpertUnit::Gpu);
        rows -= Ticks::from(tokens(a, t)) * row;
        if length(a, rows) < least {
            (least, count) = (length(a, rows), i + 1);
        }
    }
    for &t in &order[count..] {
        a.reassign(t, rest);
    }
}
