//! The experts of one layer in one call.

use std::sync::atomic::{AtomicUsize, Ordering};

/// Order in which threads compute the experts of a layer: written by `request_experts`, read until the
/// layer's last step.
#[derive(Debug, Default)]
pub(super) struct StepOrder {
    /// Position of each expert in the dispatch table, in the order of computation.
    pub(super) order: Vec<usize>,
    /// Number of the expert, by position in `order`.
    pub(super) ids: Vec<usize>,
    /// Whether it bypasses the cache.
    pub(super) streamed: Vec<bool>,
    /// Whether more of them bypass the cache than there are staging frames: then each is read twice, one part
    /// at a time.
    pub(super) split: bool,
    /// Pieces of each expert that are still to be computed, by part.
    left: [Vec<AtomicUsize>; 2],
    /// Number of pieces of an expert, so that threads share it.
    pub(super) shares: usize,
}

impl StepOrder {
    /// Creates an order with room for layers of up to `experts` experts.
    pub(super) fn new(experts: usize) -> Self {
        let counters = || (0..experts).map(|_| AtomicUsize::new(0)).collect();
        Self {
            order: Vec::with_capacity(experts),
            ids: Vec::with_capacity(experts),
            streamed: Vec::with_capacity(experts),
            split: false,
            left: [counters(), counters()],
            shares: 1,
        }
    }

    /// Empties the order, for this many threads.
    pub(super) fn clear(&mut self, threads: usize) {
        // Twice the number of threads, so that a late thread takes less.
        self.shares = if threads > 1 { 2 * threads } else { 1 };
        self.order.clear();
        self.ids.clear();
        self.streamed.clear();
        self.split = false;
    }

    /// Adds the expert at a position in the dispatch table.
    pub(super) fn push(&mut self, place: usize, id: usize, streamed: bool) {
        let at = self.order.len();
        for left in &self.left {
            if let Some(left) = left.get(at) {
                left.store(self.shares, Ordering::Relaxed);
            }
        }
        self.order.push(place);
        self.ids.push(id);
        self.streamed.push(streamed);
    }

    /// Records that a piece of the expert at `at` was computed. Returns whether it was the last one of the
    /// part.
    pub(super) fn computed(&self, at: usize, part: usize) -> bool {
        // Acquire and release: other threads' reads of the expert happen before the last thread releases it.
        self.left[part].get(at).is_some_and(|left| left.fetch_sub(1, Ordering::AcqRel) == 1)
    }
}
