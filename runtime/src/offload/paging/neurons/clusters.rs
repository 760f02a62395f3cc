//! Clusters of one layer in one call: their reads, and which of them memory has room for (PowerInfer-2, §4.3).

use super::state::{Pool, State};
use super::{Layer, NeuronLayout, NeuronPager, POLL_INTERVAL, Piece};
use crate::error::Error;
use crate::exec::clusters::{ClusterPart, ClusterWork, Clusters};
use crate::exec::unit::{Launch, LayerPart, PoolThread, StepFault};
use crate::offload::paging::hooks::Hooks;
use crate::platform::memory::Addr;
use moec_ir::bundle::BLOCK;
use moec_ir::plan::Grid;
use std::sync::atomic::Ordering;
use std::time::Instant;

/// Clusters of a layer, with their reads.
#[derive(Debug, Default)]
pub(super) struct ClusterRun {
    /// Order of computation.
    pub(super) clusters: Clusters,
    /// Index of the layer, and rows of the call.
    index: usize,
    rows: usize,
    layer: Layer,
    /// By position in the dispatch table.
    experts: Vec<u32>,
    /// Position by expert; arbitrary for inactive experts.
    places: Vec<usize>,
    /// Lists of the neurons of each block, by position: those that a predictor named, after the block's gates the
    /// active ones.
    lists: Option<Addr>,
    /// By position and block: pieces that are still to arrive for the next part, and units of up and down that
    /// the gates may turn out to need.
    missing: Vec<u32>,
    likely: Vec<u32>,
    /// By piece: frames that the clusters of this batch may need.
    claimed: [u64; 2],
    /// Number of experts that were begun, in this batch and those before it.
    begun: usize,
    /// Blocks whose gates are not computed.
    gates_left: usize,
    /// Whether hooks know what the layer needs.
    reported: bool,
}

impl ClusterRun {
    /// Creates a run with room for the experts of these layers.
    pub(super) fn new(layers: &[Layer]) -> Self {
        let experts = layers.iter().map(|l| l.experts).max().unwrap_or(0);
        Self { places: vec![usize::MAX; experts], ..Self::default() }
    }

    /// The expert at a position.
    pub(super) fn expert(&self, place: usize) -> u32 {
        self.experts.get(place).copied().unwrap_or(0)
    }

    /// Number of the expert at a position, over all layers.
    fn matrix(&self, place: usize) -> u32 {
        self.layer.first + self.expert(place)
    }

    fn at(&self, place: usize, block: usize) -> usize {
        place * self.layer.blocks() + block
    }

    /// The units of the listed neurons of a block, ascending.
    ///
    /// # Safety
    /// The lists are there, and no thread writes this one.
    unsafe fn units(
        &self,
        layout: NeuronLayout,
        place: usize,
        block: usize,
    ) -> impl Iterator<Item = u32> + use<> {
        let skip = self.at(place, block) * (BLOCK + 1) * size_of::<i32>();
        // SAFETY: the caller's promise; a list has a count and as many words as a block has neurons.
        let read = |lists: Addr| unsafe { *lists.plus(skip).of::<[i32; BLOCK + 1]>() };
        let list = self.lists.map_or([0; BLOCK + 1], read);
        let last_neuron = self.layer.inter.saturating_sub(1);
        let count = usize::try_from(list[0]).unwrap_or(0).min(BLOCK);
        let mut last = None;
        list.into_iter().skip(1).take(count).filter_map(move |neuron| {
            let neuron = usize::try_from(neuron).unwrap_or(0).min(last_neuron);
            let unit = (neuron / layout.neurons_per_unit) as u32;
            (last.replace(unit) != Some(unit)).then_some(unit)
        })
    }

    /// Records that a piece of a unit of an expert has arrived.
    pub(super) fn unit_arrived(
        &mut self,
        layout: NeuronLayout,
        piece: Piece,
        index: usize,
        expert: u32,
        unit: u32,
    ) {
        let Some(&place) = self.places.get(expert as usize) else { return };
        if index != self.index || place >= self.begun || self.experts.get(place) != Some(&expert) {
            return;
        }
        let block = unit as usize * layout.neurons_per_unit / BLOCK;
        let at = self.at(place, block);
        if self.missing[at] == 0 {
            return;
        }
        self.missing[at] -= 1;
        if self.missing[at] == 0 {
            match piece {
                Piece::Gate => self.clusters.gate_is_ready(place, block),
                Piece::UpDown => self.clusters.up_is_ready(place, block),
            }
        }
    }

    /// Tells hooks, once, which units the layer has needed, if all gates are computed.
    ///
    /// # Safety
    /// As [`State::begin_clusters`].
    pub(super) unsafe fn report(&mut self, layout: NeuronLayout, hooks: &dyn Hooks) {
        if self.gates_left > 0 || std::mem::replace(&mut self.reported, true) {
            return;
        }
        let blocks = self.layer.blocks();
        let units = |place: usize| {
            // SAFETY: the caller's promise; all gates are computed, so lists stay as they are.
            let of = |block| unsafe { self.units(layout, place, block) };
            (0..blocks).flat_map(of).collect::<Vec<u32>>()
        };
        let all: Vec<Vec<u32>> = (0..self.experts.len()).map(units).collect();
        let mut needed = self.experts.iter().zip(&all).map(|(&expert, units)| (expert, units.as_slice()));
        hooks.needs(self.index, self.rows, &mut needed);
    }
}

impl NeuronPager {
    /// Tells hooks which units the clusters of a layer have needed, when these are known.
    pub(super) fn report_needs(&self, state: &mut State) {
        if let Some(hooks) = self.hooks {
            // SAFETY: `begin_clusters` got the lists.
            unsafe { state.run.report(self.layout, hooks) };
        }
    }

    /// A thread's share of a step over clusters: `call` runs a range of its items.
    pub(crate) fn run_clusters(
        &self,
        layer_part: LayerPart,
        launch: &Launch<'_>,
        thread: PoolThread,
        call: &dyn Fn(usize, usize),
    ) {
        let Grid::Clusters { columns, .. } = launch.grid else { return };
        let mut state = self.lock();
        if launch.taken.swap(1, Ordering::Relaxed) == 0 {
            state.run.clusters.set_tiles(columns as usize);
        }
        let step = state.run.clusters.step();
        let mut waits: Option<Instant> = None;
        loop {
            self.handle_disk_events(&mut state);
            self.request(&mut state);
            if let Err(e) = state.failed() {
                return launch.fail(StepFault::Disk(e));
            }
            if state.run.clusters.step() != step || state.run.clusters.is_over() {
                drop(state);
                if let Some(since) = waits {
                    self.waited(layer_part, 0, thread, since);
                }
                return;
            }
            let Some(work) = state.run.clusters.take() else {
                let (seen, reads) = (self.progress.now(), state.under_way > 0);
                drop(state);
                if reads {
                    waits.get_or_insert_with(Instant::now);
                    self.disk.wait_for_event(Some(POLL_INTERVAL));
                } else {
                    self.progress.wait(seen);
                }
                state = self.lock();
                continue;
            };
            let (items, expert) = (state.run.clusters.items(&work), state.run.expert(work.place));
            drop(state);
            if let Some(since) = waits.take() {
                self.waited(layer_part, expert, thread, since);
            }
            call(items.start, items.end);
            if let Some(hooks) = self.hooks {
                hooks.cluster_computed(layer_part.layer, work.part, expert, work.blocks.clone());
            }
            state = self.lock();
            // SAFETY: `begin_clusters` got the lists, and this thread has computed the work.
            unsafe { state.cluster_computed(self.layout, &work) };
            self.report_needs(&mut state);
            self.progress.advance();
        }
    }
}

impl State {
    /// Begins the clusters of a layer: `active` experts, `lists` of their neurons, and the rows of the call.
    ///
    /// # Safety
    /// There are lists of all blocks of these experts, which stay until the layer's last step. Where gates stay on
    /// disk, a predictor has filled them.
    pub(super) unsafe fn begin_clusters(
        &mut self,
        layout: NeuronLayout,
        index: usize,
        layer: Layer,
        active: &[i32],
        (lists, rows): (Addr, usize),
        threads: usize,
    ) {
        self.by_clusters = true;
        let (run, blocks) = (&mut self.run, layer.blocks());
        (run.index, run.rows, run.layer, run.lists) = (index, rows, layer, Some(lists));
        run.clusters.begin(active.len(), blocks, threads);
        run.experts.clear();
        for (place, &expert) in active.iter().enumerate() {
            let expert = layer.expert(expert);
            run.experts.push(expert);
            run.places[expert as usize] = place;
        }
        for of in [&mut run.missing, &mut run.likely] {
            of.clear();
            of.resize(active.len() * blocks, 0);
        }
        (run.begun, run.gates_left, run.reported) = (0, active.len() * blocks, false);
        self.begin_batch();
        // SAFETY: the caller's promise; no gates are being computed.
        unsafe { self.begin_experts(layout) };
    }

    /// Begins a batch: units of the last one may be evicted.
    fn begin_batch(&mut self) {
        self.pools.iter_mut().for_each(Pool::begin);
        self.run.claimed = [0; 2];
    }

    /// Begins as many experts as have room beside those in progress, in the order of the dispatch table. The frames
    /// of a batch are free for the next one when all of its experts are computed.
    ///
    /// # Safety
    /// As [`State::begin_clusters`].
    unsafe fn begin_experts(&mut self, layout: NeuronLayout) {
        while self.run.begun < self.run.experts.len() && self.error.is_none() {
            // SAFETY: the caller's promise; its gates are not begun.
            let needs = unsafe { self.needs(layout, self.run.begun) };
            let has_room = self
                .pools
                .iter()
                .zip(self.run.claimed)
                .zip(needs)
                .all(|((pool, claimed), needed)| claimed + needed <= pool.count());
            if has_room {
                self.run.claimed.iter_mut().zip(needs).for_each(|(claimed, needed)| *claimed += needed);
                self.run.begun += 1;
                // SAFETY: as above.
                unsafe { self.begin_expert(layout, self.run.begun - 1) };
            } else if self.run.begun > self.run.clusters.completed() {
                return;
            } else if self.run.claimed == [0; 2] {
                self.error = Some(Error::plan("the neurons of an expert do not fit into memory"));
            } else {
                self.begin_batch();
            }
        }
    }

    /// Frames of each pool that an expert needs at most. Sets its `likely` units.
    ///
    /// # Safety
    /// As [`ClusterRun::units`], for all blocks of the expert.
    unsafe fn needs(&mut self, layout: NeuronLayout, place: usize) -> [u64; 2] {
        let (run, gates) = (&mut self.run, layout.stored.gates);
        let mut all = 0;
        for block in 0..run.layer.blocks() {
            let units = if gates {
                // SAFETY: the caller's promise.
                unsafe { run.units(layout, place, block) }.count()
            } else {
                BLOCK.min(run.layer.inter - block * BLOCK).div_ceil(layout.neurons_per_unit)
            };
            let at = run.at(place, block);
            run.likely[at] = units as u32;
            all += units as u64;
        }
        [all, if gates { all } else { 0 }]
    }

    /// Requests the gates of an expert, or makes those in memory ready.
    ///
    /// # Safety
    /// As [`State::needs`].
    unsafe fn begin_expert(&mut self, layout: NeuronLayout, place: usize) {
        let matrix = self.run.matrix(place);
        for block in 0..self.run.layer.blocks() {
            let at = self.run.at(place, block);
            if layout.stored.gates && self.run.likely[at] == 0 {
                // The predictor has named none.
                self.run.gates_left -= 1;
                self.run.clusters.up_is_done(place, block);
                continue;
            }
            if layout.stored.gates {
                // SAFETY: the caller's promise.
                for unit in unsafe { self.run.units(layout, place, block) } {
                    let missing = self.request_of_cluster(layout, Piece::Gate, matrix, unit);
                    self.run.missing[at] += u32::from(missing);
                }
            }
            if self.run.missing[at] == 0 {
                self.run.clusters.gate_is_ready(place, block);
            }
        }
    }

    /// Records that work was done, requests what the gates of its blocks activate, and begins experts that have
    /// room now.
    ///
    /// # Safety
    /// As [`State::begin_clusters`]; the work was computed.
    pub(super) unsafe fn cluster_computed(&mut self, layout: NeuronLayout, work: &ClusterWork) {
        self.run.clusters.done(work);
        if work.part == ClusterPart::Gate {
            for block in work.blocks.clone() {
                // SAFETY: the caller's promise.
                unsafe { self.gates_computed(layout, work.place, block) };
            }
        }
        // SAFETY: as above; gates of experts that are not begun are not being computed.
        unsafe { self.begin_experts(layout) };
    }

    /// Requests up and down of the active neurons of a block.
    ///
    /// # Safety
    /// As [`ClusterRun::units`].
    unsafe fn gates_computed(&mut self, layout: NeuronLayout, place: usize, block: usize) {
        let (matrix, at) = (self.run.matrix(place), self.run.at(place, block));
        let (mut needed, mut missing) = (0, 0);
        // SAFETY: the caller's promise.
        for unit in unsafe { self.run.units(layout, place, block) } {
            needed += 1;
            missing += u32::from(self.request_of_cluster(layout, Piece::UpDown, matrix, unit));
        }
        self.run.missing[at] = missing;
        self.run.claimed[Piece::UpDown.index()] -= u64::from(self.run.likely[at].saturating_sub(needed));
        self.run.gates_left -= 1;
        match (needed, missing) {
            (0, _) => self.run.clusters.up_is_done(place, block),
            (_, 0) => self.run.clusters.up_is_ready(place, block),
            _ => {}
        }
    }
}
