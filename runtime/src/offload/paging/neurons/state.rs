//! State of neurons: those in memory, and those in flight.

use super::step_order::{Needs, StepOrder};
use super::{Layer, NeuronLayout, layer_of, write_addresses};
use crate::error::{Error, Result};
use crate::exec::unit::{ExpertPart, LayerPart};
use crate::offload::disk::{ReadError, Ticket};
use crate::offload::neurons::{CacheLookup, Event, Part, Segmented};
use crate::offload::paging::tables::Tables;
use crate::platform::memory::Region;
use std::collections::{HashMap, VecDeque};
use std::sync::Arc;

/// Location of a unit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum UnitState {
    /// On disk.
    OnDisk,
    /// Requested.
    Requested,
    /// In a frame.
    InFrame(u32),
}

/// Mutable state, under one lock.
pub(super) struct State {
    pub(super) step_order: StepOrder,
    cache: Segmented,
    frames: Region,
    tables: Arc<Tables>,
    /// By unit.
    unit_states: Vec<UnitState>,
    free: Vec<u32>,
    /// Units that are still to be read, in order.
    queue: VecDeque<u32>,
    /// The unit of each read. Not indexed by buffer: a buffer of a failed read is free before that event is
    /// handled.
    pending: HashMap<Ticket, u32>,
    /// Reads that have not ended.
    pub(super) under_way: usize,
    /// Reason that the call cannot go on.
    pub(super) error: Option<Error>,
    /// The last read that failed.
    pub(super) last_failure: Option<ReadError>,
    /// Units that were needed: hits in memory, and misses.
    pub(super) hits: u64,
    pub(super) misses: u64,
    /// Experts of this layer's call whose units were counted.
    counted: usize,
}

impl State {
    pub(super) fn new(cache: Segmented, frames: Region, tables: Arc<Tables>, layers: &[Layer]) -> Self {
        let shape = cache.shape();
        let units = shape.matrices as usize * shape.neurons as usize;
        let count = cache.regions().cold / shape.gate.max(1);
        Self {
            step_order: StepOrder::new(layers, shape.neurons),
            cache,
            frames,
            tables,
            unit_states: vec![UnitState::OnDisk; units],
            // Taken from the end: the lowest address first.
            free: (0..count as u32).rev().collect(),
            queue: VecDeque::new(),
            pending: HashMap::new(),
            under_way: 0,
            error: None,
            last_failure: None,
            hits: 0,
            misses: 0,
            counted: 0,
        }
    }

    /// Fails if the call cannot go on.
    pub(super) fn failed(&self) -> Result<()> {
        match &self.error {
            None => Ok(()),
            Some(Error::Read(e)) => Err(Error::Read(e.clone())),
            Some(other) => Err(Error::Bundle(other.to_string())),
        }
    }

    /// Forgets all residency after an error, when no read is in flight.
    pub(super) fn forget(&mut self) {
        for slot in &mut self.unit_states {
            if let UnitState::InFrame(frame) = std::mem::replace(slot, UnitState::OnDisk) {
                self.free.push(frame);
            }
        }
        self.cache.clear();
        self.queue.clear();
        self.error = None;
    }

    /// Begins a layer.
    pub(super) fn need(
        &mut self,
        layout: NeuronLayout,
        index: usize,
        layer: Layer,
        needs: &Needs<'_>,
        threads: usize,
    ) {
        self.step_order.set(layout, index, layer, needs, threads);
        self.counted = 0;
    }

    /// Begins a part of the layer, with as many experts as fit.
    pub(super) fn begin_part(&mut self, layout: NeuronLayout, layers: &[Layer], part: u8) {
        self.step_order.begin(part);
        self.next_batch(layout, layers);
    }

    /// Records that an item was computed. The last item of a batch of experts starts the next batch.
    pub(super) fn computed(&mut self, layout: NeuronLayout, layers: &[Layer]) {
        if self.step_order.computed() {
            self.next_batch(layout, layers);
        }
    }

    /// Starts the next batch: as many experts as fit, at least one.
    fn next_batch(&mut self, layout: NeuronLayout, layers: &[Layer]) {
        self.cache.begin();
        let from = self.step_order.items();
        let Some(&layer) = layers.get(self.step_order.layer) else { return };
        while let Some(place) = self.step_order.next_place() {
            if !self.acquire(layout, layer, place) {
                break;
            }
            self.step_order.add_items(place);
        }
        if self.step_order.items() == from && !self.step_order.is_over() {
            self.error.get_or_insert(Error::plan("the neurons of an expert do not fit into memory"));
        }
        self.step_order.sort(from);
    }

    /// Requests the units that an expert needs from the cache; returns whether there is room for all of them.
    fn acquire(&mut self, layout: NeuronLayout, layer: Layer, place: usize) -> bool {
        let matrix = layer.first + self.step_order.expert(place);
        let needed = self.step_order.needed(place);
        if self.step_order.part == 0 && place >= self.counted {
            let held = |at: &usize| self.cache.holds(matrix, self.step_order.unit(*at), Part::Whole);
            let hits = needed.clone().filter(held).count();
            self.hits += hits as u64;
            self.misses += (needed.len() - hits) as u64;
            self.counted = place + 1;
        }
        self.step_order.recount(place);
        for at in needed {
            let unit = self.step_order.unit(at);
            let id = (matrix * layout.units + unit) as usize;
            let (slots, free) = (&mut self.unit_states, &mut self.free);
            let free_frame = |event| {
                if let Event::Evict(other) = event
                    && let UnitState::InFrame(frame) =
                        std::mem::replace(&mut slots[other as usize], UnitState::OnDisk)
                {
                    free.push(frame);
                }
            };
            match self.cache.neuron(matrix, unit, Part::Whole, free_frame) {
                Ok(CacheLookup::Hot | CacheLookup::Cold) => {}
                Ok(CacheLookup::Load(_)) => {
                    self.unit_states[id] = UnitState::Requested;
                    self.queue.push_back(id as u32);
                }
                Ok(CacheLookup::Stream(_)) => return false,
                Err(e) => {
                    self.error.get_or_insert(Error::plan(e.to_string()));
                    return false;
                }
            }
            if self.unit_states[id] == UnitState::Requested {
                self.step_order.add_missing(layout, place, unit);
            }
        }
        true
    }

    /// The unit to be read next.
    pub(super) fn next(&mut self) -> Option<u32> {
        while let Some(&unit) = self.queue.front() {
            if self.unit_states[unit as usize] == UnitState::Requested {
                return Some(unit);
            }
            // It was evicted before it was read.
            self.queue.pop_front();
        }
        None
    }

    /// Records that this unit is being read into a buffer.
    pub(super) fn requested(&mut self, ticket: Ticket) {
        if let Some(unit) = self.queue.pop_front() {
            self.pending.insert(ticket, unit);
            self.under_way += 1;
        }
    }

    /// Removes a read that has ended, successfully or not.
    pub(super) fn ended(&mut self, ticket: Ticket) -> Option<u32> {
        let unit = self.pending.remove(&ticket)?;
        self.under_way -= 1;
        Some(unit)
    }

    /// Handles the arrival of a unit: copies it to a frame, if it is still needed.
    pub(super) fn arrived(&mut self, layout: NeuronLayout, layers: &[Layer], ticket: Ticket, bytes: &[u8]) {
        let Some(id) = self.ended(ticket) else { return };
        if self.unit_states[id as usize] != UnitState::Requested {
            return;
        }
        let Some(frame) = self.free.pop() else {
            self.error.get_or_insert(Error::plan("more neurons are held than there are frames"));
            return;
        };
        let (matrix, unit) = (id / layout.units, id % layout.units);
        let Some((index, layer)) = layer_of(layers, matrix) else { return };
        let at = self.frames.base().plus(frame as usize * layout.bytes * layout.neurons_per_unit);
        let rows = bytes.chunks(layout.pitch).take(layout.neurons_per_unit);
        let count = rows.len();
        for (i, row) in rows.enumerate() {
            let row = &row[..layout.bytes.min(row.len())];
            // SAFETY: frame `frame` is inside the region and holds `neurons_per_unit` neurons. It is
            // free, so no kernel reads it. The source bytes belong to a buffer of the disk.
            unsafe {
                std::ptr::copy_nonoverlapping(row.as_ptr(), at.plus(i * layout.bytes).ptr(), row.len());
            };
        }
        let expert = matrix - layer.first;
        let first = expert as usize * layer.inter + unit as usize * layout.neurons_per_unit;
        write_addresses(
            &self.tables,
            layout,
            LayerPart { layer: index, part: ExpertPart::Down },
            first,
            count,
            at,
        );
        self.unit_states[id as usize] = UnitState::InFrame(frame);
        if index == self.step_order.layer {
            self.step_order.unit_arrived(layout, expert, unit);
        }
    }
}
