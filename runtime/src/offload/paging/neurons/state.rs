//! State of neurons: those in memory, and those in flight.

mod border;

use super::step_order::{Needs, StepOrder};
use super::{Layer, NeuronLayout, Piece, Request, layer_of};
use crate::error::{Error, Result};
use crate::exec::unit::{ExpertPart, LayerPart};
use crate::offload::disk::{ReadError, Ticket};
use crate::offload::neurons::{CacheLookup, Event, Part, Regions, Segmented, Shape};
use crate::offload::paging::tables::Tables;
use crate::platform::memory::{Addr, Region};
use moec_ir::bundle::UnitRead;
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

/// The frames of one piece of the units, and the units in them.
pub(super) struct Pool {
    read: UnitRead,
    cache: Segmented,
    frames: Region,
    /// By unit.
    unit_states: Vec<UnitState>,
    free: Vec<u32>,
}

impl Pool {
    /// Frames for pieces of the units of so many experts.
    ///
    /// # Errors
    /// Refused memory, neurons that cannot be numbered.
    pub(super) fn new(read: UnitRead, layout: NeuronLayout, experts: u32, frames: u32) -> Result<Self> {
        let bytes = (read.bytes * layout.neurons_per_unit) as u64;
        let units = layout.units;
        let shape = Shape { matrices: experts, neurons: units, cluster: units, gate: bytes, up_down: 0 };
        let cold = bytes.saturating_mul(frames.into());
        let cache = Segmented::new(shape, Regions { fixed: 0, hot: 0, cold }).map_err(Error::plan)?;
        let states = experts as usize * units as usize;
        Ok(Self {
            read,
            cache,
            frames: Region::new("neurons", cold)?,
            unit_states: vec![UnitState::OnDisk; states],
            // Taken from the end: the lowest address first.
            free: (0..frames).rev().collect(),
        })
    }

    /// Bytes of all frames.
    pub(super) fn bytes(&self) -> u64 {
        self.cache.regions().cold
    }

    /// Number of frames.
    fn count(&self) -> u64 {
        self.bytes() / self.cache.shape().gate.max(1)
    }

    /// Requests a unit from the cache. Returns the state of its piece and whether it must be read; `None` if
    /// there is no room beside what the step uses.
    fn request(&mut self, layout: NeuronLayout, matrix: u32, unit: u32) -> Result<Option<(UnitState, bool)>> {
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
        let found = self.cache.neuron(matrix, unit, Part::Whole, free_frame);
        let load = match found.map_err(|e| Error::plan(e.to_string()))? {
            CacheLookup::Hot | CacheLookup::Cold => false,
            CacheLookup::Load(_) => true,
            CacheLookup::Stream(_) => return Ok(None),
        };
        if load {
            self.unit_states[id] = UnitState::Requested;
        }
        Ok(Some((self.unit_states[id], load)))
    }

    /// Copies an arrived piece of `count` neurons to a free frame, without the padding on disk. Returns the
    /// address of the first.
    fn store(&mut self, layout: NeuronLayout, id: u32, count: usize, bytes: &[u8]) -> Option<Addr> {
        let frame = self.free.pop()?;
        let UnitRead { pitch, bytes: each, .. } = self.read;
        let at = self.frames.base().plus(frame as usize * each * layout.neurons_per_unit);
        for (i, row) in bytes.chunks(pitch).take(count).enumerate() {
            let row = &row[..each.min(row.len())];
            // SAFETY: frame `frame` is inside the region and holds `neurons_per_unit` neurons, of which there are
            // `count` at most. It is free, so no kernel reads it. The source bytes belong to a buffer of the disk.
            unsafe { std::ptr::copy_nonoverlapping(row.as_ptr(), at.plus(i * each).ptr(), row.len()) };
        }
        self.unit_states[id as usize] = UnitState::InFrame(frame);
        Some(at)
    }

    /// Forgets all residency, when no read is in flight.
    fn forget(&mut self) {
        for slot in &mut self.unit_states {
            if let UnitState::InFrame(frame) = std::mem::replace(slot, UnitState::OnDisk) {
                self.free.push(frame);
            }
        }
        self.cache.clear();
    }
}

/// Mutable state, under one lock.
pub(super) struct State {
    pub(super) step_order: StepOrder,
    /// By piece; the second is there if gates stay on disk.
    pools: Vec<Pool>,
    tables: Arc<Tables>,
    /// Pieces of units that are still to be read, in order.
    queue: VecDeque<(Piece, u32)>,
    /// The piece of each read. Not indexed by buffer: a buffer of a failed read is free before that event is
    /// handled.
    pending: HashMap<Ticket, (Piece, u32)>,
    /// Reads that have not ended.
    pub(super) under_way: usize,
    /// Reason that the call cannot go on.
    pub(super) error: Option<Error>,
    /// The last read that failed.
    pub(super) last_failure: Option<ReadError>,
    /// Pieces of units that were needed: hits in memory, and misses.
    pub(super) hits: u64,
    pub(super) misses: u64,
    /// Bytes of gates that were read.
    pub(super) gate_bytes: u64,
    /// Lists of the neurons whose gates are requested: steps over gates shorten them to the active ones.
    pub(super) gate_lists: Option<Addr>,
    /// Units whose up and down were read before all gates of their layer were computed.
    pub(super) ahead: u64,
    /// Experts of this layer's call whose units were counted.
    counted: usize,
}

impl State {
    pub(super) fn new(pools: Vec<Pool>, tables: Arc<Tables>, layers: &[Layer], units: u32) -> Self {
        Self {
            step_order: StepOrder::new(layers, units),
            pools,
            tables,
            queue: VecDeque::new(),
            pending: HashMap::new(),
            under_way: 0,
            error: None,
            last_failure: None,
            hits: 0,
            misses: 0,
            gate_bytes: 0,
            gate_lists: None,
            ahead: 0,
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
        self.pools.iter_mut().for_each(Pool::forget);
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
        if needs.request == Request::Gates {
            self.pools.iter_mut().for_each(|pool| pool.cache.begin());
        }
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
        let (request, part) = (self.step_order.request, self.step_order.part);
        // What gates read ahead stays until it is requested.
        let pools = Piece::ALL.into_iter().zip(&mut self.pools);
        pools
            .filter(|(piece, _)| request.needs(*piece, part, layout.stored))
            .for_each(|(_, pool)| pool.cache.begin());
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
        let order = &self.step_order;
        let (needed, request, part) = (order.needed(place), order.request, order.part);
        if part == 0 && place >= self.counted {
            for (_, pool) in
                Piece::ALL.into_iter().zip(&self.pools).filter(|(piece, _)| request.names(*piece))
            {
                let held = |at: &usize| pool.cache.holds(matrix, self.step_order.unit(*at), Part::Whole);
                let hits = needed.clone().filter(held).count();
                self.hits += hits as u64;
                self.misses += (needed.len() - hits) as u64;
            }
            self.counted = place + 1;
        }
        self.step_order.recount(place);
        for at in needed {
            let unit = self.step_order.unit(at);
            let pieces = Piece::ALL.into_iter().zip(&mut self.pools);
            for (piece, pool) in pieces.filter(|(piece, _)| request.needs(*piece, part, layout.stored)) {
                match pool.request(layout, matrix, unit) {
                    Ok(Some((state, load))) => {
                        if load {
                            self.queue.push_back((piece, matrix * layout.units + unit));
                        }
                        if state == UnitState::Requested {
                            self.step_order.add_missing(layout, place, unit);
                        }
                    }
                    Ok(None) => return false,
                    Err(e) => {
                        self.error.get_or_insert(e);
                        return false;
                    }
                }
            }
        }
        true
    }

    /// Requests up and down of the listed neurons of a block, whose gates are computed; nothing if those of all
    /// predicted neurons of the layer have no room.
    pub(super) fn read_ahead(&mut self, layout: NeuronLayout, layers: &[Layer], place: usize, list: &[i32]) {
        let expert = self.step_order.expert(place);
        let (Some(layer), Some(pool), Some((&count, neurons))) = (
            layers.get(self.step_order.layer),
            self.pools.get_mut(Piece::UpDown.index()),
            list.split_first(),
        ) else {
            return;
        };
        if self.error.is_some() || self.step_order.all_units() as u64 > pool.count() {
            return;
        }
        let matrix = layer.first + expert;
        for &neuron in neurons.iter().take(usize::try_from(count).unwrap_or(0)) {
            let neuron = usize::try_from(neuron).unwrap_or(0).min(layer.inter.saturating_sub(1));
            let unit = (neuron / layout.neurons_per_unit) as u32;
            if let Ok(Some((_, true))) = pool.request(layout, matrix, unit) {
                self.queue.push_back((Piece::UpDown, matrix * layout.units + unit));
                self.ahead += 1;
            }
        }
    }

    /// The piece to be read next, and its unit.
    pub(super) fn next(&mut self) -> Option<(Piece, u32)> {
        while let Some(&(piece, unit)) = self.queue.front() {
            let pool = self.pools.get(piece.index());
            if pool.is_some_and(|pool| pool.unit_states[unit as usize] == UnitState::Requested) {
                return Some((piece, unit));
            }
            // It was evicted before it was read.
            self.queue.pop_front();
        }
        None
    }

    /// Records that this piece is being read into a buffer.
    pub(super) fn requested(&mut self, ticket: Ticket) {
        if let Some(next) = self.queue.pop_front() {
            self.pending.insert(ticket, next);
            self.under_way += 1;
        }
    }

    /// Removes a read that has ended, successfully or not.
    pub(super) fn ended(&mut self, ticket: Ticket) -> Option<(Piece, u32)> {
        let ended = self.pending.remove(&ticket)?;
        self.under_way -= 1;
        Some(ended)
    }

    /// Handles the arrival of a piece: copies it to a frame, if it is still needed.
    pub(super) fn arrived(&mut self, layout: NeuronLayout, layers: &[Layer], ticket: Ticket, bytes: &[u8]) {
        let Some((piece, id)) = self.ended(ticket) else { return };
        if piece == Piece::Gate {
            self.gate_bytes += bytes.len() as u64;
        }
        let (matrix, unit) = (id / layout.units, id % layout.units);
        let Some((pool, (index, layer))) = self.pools.get_mut(piece.index()).zip(layer_of(layers, matrix))
        else {
            return;
        };
        if pool.unit_states[id as usize] != UnitState::Requested {
            return;
        }
        let within = unit as usize * layout.neurons_per_unit;
        let count = layout.neurons_per_unit.min(layer.inter.saturating_sub(within));
        let Some(at) = pool.store(layout, id, count, bytes) else {
            self.error.get_or_insert(Error::plan("more neurons are held than there are frames"));
            return;
        };
        let each = pool.read.bytes;
        let expert = matrix - layer.first;
        let first = expert as usize * layer.inter + within;
        let layer_part = LayerPart { layer: index, part: ExpertPart::Down };
        for i in 0..count {
            let entry = (first + i) * layout.addresses + piece.index();
            self.tables.set(layer_part, entry, at.plus(i * each));
        }
        let order = &self.step_order;
        if index == order.layer && order.request.needs(piece, order.part, layout.stored) {
            self.step_order.unit_arrived(layout, expert, unit);
        }
    }
}
