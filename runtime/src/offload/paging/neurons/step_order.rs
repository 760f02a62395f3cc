//! The experts of one layer in one call: their needs and the order of computation.

use super::{Layer, NeuronLayout, Request};
use moec_ir::bundle::BLOCK;
use std::ops::Range;

/// Needs of a layer.
pub(super) struct Needs<'a> {
    /// Parts of the neurons.
    pub(super) request: Request,
    /// Experts in the order of the dispatch table.
    pub(super) active: &'a [i32],
    /// Lists of the predicted or active neurons, [`moec_ir::bundle::active_list_words`]; `None`: all neurons.
    pub(super) lists: Option<&'a [i32]>,
}

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
    /// Parts of the neurons that it has requested.
    pub(super) request: Request,
    /// 0: gates or up, 1: down.
    pub(super) part: u8,
    /// By position in the dispatch table: expert, and its range in `units`.
    experts: Vec<u32>,
    ranges: Vec<Range<usize>>,
    /// Units that are needed, by position in the expert, ascending.
    units: Vec<u32>,
    /// Position by expert; arbitrary for inactive experts.
    places: Vec<usize>,
    /// Counts of missing pieces of units, by position and block of neurons, and by position.
    missing: Vec<u32>,
    missing_in_all: Vec<u32>,
    /// Blocks of neurons of an expert.
    blocks: usize,
    /// Whether gates and up are computed block by block.
    by_block: bool,
    threads: usize,
    items: Vec<Item>,
    /// Number of items that were computed.
    done: usize,
    /// Number of experts whose items exist, in the order of this part.
    started: usize,
}

impl StepOrder {
    /// Creates an order with room for the experts of these layers.
    pub(super) fn new(layers: &[Layer], units: u32) -> Self {
        let experts = layers.iter().map(|l| l.experts).max().unwrap_or(0);
        let blocks = layers.iter().map(|l| l.inter.div_ceil(BLOCK)).max().unwrap_or(0);
        Self {
            experts: Vec::with_capacity(experts),
            ranges: Vec::with_capacity(experts),
            units: Vec::with_capacity(experts * units as usize),
            places: vec![usize::MAX; experts],
            missing: Vec::with_capacity(experts * blocks),
            missing_in_all: Vec::with_capacity(experts),
            items: Vec::with_capacity(experts * blocks.max(2)),
            ..Self::default()
        }
    }

    /// Sets the experts of a call, and their needs.
    pub(super) fn set(
        &mut self,
        layout: NeuronLayout,
        index: usize,
        layer: Layer,
        needs: &Needs<'_>,
        threads: usize,
    ) {
        self.blocks = layer.inter.div_ceil(BLOCK);
        (self.layer, self.by_block, self.threads) = (index, needs.lists.is_some(), threads);
        self.request = needs.request;
        self.begin(0);
        self.experts.clear();
        self.ranges.clear();
        self.units.clear();
        for (place, &expert) in needs.active.iter().enumerate() {
            let expert = usize::try_from(expert).unwrap_or(0).min(layer.experts.saturating_sub(1));
            let from = self.units.len();
            match needs.lists {
                None => self.units.extend(0..layer.units),
                Some(lists) => {
                    let own = lists.chunks_exact(BLOCK + 1).skip(place * self.blocks).take(self.blocks);
                    for list in own {
                        let count = usize::try_from(list[0]).unwrap_or(0).min(BLOCK);
                        for &neuron in &list[1..=count] {
                            let neuron = usize::try_from(neuron).unwrap_or(0).min(layer.inter - 1);
                            let unit = (neuron / layout.neurons_per_unit) as u32;
                            if self.units.len() == from || self.units.last() != Some(&unit) {
                                self.units.push(unit);
                            }
                        }
                    }
                }
            }
            self.experts.push(expert as u32);
            self.ranges.push(from..self.units.len());
            self.places[expert] = place;
        }
        self.missing.clear();
        self.missing.resize(needs.active.len() * self.blocks, 0);
        self.missing_in_all.clear();
        self.missing_in_all.resize(needs.active.len(), 0);
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

    /// Range of the units that the expert at a position needs.
    pub(super) fn needed(&self, place: usize) -> Range<usize> {
        self.ranges.get(place).cloned().unwrap_or_default()
    }

    /// The units that the expert at a position needs.
    pub(super) fn units(&self, place: usize) -> &[u32] {
        self.units.get(self.needed(place)).unwrap_or_default()
    }

    /// Number of units that all experts need.
    pub(super) fn all_units(&self) -> usize {
        self.units.len()
    }

    /// The needed unit at an index of that range.
    pub(super) fn unit(&self, at: usize) -> u32 {
        self.units[at]
    }

    /// The position of the next expert: down goes through them in reverse. `None` after the last.
    pub(super) fn next_place(&self) -> Option<usize> {
        let place = (self.started < self.len()).then_some(self.started)?;
        Some(if self.part == 0 { place } else { self.len() - 1 - place })
    }

    /// Resets the counts of missing units at a position to 0.
    pub(super) fn recount(&mut self, place: usize) {
        self.missing[place * self.blocks..][..self.blocks].fill(0);
        self.missing_in_all[place] = 0;
    }

    /// Counts a missing piece of a unit of the expert at a position.
    pub(super) fn add_missing(&mut self, layout: NeuronLayout, place: usize, unit: u32) {
        self.missing[place * self.blocks + unit as usize * layout.neurons_per_unit / BLOCK] += 1;
        self.missing_in_all[place] += 1;
    }

    /// Records that a piece of a unit of an expert of this layer has arrived.
    pub(super) fn unit_arrived(&mut self, layout: NeuronLayout, expert: u32, unit: u32) {
        let Some(&place) = self.places.get(expert as usize) else { return };
        if self.experts.get(place) != Some(&expert) {
            return;
        }
        // An expert that has requested nothing yet has no counts.
        let block = &mut self.missing[place * self.blocks + unit as usize * layout.neurons_per_unit / BLOCK];
        *block = block.saturating_sub(1);
        self.missing_in_all[place] = self.missing_in_all[place].saturating_sub(1);
    }

    /// Adds the items of the next expert: all of its units are in memory or being read.
    pub(super) fn add_items(&mut self, place: usize) {
        self.started += 1;
        let shares = match (self.part, self.by_block) {
            (0, true) => self.blocks,
            _ if self.threads > 1 => 2 * self.threads,
            _ => 1,
        };
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
        let Item { place, share, .. } = item;
        let missing = if self.part == 0 && self.by_block {
            self.missing[place * self.blocks + share]
        } else {
            self.missing_in_all[place]
        };
        missing == 0
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
