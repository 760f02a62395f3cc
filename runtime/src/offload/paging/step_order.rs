//! The experts of one layer in one call.

use std::sync::atomic::{AtomicUsize, Ordering};

/// Order in which threads compute the experts of a layer: written by `request_experts`, read until the layer's last step.
#[derive(Debug, Default)]
pub(super) struct StepOrder {
    /// Place of each expert in the dispatch table, in the order in which they are computed.
    pub(super) order: Vec<usize>,
    /// Number of the expert, by place in `order`.
    pub(super) ids: Vec<usize>,
    /// Whether it only passes through.
    pub(super) streamed: Vec<bool>,
    /// Whether more pass through than there are staging frames: then each is read twice, one part at a time.
    pub(super) split: bool,
    /// Pieces of each expert that are still to be computed, by part.
    left: [Vec<AtomicUsize>; 2],
    /// Pieces that an expert is cut into, so that threads share it.
    pub(super) pieces: usize,
}

impl StepOrder {
    /// Room for layers of up to `experts` experts.
    pub(super) fn new(experts: usize) -> Self {
        let counters = || (0..experts).map(|_| AtomicUsize::new(0)).collect();
        Self {
            order: Vec::with_capacity(experts),
            ids: Vec::with_capacity(experts),
            streamed: Vec::with_capacity(experts),
            split: false,
            left: [counters(), counters()],
            pieces: 1,
        }
    }

    /// An empty order for so many threads.
    pub(super) fn clear(&mut self, threads: usize) {
        // Twice as many as threads: one that comes late takes less.
        self.pieces = if threads > 1 { 2 * threads } else { 1 };
        self.order.clear();
        self.ids.clear();
        self.streamed.clear();
        self.split = false;
    }

    /// Adds the expert at a place in the dispatch table.
    pub(super) fn push(&mut self, place: usize, id: usize, streamed: bool) {
        let at = self.order.len();
        for left in &self.left {
            if let Some(left) = left.get(at) {
                left.store(self.pieces, Ordering::Relaxed);
            }
        }
        self.order.push(place);
        self.ids.push(id);
        self.streamed.push(streamed);
    }

    /// A piece of the expert at `at` is computed. Whether it was the last one of the part.
    pub(super) fn computed(&self, at: usize, part: usize) -> bool {
        // Acquire and release: what other threads read of the expert they have read before the last one lets it go.
        self.left[part].get(at).is_some_and(|left| left.fetch_sub(1, Ordering::AcqRel) == 1)
    }
}
