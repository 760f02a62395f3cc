//! LRU: evicts the expert that was used longest ago. Every miss is kept.

use super::list::List;
use super::policy::{Id, Pins, Policy};

/// Least recently used.
#[derive(Clone, Debug)]
pub(super) struct Lru {
    order: List,
}

impl Lru {
    /// Over `n` experts.
    pub(super) fn new(n: usize) -> Self {
        Self { order: List::new(n) }
    }
}

impl Policy for Lru {
    fn on_hit(&mut self, id: Id) {
        self.order.push_front(id);
    }

    fn victim(&mut self, _: Id, _: bool, pins: Pins<'_>) -> Option<Id> {
        self.order.back_to_front().find(|&id| !pins.holds(id))
    }

    fn on_insert(&mut self, id: Id) {
        self.order.push_front(id);
    }

    fn on_evict(&mut self, id: Id) {
        self.order.remove(id);
    }

    fn reset(&mut self) {
        self.order.clear();
    }
}
