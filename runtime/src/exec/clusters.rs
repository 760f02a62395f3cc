//! Order of the clusters of neurons in a step of [`Grid::Clusters`]: which work threads may do next
//! (PowerInfer-2, §4.3, Figure 6b).
//!
//! A cluster is a block of neurons of an active expert. Its gates, its up rows and its columns of down are computed
//! one after the other, and clusters do not wait for each other, with one exception: sums over neurons are added in
//! the order of the blocks, so that results depend neither on threads nor on the disk. A free thread takes gates
//! first, since reads depend on them, then up, then down.
//!
//! [`Clusters`] only decides, and is not aware of memory: its owner reports what can be computed. [`ClusterQueue`] is
//! an owner for weights in memory; the pager of neurons is another.

use crate::exec::unit::{Launch, PoolThread};
use crate::sync::progress::Progress;
use moec_ir::plan::Grid;
use std::collections::VecDeque;
use std::ops::Range;
use std::sync::atomic::Ordering;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Most blocks of one piece of work over gates or up: so long that taking it costs little.
const MOST: usize = 4;

/// Part of a cluster.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ClusterPart {
    /// Gates.
    Gate,
    /// Up, joined with the gates.
    Up,
    /// Down, in a tile of columns.
    Down {
        /// Index of the tile.
        tile: usize,
    },
}

/// A part of neighbouring clusters of an expert, which one thread computes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ClusterWork {
    /// Position of the expert in the dispatch table.
    pub(crate) place: usize,
    /// Part that is computed.
    pub(crate) part: ClusterPart,
    /// Blocks of neurons.
    pub(crate) blocks: Range<usize>,
}

/// Clusters of the active experts of one step.
#[derive(Debug, Default)]
pub(crate) struct Clusters {
    /// Blocks of an expert, and tiles of its columns.
    blocks: usize,
    tiles: usize,
    experts: usize,
    /// Most blocks of a piece of work.
    most: usize,
    /// Gates and up that can be computed: positions and blocks.
    gates: VecDeque<(usize, usize)>,
    ups: VecDeque<(usize, usize)>,
    /// Tiles with blocks that can be added: positions and tiles.
    downs: VecDeque<(usize, usize)>,
    /// By position and block: whether up is computed.
    up_done: Vec<bool>,
    /// By position: number of the first blocks whose up is computed.
    ups_done: Vec<usize>,
    /// By position and tile: number of blocks that were added, and whether the tile is in `downs` or being computed.
    added: Vec<usize>,
    busy: Vec<bool>,
    /// By position: tiles that are not complete.
    open: Vec<usize>,
    completed: usize,
    /// Number of steps so far.
    step: u64,
}

impl Clusters {
    /// Begins a step; no work is ready yet.
    pub(crate) fn begin(&mut self, experts: usize, blocks: usize, threads: usize) {
        self.step += 1;
        (self.experts, self.blocks, self.tiles, self.completed) = (experts, blocks, 0, 0);
        self.most = (experts * blocks / (2 * threads.max(1))).clamp(1, MOST);
        [&mut self.gates, &mut self.ups, &mut self.downs].into_iter().for_each(VecDeque::clear);
        refill(&mut self.up_done, experts * blocks, false);
        refill(&mut self.ups_done, experts, 0);
    }

    /// Sets the number of tiles: before that no down is ready.
    pub(crate) fn set_tiles(&mut self, tiles: usize) {
        self.tiles = tiles;
        refill(&mut self.added, self.experts * tiles, 0);
        refill(&mut self.busy, self.experts * tiles, false);
        refill(&mut self.open, self.experts, tiles);
        (0..self.experts).for_each(|place| self.offer_downs(place));
    }

    /// Number of the step, for threads that may be late.
    pub(crate) fn step(&self) -> u64 {
        self.step
    }

    /// Number of experts that are computed completely.
    pub(crate) fn completed(&self) -> usize {
        self.completed
    }

    /// Whether all experts are computed.
    pub(crate) fn is_over(&self) -> bool {
        self.completed == self.experts
    }

    /// Reports that gates of a block can be computed.
    pub(crate) fn gate_is_ready(&mut self, place: usize, block: usize) {
        self.gates.push_back((place, block));
    }

    /// Reports that up and down of a block can be computed: its gates are known, and its active neurons are there.
    pub(crate) fn up_is_ready(&mut self, place: usize, block: usize) {
        self.ups.push_back((place, block));
    }

    /// Reports that nothing of up remains to be computed in a block.
    pub(crate) fn up_is_done(&mut self, place: usize, block: usize) {
        self.up_done[place * self.blocks + block] = true;
        let own = &self.up_done[place * self.blocks..][..self.blocks];
        let before = self.ups_done[place];
        let more = own[before..].iter().take_while(|done| **done).count();
        if more > 0 {
            self.ups_done[place] += more;
            self.offer_downs(place);
        }
    }

    /// Work for a thread; `None` if none is ready now.
    pub(crate) fn take(&mut self) -> Option<ClusterWork> {
        for (queue, part) in [(&mut self.gates, ClusterPart::Gate), (&mut self.ups, ClusterPart::Up)] {
            if let Some((place, first)) = queue.pop_front() {
                let mut end = first + 1;
                while end - first < self.most && queue.front() == Some(&(place, end)) {
                    queue.pop_front();
                    end += 1;
                }
                return Some(ClusterWork { place, part, blocks: first..end });
            }
        }
        let (place, tile) = self.downs.pop_front()?;
        let blocks = self.added[place * self.tiles + tile]..self.ups_done[place];
        Some(ClusterWork { place, part: ClusterPart::Down { tile }, blocks })
    }

    /// Records that work was done. After gates the owner reports what they activate.
    pub(crate) fn done(&mut self, work: &ClusterWork) {
        match work.part {
            ClusterPart::Gate => {}
            ClusterPart::Up => work.blocks.clone().for_each(|block| self.up_is_done(work.place, block)),
            ClusterPart::Down { tile } => {
                let at = work.place * self.tiles + tile;
                (self.added[at], self.busy[at]) = (work.blocks.end, false);
                if work.blocks.end == self.blocks {
                    self.open[work.place] -= 1;
                    self.completed += usize::from(self.open[work.place] == 0);
                } else {
                    self.offer_downs(work.place);
                }
            }
        }
    }

    /// Work items of the kernel.
    pub(crate) fn items(&self, work: &ClusterWork) -> Range<usize> {
        let part = match work.part {
            ClusterPart::Gate => 0,
            ClusterPart::Up => 1,
            ClusterPart::Down { tile } => 2 + tile,
        };
        let first = (work.place * (2 + self.tiles) + part) * self.blocks;
        first + work.blocks.start..first + work.blocks.end
    }

    /// Makes those tiles of an expert ready to which blocks can be added now.
    fn offer_downs(&mut self, place: usize) {
        for tile in 0..self.tiles {
            let at = place * self.tiles + tile;
            if !self.busy[at] && self.added[at] < self.ups_done[place] {
                self.busy[at] = true;
                self.downs.push_back((place, tile));
            }
        }
    }
}

/// Makes a vector `len` equal values.
fn refill<T: Clone>(of: &mut Vec<T>, len: usize, value: T) {
    of.clear();
    of.resize(len, value);
}

/// Clusters of a step whose weights are all in memory.
#[derive(Debug, Default)]
pub(crate) struct ClusterQueue {
    clusters: Mutex<Clusters>,
    progress: Progress,
}

impl ClusterQueue {
    /// A thread's share of a step: `call` runs a range of its items.
    ///
    /// # Safety
    /// The step has [`Grid::Clusters`], and the argument that this names is a dispatch table.
    pub(crate) unsafe fn run(&self, launch: &Launch<'_>, thread: PoolThread, call: &dyn Fn(usize, usize)) {
        let Grid::Clusters { table, blocks, columns } = launch.grid else { return };
        let Some(table) = launch.args.get(table as usize) else { return };
        let mut clusters = self.lock();
        if launch.taken.swap(1, Ordering::Relaxed) == 0 {
            // SAFETY: the caller's promise; the step that writes the table has ended.
            let active = usize::try_from(unsafe { table.of::<i32>().read() }).unwrap_or(0);
            clusters.begin(active, blocks as usize, thread.of);
            clusters.set_tiles(columns as usize);
            let all = (0..active).flat_map(|place| (0..blocks as usize).map(move |block| (place, block)));
            all.for_each(|(place, block)| clusters.gate_is_ready(place, block));
        }
        let step = clusters.step();
        while clusters.step() == step && !clusters.is_over() {
            let Some(work) = clusters.take() else {
                let seen = self.progress.now();
                drop(clusters);
                self.progress.wait(seen);
                clusters = self.lock();
                continue;
            };
            let items = clusters.items(&work);
            drop(clusters);
            call(items.start, items.end);
            clusters = self.lock();
            clusters.done(&work);
            if work.part == ClusterPart::Gate {
                work.blocks.for_each(|block| clusters.up_is_ready(work.place, block));
            }
            self.progress.advance();
        }
    }

    fn lock(&self) -> MutexGuard<'_, Clusters> {
        self.clusters.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        /// Whatever becomes ready when, each part of each cluster is computed once, after those that it needs, and
        /// blocks are added to a tile in order by one thread at a time.
        #[test]
        fn every_cluster_is_computed_once_in_an_order_that_keeps_sums(
            (experts, blocks, tiles) in (0_usize..4, 1_usize..7, 1_usize..3),
            threads in 1_usize..4,
            choices in prop::collection::vec(any::<prop::sample::Index>(), 400),
        ) {
            let mut clusters = Clusters::default();
            clusters.begin(experts, blocks, threads);
            clusters.set_tiles(tiles);
            let all = || (0..experts).flat_map(|place| (0..blocks).map(move |block| (place, block)));
            let mut unread: Vec<(bool, usize, usize)> = all().map(|(p, b)| (false, p, b)).collect();
            let mut running: Vec<ClusterWork> = Vec::new();
            let (mut gates, mut ups) = (vec![0; experts * blocks], vec![0; experts * blocks]);
            let mut downs = vec![0; experts * tiles];
            for choice in choices {
                if clusters.is_over() {
                    break;
                }
                // A read ends, a thread takes work, or a thread has done its work.
                match choice.index(3) {
                    0 if !unread.is_empty() => {
                        let (up, place, block) = unread.swap_remove(choice.index(unread.len()));
                        if up { clusters.up_is_ready(place, block) } else { clusters.gate_is_ready(place, block) }
                    }
                    1 if running.len() < threads => running.extend(clusters.take()),
                    _ if !running.is_empty() => {
                        let work = running.swap_remove(choice.index(running.len()));
                        for block in work.blocks.clone() {
                            let at = work.place * blocks + block;
                            match work.part {
                                ClusterPart::Gate => {
                                    gates[at] += 1;
                                    unread.push((true, work.place, block));
                                }
                                ClusterPart::Up => {
                                    prop_assert_eq!(gates[at], 1);
                                    ups[at] += 1;
                                }
                                ClusterPart::Down { tile } => {
                                    prop_assert_eq!((ups[at], downs[work.place * tiles + tile]), (1, block));
                                    downs[work.place * tiles + tile] += 1;
                                }
                            }
                        }
                        clusters.done(&work);
                    }
                    _ => {}
                }
            }
            // The rest in any order.
            while !clusters.is_over() {
                for (up, place, block) in unread.drain(..) {
                    if up { clusters.up_is_ready(place, block) } else { clusters.gate_is_ready(place, block) }
                }
                let work = running.pop().or_else(|| clusters.take());
                let work = work.expect("work is ready until the step is over");
                for block in work.blocks.clone() {
                    let at = work.place * blocks + block;
                    match work.part {
                        ClusterPart::Gate => {
                            gates[at] += 1;
                            unread.push((true, work.place, block));
                        }
                        ClusterPart::Up => ups[at] += 1,
                        ClusterPart::Down { tile } => {
                            prop_assert_eq!(downs[work.place * tiles + tile], block);
                            downs[work.place * tiles + tile] += 1;
                        }
                    }
                }
                clusters.done(&work);
            }
            prop_assert!(gates.iter().chain(&ups).all(|&n| n == 1), "{:?} {:?}", gates, ups);
            prop_assert!(downs.iter().all(|&n| n == blocks) && clusters.completed() == experts);
        }
    }
}
