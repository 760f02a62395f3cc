//! Pass `schedule`: the order of the steps.
//!
//! A step's wave is one more than the latest wave that it waits for. Ordered by waves, steps that do not
//! depend on each other stand together, and one barrier serves them all.

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
    let mut waves: Vec<usize> = Vec::with_capacity(touched.len());
    for (at, mine) in touched.iter().enumerate() {
        let waits = |before: usize| touched[before].iter().any(|x| mine.iter().any(|y| x.conflicts(y)));
        let wave = (0..at).filter(|&b| waits(b)).map(|b| waves[b] + 1).max().unwrap_or(0);
        waves.push(wave);
    }
    let mut order: Vec<usize> = (0..touched.len()).collect();
    // Stable: within a wave the order of the Graph stays.
    order.sort_by_key(|&i| waves[i]);
    order
}
