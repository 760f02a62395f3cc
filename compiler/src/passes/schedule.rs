//! Pass `schedule`: the order of the steps.
//!
//! A step's wave is one more than the latest wave that it waits for. Ordered by waves, steps that do not
//! depend on each other stand together, and one barrier serves them all.

use super::barriers::{Access, accesses};
use moec_ir::plan::{Entry, Plan};

/// What each step writes: indices into its arguments, by entry and step.
pub type Writes = Vec<Vec<Vec<usize>>>;

/// Orders the steps of every entry; `writes` is ordered alike.
pub fn schedule(plan: &mut Plan, writes: &mut Writes) {
    for (entry, writes) in plan.entries.iter_mut().zip(writes) {
        let order = order(entry, writes);
        entry.steps = order.iter().map(|&i| entry.steps[i].clone()).collect();
        *writes = order.iter().map(|&i| writes[i].clone()).collect();
    }
}

fn order(entry: &Entry, writes: &[Vec<usize>]) -> Vec<usize> {
    let touched: Vec<Vec<Access>> =
        entry.steps.iter().zip(writes).map(|(s, w)| accesses(entry, s, w)).collect();
    let mut waves: Vec<usize> = Vec::with_capacity(touched.len());
    for (at, mine) in touched.iter().enumerate() {
        let waits = |before: usize| {
            touched[before].iter().any(|x| mine.iter().any(|y| (x.write || y.write) && x.overlaps(y)))
        };
        let wave = (0..at).filter(|&b| waits(b)).map(|b| waves[b] + 1).max().unwrap_or(0);
        waves.push(wave);
    }
    let mut order: Vec<usize> = (0..touched.len()).collect();
    // Stable: within a wave the order of the Graph stays.
    order.sort_by_key(|&i| waves[i]);
    order
}
