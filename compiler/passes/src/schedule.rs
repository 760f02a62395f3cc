//! Pass `schedule`: the order of the steps.
//!
//! Units work beside each other between exchanges, and an exchange ends where the CPU waits for another unit. The CPU
//! first executes what other units wait for before the next exchange, then what they do not: so they begin soon, and
//! the CPU works while they do.
//!
//! ```text
//! router, dispatch ──▶ experts of another unit ──┐
//!                 then shared expert, own experts ┴─ exchange ── sum
//! ```
//!
//! Of both, the level of a step is one more than the highest level of its dependencies there. In the order of levels,
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

/// Place of a step: exchanges before it, whether no other unit waits for it before the next one, and its level.
type Place = (usize, bool, usize);

fn order(accesses: &Accesses<'_>, entry: &Entry) -> Vec<usize> {
    let touched: Vec<Vec<Access>> = entry.steps.iter().map(|step| accesses.of(entry, step)).collect();
    let waits =
        |at: usize, before: usize| touched[before].iter().any(|x| touched[at].iter().any(|y| x.conflicts(y)));
    let on_cpu = |step: usize| entry.steps[step].unit == 0;
    let deps: Vec<Vec<usize>> =
        (0..touched.len()).map(|at| (0..at).filter(|&before| waits(at, before)).collect()).collect();
    let mut places: Vec<Place> = Vec::with_capacity(deps.len());
    for (at, deps) in deps.iter().enumerate() {
        let exchanged = |&before: &usize| places[before].0 + usize::from(on_cpu(at) && !on_cpu(before));
        places.push((deps.iter().map(exchanged).max().unwrap_or(0), on_cpu(at), 0));
    }
    for (at, deps) in deps.iter().enumerate().rev() {
        for &before in deps {
            let awaited = !places[at].1 && places[at].0 == places[before].0;
            places[before].1 &= !awaited;
        }
    }
    for (at, deps) in deps.iter().enumerate() {
        let (exchanges, own, _) = places[at];
        let beside = |&&before: &&usize| (places[before].0, places[before].1) == (exchanges, own);
        places[at].2 = deps.iter().filter(beside).map(|&before| places[before].2 + 1).max().unwrap_or(0);
    }
    let mut order: Vec<usize> = (0..places.len()).collect();
    // The sort is stable: at one place the order of the Graph stays.
    order.sort_by_key(|&at| places[at]);
    order
}
