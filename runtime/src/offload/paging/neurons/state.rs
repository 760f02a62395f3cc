//! State of neurons: those in memory, and those in flight.

mod border;

use super::clusters::ClusterRun;
use super::step_order::StepOrder;
use super::{Layer, NeuronLayout, Piece, layer_of};
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
    pub(super) fn count(&self) -> u64 {
        self.bytes() / self.cache.shape().gate.max(1)
    }

    /// Begins a step: units of the last one may be evicted.
    pub(super) fn begin(&mut self) {
        self.cache.begin();
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
    /// Order of the experts in a step that computes all of their neurons.
    pub(super) step_order: StepOrder,
    /// Clusters of neurons in a step that computes active ones.
    pub(super) run: ClusterRun,
    /// Whether the last requests were those of clusters.
    pub(super) by_clusters: bool,
    /// By piece; the second is there if gates stay on disk.
    pub(super) pools: Vec<Pool>,
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
    /// Experts of this layer's call whose units were counted.
    counted: usize,
}

impl State {
    pub(super) fn new(pools: Vec<Pool>, tables: Arc<Tables>, layers: &[Layer]) -> Self {
        Self {
            step_order: StepOrder::new(layers),
            run: ClusterRun::new(layers),
            by_clusters: false,
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

    /// Begins a layer that computes all neurons of these experts.
    pub(super) fn need(&mut self, index: usize, layer: Layer, active: &[i32], threads: usize) {
        self.by_clusters = false;
        self.step_order.set(index, layer, active, threads);
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
        self.pools.iter_mut().for_each(Pool::begin);
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

    /// Requests all units of an expert from the cache; returns whether there is room for all of them.
    fn acquire(&mut self, layout: NeuronLayout, layer: Layer, place: usize) -> bool {
        let (expert, part) = (self.step_order.expert(place), self.step_order.part);
        let matrix = layer.first + expert;
        if part == 0 && place >= self.counted {
            for pool in &self.pools {
                let held = |unit: &u32| pool.cache.holds(matrix, *unit, Part::Whole);
                let hits = (0..layer.units).filter(held).count() as u64;
                self.hits += hits;
                self.misses += u64::from(layer.units) - hits;
            }
            self.counted = place + 1;
        }
        self.step_order.recount(place);
        for unit in 0..layer.units {
            for piece in Piece::ALL.into_iter().take(self.pools.len()) {
                if !piece.is_needed(part, layout.stored) {
                    continue;
                }
                match self.request_piece(layout, piece, matrix, unit) {
                    Some(UnitState::Requested) => self.step_order.add_missing(place),
                    Some(_) => {}
                    None => return false,
                }
            }
        }
        true
    }

    /// Requests a piece of a unit from the cache, and puts it in the queue if it must be read. `None` if there is
    /// no room beside what the step uses, or after an error.
    fn request_piece(
        &mut self,
        layout: NeuronLayout,
        piece: Piece,
        matrix: u32,
        unit: u32,
    ) -> Option<UnitState> {
        match self.pools.get_mut(piece.index())?.request(layout, matrix, unit) {
            Ok(found) => {
                let (state, load) = found?;
                if load {
                    self.queue.push_back((piece, matrix * layout.units + unit));
                }
                Some(state)
            }
            Err(e) => {
                self.error.get_or_insert(e);
                None
            }
        }
    }

    /// Requests a piece of a unit of an active cluster. Returns whether it is still to arrive.
    pub(super) fn request_of_cluster(
        &mut self,
        layout: NeuronLayout,
        piece: Piece,
        matrix: u32,
        unit: u32,
    ) -> bool {
        let held = self.pools.get(piece.index()).is_some_and(|p| p.cache.holds(matrix, unit, Part::Whole));
        *(if held { &mut self.hits } else { &mut self.misses }) += 1;
        let found = self.request_piece(layout, piece, matrix, unit);
        if found.is_none() {
            self.error.get_or_insert(Error::plan("the neurons of a cluster do not fit into memory"));
        }
        found == Some(UnitState::Requested)
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
        if self.by_clusters {
            self.run.unit_arrived(layout, piece, index, expert, unit);
        } else if index == self.step_order.layer && piece.is_needed(self.step_order.part, layout.stored) {
            self.step_order.unit_arrived(expert);
        }
    }
}
