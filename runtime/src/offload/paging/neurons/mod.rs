//! Pager of neurons: reads up and down of only those neurons that a token activates (PowerInfer-2, §4.2 to
//! §4.4).
//!
//! A token computes clusters, blocks of neurons of the experts that it is routed to (§4.3: Pred, GIO, GC, UDIO,
//! UDC). Their gates are computed first, which lists the active neurons. Then the *units* of these neurons are
//! requested from the cache: groups of neurons that are read together. Missing units are read into a few buffers and
//! copied to frames without the padding on disk. Clusters do not wait for each other: when all active neurons of
//! one are in memory, a thread computes its up, while others compute gates or down of other clusters. The order
//! of computation depends on the disk, but the results do not ([`crate::exec::clusters`]).
//!
//! Gates are resident, or stay on disk, too. Then a predictor lists neurons before, and their gates are
//! requested. Gates, and up and down, are the two *pieces* of a unit: each is a read of its own, has as many frames,
//! and stays or goes by itself.
//!
//! [`Segmented`] decides which neurons stay: it evicts those used longest ago, but none that the step needs.
//! Its hot region is memory of artifacts that a unit loads; the border moves between calls (`state/border`).
//! If a step needs more frames than there are, it runs in batches of as many experts as fit. A prompt needs all
//! neurons of its experts, and computes gate and up of all batches first. Down takes the batches in reverse, and
//! finds in memory what up has used last.
//!
//! * `clusters`: the clusters of one layer in one call; `step_order`: the experts of a layer in a prompt; `state`:
//!   units in memory and units being read; `scales`: scales in segments of their own, which are resident.

mod clusters;
mod scales;
mod state;
mod step_order;

use super::pager::Report;
use super::tables::Tables;
use super::{CPU, Hooks, Paging, on_disk};
use crate::bundle::BundleFiles;
use crate::bundle::program::Program;
use crate::error::{Error, Result};
use crate::exec::timeline::{Timeline, What};
use crate::exec::unit::{Launch, LayerPart, PoolThread, StepFault};
use crate::offload::disk::{Class, Disk, Event, Priority};
use crate::platform::memory::{Addr, Region};
use crate::sync::progress::Progress;
use moec_ir::bundle::{BLOCK, DiskNeurons, UnitRead};
use moec_ir::op::DispatchLayout;
use moec_ir::plan;
use moec_ir::plan::{Grid, Segment};
use state::{Pool, State};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};
use step_order::Item;

/// Time that a thread waits for events before it looks whether another thread has taken them, or has made clusters
/// ready.
const POLL_INTERVAL: Duration = Duration::from_micros(50);

/// Maximum number of reads in flight. The plan's staging frames have room for their buffers.
const READS: u64 = 64;

/// Experts of a layer.
#[derive(Clone, Copy, Debug, Default)]
struct Layer {
    /// Number of its first expert, consecutive over all layers.
    first: u32,
    experts: usize,
    /// Neurons of an expert.
    inter: usize,
    /// Its first extent.
    extent: u32,
    /// Units of an expert.
    units: u32,
}

/// Part of a unit that one read gets. Its index is that of its pool, and that of its address in the tables.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Piece {
    /// Up and down.
    UpDown,
    /// Gates, with the scales of up and down if these are stored separately.
    Gate,
}

impl Piece {
    const ALL: [Self; 2] = [Self::UpDown, Self::Gate];

    const fn index(self) -> usize {
        self as usize
    }

    /// Its read; `None` for gates in memory.
    fn read(self, stored: DiskNeurons) -> Option<UnitRead> {
        match self {
            Self::UpDown => Some(stored.up_down()),
            Self::Gate => stored.gate(),
        }
    }

    /// Whether a step over all neurons (0: gate and up, 1: down) reads it.
    fn is_needed(self, part: u8, stored: DiskNeurons) -> bool {
        self == Self::UpDown || part == 0 || stored.has_scales_with_gates()
    }
}

impl Layer {
    /// Number of an expert in the dispatch table.
    fn expert(self, expert: i32) -> u32 {
        usize::try_from(expert).unwrap_or(0).min(self.experts.saturating_sub(1)) as u32
    }

    /// Blocks of the neurons of an expert: clusters.
    const fn blocks(self) -> usize {
        self.inter.div_ceil(BLOCK)
    }
}

/// Layout of neurons in memory and on disk.
#[derive(Clone, Copy, Debug)]
struct NeuronLayout {
    stored: DiskNeurons,
    /// Neurons of a unit.
    neurons_per_unit: usize,
    /// Units of an expert, the maximum over all layers: units are numbered as if all experts had this many.
    units: u32,
    /// Number of addresses of a neuron in the tables.
    addresses: usize,
}

/// Neurons on disk and in frames.
pub(crate) struct NeuronPager {
    disk: Arc<dyn Disk>,
    layers: Vec<Layer>,
    layout: NeuronLayout,
    /// Units of all layers: extents of the first piece of each.
    extents: u32,
    state: Mutex<State>,
    // Keeps the addresses in the tables valid.
    _scales: Region,
    report: Report,
    /// Nanoseconds that the first thread has waited.
    stalled: AtomicU64,
    /// Progress of clusters, for threads without work.
    progress: Progress,
    timeline: OnceLock<Arc<Timeline>>,
    hooks: Option<&'static dyn Hooks>,
}

/// Size class of the buffers that units are read into: the plan's staging frames are reserved for them.
pub(super) fn class(program: &Program, paging: &plan::Paging) -> Result<Class> {
    let bytes = stored(program, paging)?.largest_read() as u64;
    let staging = u64::from(paging.staging).saturating_mul(paging.frame_bytes);
    let count = staging.checked_div(bytes).unwrap_or(0).clamp(1, READS);
    Ok(Class { bytes, count: count as u32 })
}

/// Layout on disk of the neurons of all layers.
fn stored(program: &Program, paging: &plan::Paging) -> Result<DiskNeurons> {
    let segment = paging.layers.first().and_then(|l| program.segments.get(l.down as usize));
    segment.and_then(Segment::on_disk).ok_or_else(|| Error::plan("neurons of no segment"))
}

/// Number of addresses in the table of a layer.
pub(super) fn addresses(program: &Program, layer: &plan::PagedLayer) -> usize {
    let segment = program.segments.get(layer.down as usize);
    let each = segment.and_then(Segment::on_disk).map_or(1, DiskNeurons::addresses);
    super::neurons_of(program, layer) * each
}

impl NeuronPager {
    /// Creates a pager over the disk whose table is that of [`super::table`].
    ///
    /// # Errors
    /// Refused memory, neurons that cannot be numbered, scales that cannot be read.
    pub(super) fn new(
        (program, files): (&Program, &BundleFiles),
        paging: &plan::Paging,
        disk: Arc<dyn Disk>,
        tables: Arc<Tables>,
        options: &Paging,
    ) -> Result<Self> {
        let stored = stored(program, paging)?;
        let each = paging.neurons as usize;
        let (mut layers, mut first, mut extent) = (Vec::new(), 0, 0);
        for l in &paging.layers {
            let inter = program.segments.get(l.down as usize).map_or(0, |s| s.extents().1) as usize;
            let units = inter.div_ceil(each.max(1)) as u32;
            layers.push(Layer { first, experts: l.experts as usize, inter, extent, units });
            first += l.experts;
            extent += l.experts * units;
        }
        let units = layers.iter().map(|l| l.units).max().unwrap_or(1);
        let layout = NeuronLayout { stored, neurons_per_unit: each, units, addresses: stored.addresses() };
        let pieces = Piece::ALL.into_iter().filter_map(|piece| piece.read(stored));
        let pool = |read| Pool::new(read, layout, first, paging.frames);
        let pools: Vec<Pool> = pieces.map(pool).collect::<Result<_>>()?;
        let cold: u64 = pools.iter().map(Pool::bytes).sum();
        let scales = scales::load(program, files, paging, &tables)?;
        let report = Report {
            reader: disk.describe().to_owned(),
            policy: paging.policy.clone(),
            block_bytes: stored.largest_read() as u32,
            budget: paging.budget,
            frames: paging.frames,
            neurons: paging.neurons,
            gates_on_disk: stored.gates,
            frame_bytes: cold + disk.buffers().bytes() as u64,
            ..Report::default()
        };
        let state = State::new(pools, tables, &layers);
        Ok(Self {
            disk,
            layers,
            layout,
            extents: extent,
            state: Mutex::new(state),
            _scales: scales,
            report,
            stalled: AtomicU64::new(0),
            progress: Progress::default(),
            timeline: OnceLock::new(),
            hooks: options.hooks,
        })
    }

    /// Records waits in the timeline from now on. Called at most once.
    pub(crate) fn watch(&self, timeline: Arc<Timeline>) {
        let _ = self.timeline.set(timeline);
    }

    /// Statistics so far.
    pub(crate) fn report(&self) -> Report {
        let mut state = self.lock();
        self.handle_disk_events(&mut state);
        Report {
            hits: state.hits,
            misses: state.misses,
            gate_bytes: state.gate_bytes,
            current_frames: state.frames(self.layout),
            disk: self.disk.stats(),
            stalled: Duration::from_nanos(self.stalled.load(Ordering::Relaxed)),
            ..self.report.clone()
        }
    }

    /// Bytes that were read from disk so far.
    pub(super) fn bytes_read(&self) -> u64 {
        self.disk.stats().bytes
    }

    /// Frames of the cache now.
    pub(super) fn frames(&self) -> u32 {
        self.lock().frames(self.layout)
    }

    /// Moves the border between hot and cold neurons, between two calls.
    ///
    /// # Errors
    /// More frames than the region of cold neurons has at most.
    pub(super) fn resize(&self, frames: u32) -> Result<()> {
        let mut state = self.lock();
        self.handle_disk_events(&mut state);
        state.resize(self.layout, &self.layers, frames)
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Begins a layer: with lists of neurons its clusters, else all neurons of the experts of a dispatch table.
    ///
    /// # Safety
    /// As [`crate::exec::unit::ComputeUnit::submit`]; no other thread runs this step. The lists stay until the
    /// layer's last step.
    pub(crate) unsafe fn request_neurons(
        &self,
        launch: &Launch<'_>,
        thread: PoolThread,
        layer: usize,
        [rows, k]: [usize; 2],
    ) {
        let (Some(own), Some((table, lists))) = (self.layers.get(layer), launch.args.split_first()) else {
            return;
        };
        let layout = DispatchLayout { rows, k, experts: own.experts };
        // SAFETY: the verifier has found the whole table there, aligned; the step that writes it has ended.
        let table = unsafe { std::slice::from_raw_parts(table.of::<i32>(), layout.words()) };
        let active = usize::try_from(table[0]).unwrap_or(0).min(own.experts);
        let active = &table[layout.expert()..][..active];
        if let Err(e) = self.begin(layer, launch.n, active, lists.first().copied(), thread.of) {
            launch.fail(StepFault::Disk(e));
        }
    }

    fn begin(
        &self,
        layer: usize,
        rows: usize,
        active: &[i32],
        lists: Option<Addr>,
        threads: usize,
    ) -> Result<()> {
        let mut state = self.lock();
        self.handle_disk_events(&mut state);
        if state.error.is_some() {
            // The error of a cancelled call is not this call's.
            while state.under_way > 0 {
                drop(state);
                self.disk.wait_for_event(Some(POLL_INTERVAL));
                state = self.lock();
                self.handle_disk_events(&mut state);
            }
            state.forget();
        }
        let own = self.layers[layer];
        if let Some(lists) = lists {
            // SAFETY: the verifier has found room for the lists of as many experts as can be active.
            unsafe { state.begin_clusters(self.layout, layer, own, active, (lists, rows), threads) };
            self.report_needs(&mut state);
        } else {
            state.need(layer, own, active, threads);
            if let Some(hooks) = self.hooks {
                let all: Vec<u32> = (0..own.units).collect();
                let mut needed = active.iter().map(|&expert| (own.expert(expert), all.as_slice()));
                hooks.needs(layer, rows, &mut needed);
            }
            state.begin_part(self.layout, &self.layers, 0);
        }
        self.request(&mut state);
        state.failed()
    }

    /// A thread's share of a step over all neurons of the active experts: `call` runs a range of its items.
    pub(crate) fn run(
        &self,
        layer_part: LayerPart,
        launch: &Launch<'_>,
        thread: PoolThread,
        call: &dyn Fn(usize, usize),
    ) {
        let Grid::Experts { tiles, .. } = launch.grid else { return };
        let tiles = tiles as usize;
        loop {
            let at = launch.taken.fetch_add(1, Ordering::Relaxed);
            let item = match self.item(layer_part, at, thread) {
                Ok(Some(item)) => item,
                Ok(None) => return,
                Err(e) => return launch.fail(StepFault::Disk(e)),
            };
            let Item { place, share, shares } = item;
            call(place * tiles + tiles * share / shares, place * tiles + tiles * (share + 1) / shares);
            let mut state = self.lock();
            state.computed(self.layout, &self.layers);
            self.request(&mut state);
        }
    }

    /// Waits until the neurons of an item are in memory; `None` after the last one.
    fn item(&self, layer_part: LayerPart, at: usize, thread: PoolThread) -> Result<Option<Item>> {
        let mut waits: Option<Instant> = None;
        loop {
            let mut state = self.lock();
            self.handle_disk_events(&mut state);
            if usize::from(state.step_order.part) < layer_part.part.index() {
                state.begin_part(self.layout, &self.layers, 1);
            }
            self.request(&mut state);
            state.failed()?;
            let found = state.step_order.item(at);
            let over = found.is_none() && state.step_order.is_over();
            let there = found.filter(|item| state.step_order.is_ready(*item));
            if over || there.is_some() {
                let expert = there.map_or(0, |item| state.step_order.expert(item.place));
                drop(state);
                if let Some(since) = waits {
                    self.waited(layer_part, expert, thread, since);
                }
                return Ok(there);
            }
            drop(state);
            waits.get_or_insert_with(Instant::now);
            self.disk.wait_for_event(Some(POLL_INTERVAL));
        }
    }

    fn waited(&self, layer_part: LayerPart, expert: u32, thread: PoolThread, since: Instant) {
        if let Some(timeline) = self.timeline.get() {
            timeline.record(thread.index, What::Wait { layer: layer_part.layer as u32, expert }, since);
        }
        if thread.index == 0 {
            self.stalled.fetch_add(since.elapsed().as_nanos() as u64, Ordering::Relaxed);
        }
    }

    /// Handles events of the disk.
    fn handle_disk_events(&self, state: &mut State) {
        while let Some(event) = self.disk.poll() {
            match event {
                Event::Done { ticket, loaded } => {
                    state.arrived(self.layout, &self.layers, ticket, loaded.bytes());
                }
                Event::Failed { ticket, error } => {
                    state.ended(ticket);
                    state.last_failure = Some(error.clone());
                    state.error.get_or_insert(Error::Read(Box::new(error)));
                }
                Event::Cancelled { ticket } => {
                    state.ended(ticket);
                }
                Event::Arrived { .. } | Event::Released { .. } => {}
            }
        }
    }

    /// Starts requested reads, as long as there are buffers.
    fn request(&self, state: &mut State) {
        while state.error.is_none() {
            let Some((piece, unit)) = state.next() else { return };
            let Some(buffer) = self.disk.buffers().take(1) else {
                // Cancelled reads keep their buffers until they end. If these are all buffers, no event will
                // come.
                if let (0, Some(lost)) = (state.under_way, &state.last_failure) {
                    state.error = Some(Error::Read(Box::new(lost.clone())));
                }
                return;
            };
            let (matrix, at) = (unit / self.layout.units, unit % self.layout.units);
            let before = piece.index() as u32 * self.extents;
            let extent = layer_of(&self.layers, matrix)
                .map(|(_, l)| before + l.extent + (matrix - l.first) * l.units + at);
            match self.disk.submit(extent.unwrap_or(u32::MAX), 1, Priority::Demand, buffer) {
                Ok(ticket) => state.requested(ticket),
                Err(error) => state.error = Some(error),
            }
        }
    }
}

/// The layer of an expert that is numbered over all layers, and its index.
fn layer_of(layers: &[Layer], matrix: u32) -> Option<(usize, &Layer)> {
    let index = layers.partition_point(|l| l.first <= matrix).checked_sub(1)?;
    Some((index, layers.get(index)?))
}

/// Extents of all units: by piece, layer, expert, and position in the expert.
pub(super) fn units(program: &Program) -> Result<Vec<(u32, u32, u64, u64)>> {
    let paging = on_disk(program, CPU)?;
    let stored = stored(program, paging)?;
    let (each, pitch) = (paging.neurons.max(1), stored.unit_pitch() as u64);
    let mut units = Vec::new();
    for read in Piece::ALL.into_iter().filter_map(|piece| piece.read(stored)) {
        for l in &paging.layers {
            let inter = program.segments.get(l.down as usize).map_or(0, |s| s.extents().1);
            for expert in 0..l.experts {
                for first in (0..inter).step_by(each as usize) {
                    // With gates the last unit of an expert is padded.
                    let neurons = each.min(inter - first) as usize;
                    let bytes = if stored.gates { read.read } else { neurons * read.pitch };
                    let skip = u64::from(first / each) * pitch + read.first as u64;
                    units.push((l.down, expert, skip, bytes as u64));
                }
            }
        }
    }
    Ok(units)
}
