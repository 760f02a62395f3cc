//! Small cases, and initial placements.

use super::drawn::{MODELS, Random, costs, loads, popularity};
use crate::schedule::policy::Units;
use crate::schedule::scheduled::{Layout, Place};
use crate::schedule::sums::assignment::Assignment;
use crate::schedule::sums::prices::Prices;

pub(super) const ALL: Units = Units::ALL;

/// Assigns every expert with tokens to the unit where it costs least.
pub(super) fn assignment(prices: &Prices, places: &[Place], loads: &[u32], memories: usize) -> Assignment {
    let mut a = Assignment::default();
    a.clear(memories);
    for (expert, &tokens) in loads.iter().enumerate().filter(|l| *l.1 > 0) {
        let task = prices.task(expert, places[expert], tokens);
        a.push(task, task.cheapest());
    }
    a
}

/// A small case: up to ten experts on four memories.
pub(super) fn small(seed: u64) -> Assignment {
    let mut random = Random(seed);
    let model = &MODELS[random.below(3)];
    let experts = 10 - random.below(10).min(random.below(10));
    let shares = popularity(&mut random, experts);
    let batch = [2, 8, 16, 32, 48, 64, 96, 128][random.below(8)];
    let loads = loads(&mut random, &shares, 3, batch);
    let places: Vec<Place> = (0..experts)
        .map(|_| Place {
            layout: if random.below(3) == 0 {
                Layout::Striped
            } else {
                Layout::Local(random.below(4) as u16)
            },
            cached: random.below(5) == 0,
        })
        .collect();
    assignment(&Prices::new(costs(model), ALL, 4), &places, &loads, 4)
}
