//! The experts of one layer in one call that computes all of their neurons, in the order of computation.

use super::Layer;

/// A share of an expert's items of a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Item {
    /// Position in the dispatch table.
    pub(super) place: usize,
    /// Index of the share.
    pub(super) share: usize,
    /// Number of shares.
    pub(super) shares: usize,
}

/// The experts of a layer in a call.
#[derive(Debug, Default)]
pub(super) struct StepOrder {
    /// Index of the layer.
    pub(super) layer: usize,
    /// 0: gate and up, 1: down.
    pub(super) part: u8,
    /// By position in the dispatch table.
    experts: Vec<u32>,
    /// Position by expert; arbitrary for inactive experts.
    places: Vec<usize>,
    /// Counts of missing pieces of units, by position.
    missing: Vec<u32>,
    threads: usize,
    items: Vec<Item>,
    /// Number of items that were computed.
    done: usize,
    /// Number of experts whose items exist, in the order of this part.
    started: usize,
}

impl StepOrder {
    /// Creates an order with room for the experts of these layers.
    pub(super) fn new(layers: &[Layer]) -> Self {
        let experts = layers.iter().map(|l| l.experts).max().unwrap_or(0);
        Self {
            experts: Vec::with_capacity(experts),
            places: vec![usize::MAX; experts],
            missing: Vec::with_capacity(experts),
            items: Vec::with_capacity(2 * experts),
            ..Self::default()
        }
    }

    /// Sets the experts of a call, in the order of the dispatch table.
    pub(super) fn set(&mut self, index: usize, layer: Layer, active: &[i32], threads: usize) {
        (self.layer, self.threads) = (index, threads);
        self.begin(0);
        self.experts.clear();
        for (place, &expert) in active.iter().enumerate() {
            let expert = layer.expert(expert);
            self.experts.push(expert);
            self.places[expert as usize] = place;
        }
        self.missing.clear();
        self.missing.resize(active.len(), 0);
    }

    /// Begins a part, without any items.
    pub(super) fn begin(&mut self, part: u8) {
        (self.part, self.done, self.started) = (part, 0, 0);
        self.items.clear();
    }

    /// Number of experts of the call.
    pub(super) fn len(&self) -> usize {
        self.experts.len()
    }

    /// The expert at a position.
    pub(super) fn expert(&self, place: usize) -> u32 {
        self.experts.get(place).copied().unwrap_or(0)
    }

    /// The position of the next expert: down goes through them in reverse. `None` after the last.
    pub(super) fn next_place(&self) -> Option<usize> {
        let place = (self.started < self.len()).then_some(self.started)?;
        Some(if self.part == 0 { place } else { self.len() - 1 - place })
    }

    /// Resets the count of missing units at a position to 0.
    pub(super) fn recount(&mut self, place: usize) {
        self.missing[place] = 0;
    }

    /// Counts a missing piece of a unit of the expert at a position.
    pub(super) fn add_missing(&mut self, place: usize) {
        self.missing[place] += 1;
    }

    /// Records that a piece of a unit of an expert of this layer has arrived.
    pub(super) fn unit_arrived(&mut self, expert: u32) {
        let Some(&place) = self.places.get(expert as usize) else { return };
        if self.experts.get(place) == Some(&expert) {
            // An expert that has requested nothing yet has no counts.
            self.missing[place] = self.missing[place].saturating_sub(1);
        }
    }

    /// Adds the items of the next expert: all of its units are in memory or being read.
    pub(super) fn add_items(&mut self, place: usize) {
        self.started += 1;
        let shares = if self.threads > 1 { 2 * self.threads } else { 1 };
        self.items.extend((0..shares).map(|share| Item { place, share, shares }));
    }

    /// Sorts the items from `from` on: those whose neurons are in memory come first.
    pub(super) fn sort(&mut self, from: usize) {
        let mut items = std::mem::take(&mut self.items);
        items[from..].sort_unstable_by_key(|&i| (!self.is_ready(i), i.place, i.share));
        self.items = items;
    }

    /// Number of items now.
    pub(super) fn items(&self) -> usize {
        self.items.len()
    }

    /// An item.
    pub(super) fn item(&self, at: usize) -> Option<Item> {
        self.items.get(at).copied()
    }

    /// Whether the neurons of an item are in memory.
    pub(super) fn is_ready(&self, item: Item) -> bool {
        self.missing[item.place] == 0
    }

    /// Whether no more items will follow.
    pub(super) fn is_over(&self) -> bool {
        self.started == self.len()
    }

    /// Records that an item was computed. Returns whether it was the last of the current items, and others
    /// will follow.
    pub(super) fn computed(&mut self) -> bool {
        self.done += 1;
        self.done == self.items.len() && !self.is_over()
    }
}
