//! Pass `schedule`: the order of the steps.
//!
//! The level of a step is one more than the highest level of its dependencies. In the order of levels,
//! independent steps are adjacent, and one barrier serves them all.

use moec_ir::access::{Access, Accesses};
use moec_ir::plan::{Entry, Plan};

/// Orders the steps of every entry.
pub fn schedule(plan: &mut Plan) {
    let mut entries = std::mem::take(&mut plan.entries);
    let accesses = Accesses::new(plan);
    for entry in &mut entries {
        let order = order(&accesses, entry);
        entry.steps = order.iter().map(|&i| entry.steps[i].clone()).collect();
    }
    plan.entries = entries;
}

fn order(accesses: &Accesses<'_>, entry: &Entry) -> Vec<usize> {
    let touched: Vec<Vec<Access>> = entry.steps.iter().map(|step| accesses.of(entry, step)).collect();
    let mut levels: Vec<usize> = Vec::with_capacity(touched.len());
    for (at, mine) in touched.iter().enumerate() {
        let waits = |before: usize| touched[before].iter().any(|x| mine.iter().any(|y| x.conflicts(y)));
        let level = (0..at).filter(|&b| waits(b)).map(|b| levels[b] + 1).max().unwrap_or(0);
        levels.push(level);
    }
    let mut order: Vec<usize> = (0..touched.len()).collect();
    // The sort is stable: within a level the order of the Graph stays.
    order.sort_by_key(|&i| levels[i]);
    order
}
