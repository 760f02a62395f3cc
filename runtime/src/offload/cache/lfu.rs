//! LFU: evicts the expert that was used least often; among equals, the one used longest ago.
//!
//! Uses are counted for all experts, resident or not: there are few enough. With aging, a use weighs half as
//! much after `half_life` tokens. Instead of shrinking all counts, every token increases the weight of new
//! uses. With `bypass`, a miss that was used less often than every expert it could replace is not kept.

use super::heap::{Heap, compare};
use super::policy::{Id, Pins, Policy};

/// Weight above which the weight and all counts are scaled back to 1.
const RESCALE_ABOVE: f64 = 1e100;

/// Least frequently used.
#[derive(Clone, Debug)]
pub(super) struct Lfu {
    count: Vec<f64>,
    resident: Heap,
    layers: usize,
    /// Steps (layers of tokens) so far.
    steps: u64,
    /// Uses of residents so far.
    clock: u64,
    /// Weight of a use now.
    weight: f64,
    /// Growth of the weight per token.
    growth: f64,
    bypass: bool,
}

impl Lfu {
    /// Creates the policy for `n` experts in `layers` layers. `half_life` is in tokens; 0: uses never age.
    pub(super) fn new(n: usize, layers: usize, half_life: f64, bypass: bool) -> Self {
        let growth = if half_life > 0.0 { (1.0 / half_life).exp2() } else { 1.0 };
        Self {
            count: vec![0.0; n],
            resident: Heap::new(n),
            layers,
            steps: 0,
            clock: 0,
            weight: 1.0,
            growth,
            bypass,
        }
    }

    fn used(&mut self, id: Id) {
        self.count[id as usize] += self.weight;
    }

    fn place(&mut self, id: Id) {
        self.clock += 1;
        self.resident.set(id, (self.count[id as usize], self.clock));
    }
}

impl Policy for Lfu {
    fn on_scores(&mut self, _: usize, _: &[(u16, f32)]) {
        self.steps += 1;
        if !self.steps.is_multiple_of(self.layers as u64) {
            return;
        }
        self.weight *= self.growth;
        if self.weight > RESCALE_ABOVE {
            for id in 0..self.count.len() as Id {
                self.count[id as usize] /= self.weight;
                if self.resident.contains(id) {
                    let (_, used) = self.resident.rank(id);
                    self.resident.set(id, (self.count[id as usize], used));
                }
            }
            self.weight = 1.0;
        }
    }

    fn expect(&mut self, id: Id, probability: f64, tokens: f64) {
        self.count[id as usize] += self.weight * probability * tokens;
    }

    fn on_hit(&mut self, id: Id) {
        self.used(id);
        self.place(id);
    }

    fn on_miss(&mut self, id: Id) {
        self.used(id);
    }

    fn victim(&mut self, incoming: Id, force: bool, pins: Pins<'_>) -> Option<Id> {
        let least = self.resident.least(|id| pins.holds(id))?;
        let own = (self.count[incoming as usize], self.clock + 1);
        let stays = self.bypass && !force && compare(own, self.resident.rank(least)).is_lt();
        (!stays).then_some(least)
    }

    fn on_insert(&mut self, id: Id) {
        self.place(id);
    }

    fn on_evict(&mut self, id: Id) {
        self.resident.remove(id);
    }

    fn reset(&mut self) {
        self.count.fill(0.0);
        self.resident.clear();
        (self.steps, self.clock, self.weight) = (0, 0, 1.0);
    }
}
