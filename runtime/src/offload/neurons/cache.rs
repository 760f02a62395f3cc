//! Memory for neurons in three regions: fixed, hot by clusters, cold by neurons (PowerInfer-2, §4.2).
//!
//! The fixed region holds what always stays (attention, KV cache). The hot region holds clusters, runs of
//! neighbouring neurons of a matrix (neurons are sorted hot to cold), and evicts the one used longest ago.
//! The cold region holds single neurons, with the same eviction. A neuron is in at most one of them: when its
//! cluster becomes hot, it moves there and is not read again. Evicted neurons are forgotten; nothing is
//! written back.
//!
//! What a step has used stays until the next one begins, also the neurons of a streamed cluster that are in
//! the cold region. Nothing is evicted for an entry that would not fit even then.
//!
//! A request for a neuron takes constant time: three array reads and, if it is used, a move in a linked list.
//! A cluster takes as much for each of its neurons.

mod events;
mod shape;

pub use events::{CacheLookup, Counts, Event, Part};
pub use shape::{Regions, Shape};

use super::error::NeuronError;
use crate::offload::cache::list::List;
use events::{GATE, UP_DOWN};

/// The cache.
#[derive(Clone, Debug)]
pub struct Segmented {
    shape: Shape,
    regions: Regions,
    hot: List,
    cold: List,
    hot_used: u64,
    cold_used: u64,
    /// Bytes of these that this step has used: they are not evicted before the next one.
    hot_pinned: u64,
    cold_pinned: u64,
    /// Parts of every neuron that are in the cold region.
    held: Vec<u8>,
    /// The step that last used each neuron and cluster.
    stamps: Vec<u32>,
    cluster_stamps: Vec<u32>,
    now: u32,
    neurons: Counts,
    clusters: Counts,
}

impl Segmented {
    /// An empty cache.
    ///
    /// # Errors
    /// [`NeuronError::Shape`] for neurons that cannot be numbered, [`NeuronError::Regions`] for regions past
    /// 64 bits.
    pub fn new(shape: Shape, regions: Regions) -> Result<Self, NeuronError> {
        shape.check()?;
        let capacity = regions.fixed.checked_add(regions.hot).and_then(|b| b.checked_add(regions.cold));
        if capacity.is_none() {
            return Err(NeuronError::Regions { requested: u64::MAX, capacity: u64::MAX });
        }
        let count = shape.matrices as usize * shape.neurons as usize;
        let clusters = shape.matrices as usize * shape.clusters() as usize;
        Ok(Self {
            shape,
            regions,
            hot: List::new(clusters),
            cold: List::new(count),
            hot_used: 0,
            cold_used: 0,
            hot_pinned: 0,
            cold_pinned: 0,
            held: vec![0; count],
            stamps: vec![0; count],
            cluster_stamps: vec![0; clusters],
            now: 1,
            neurons: Counts::default(),
            clusters: Counts::default(),
        })
    }

    /// Cacheable neurons.
    pub fn shape(&self) -> Shape {
        self.shape
    }

    /// The regions as they are now.
    pub fn regions(&self) -> Regions {
        self.regions
    }

    /// Bytes that the hot and the cold region hold.
    pub fn used(&self) -> (u64, u64) {
        (self.hot_used, self.cold_used)
    }

    /// Counts of neuron requests.
    pub fn neurons(&self) -> Counts {
        self.neurons
    }

    /// Counts of cluster requests.
    pub fn clusters(&self) -> Counts {
        self.clusters
    }

    /// Resets the counts, and nothing else.
    pub fn reset_counts(&mut self) {
        (self.neurons, self.clusters) = (Counts::default(), Counts::default());
    }

    /// Begins a step: what the last one used may be evicted.
    pub fn begin(&mut self) {
        (self.hot_pinned, self.cold_pinned) = (0, 0);
        self.now = self.now.checked_add(1).unwrap_or_else(|| {
            self.stamps.fill(0);
            self.cluster_stamps.fill(0);
            1
        });
    }

    /// Requests a cluster, which is used densely.
    ///
    /// # Errors
    /// [`NeuronError::Missing`], before any change.
    pub fn cluster(
        &mut self,
        matrix: u32,
        cluster: u32,
        on: impl FnMut(Event),
    ) -> Result<CacheLookup, NeuronError> {
        if matrix >= self.shape.matrices || cluster >= self.shape.clusters() {
            return Err(NeuronError::Missing { matrix, what: "cluster", index: cluster });
        }
        let found = self.take_cluster(matrix * self.shape.clusters() + cluster, on);
        Ok(self.clusters.count(found))
    }

    /// Requests a part of a neuron.
    ///
    /// # Errors
    /// [`NeuronError::Missing`], before any change.
    pub fn neuron(
        &mut self,
        matrix: u32,
        neuron: u32,
        part: Part,
        on: impl FnMut(Event),
    ) -> Result<CacheLookup, NeuronError> {
        if matrix >= self.shape.matrices || neuron >= self.shape.neurons {
            return Err(NeuronError::Missing { matrix, what: "neuron", index: neuron });
        }
        let found = self.take_neuron(matrix, neuron, part.mask(), on);
        Ok(self.neurons.count(found))
    }

    /// Whether a part of a neuron is in memory. `false` for one that does not exist.
    pub fn holds(&self, matrix: u32, neuron: u32, part: Part) -> bool {
        if matrix >= self.shape.matrices || neuron >= self.shape.neurons {
            return false;
        }
        let cluster = matrix * self.shape.clusters() + neuron / self.shape.cluster;
        let held = self.held[(matrix * self.shape.neurons + neuron) as usize];
        self.hot.contains(cluster) || self.missing(held, part.mask()) == 0
    }

    /// Moves the border between hot and cold, between two steps: a batch of another size has another share of
    /// hot neurons (§4.1.3). The region that shrinks evicts what was used longest ago.
    ///
    /// # Errors
    /// [`NeuronError::Regions`] if the hot and the fixed region exceed the memory; nothing changes then.
    pub fn resize(&mut self, hot: u64, mut on: impl FnMut(Event)) -> Result<(), NeuronError> {
        self.regions = Regions::of(self.regions.capacity(), self.regions.fixed, hot)?;
        self.begin();
        self.hot_room(0, &mut on);
        self.cold_room(0, &mut on);
        Ok(())
    }

    /// Forgets its contents, not its counts.
    pub fn clear(&mut self) {
        self.hot.clear();
        self.cold.clear();
        (self.hot_used, self.cold_used) = (0, 0);
        (self.hot_pinned, self.cold_pinned) = (0, 0);
        self.held.fill(0);
    }

    fn take_neuron(&mut self, matrix: u32, neuron: u32, part: u8, mut on: impl FnMut(Event)) -> CacheLookup {
        let cluster = matrix * self.shape.clusters() + neuron / self.shape.cluster;
        if self.hot.contains(cluster) {
            self.use_cluster(cluster);
            return CacheLookup::Hot;
        }
        let id = matrix * self.shape.neurons + neuron;
        let held = self.held[id as usize];
        self.use_neuron(id);
        let bytes = self.missing(held, part);
        if bytes == 0 {
            return CacheLookup::Cold;
        }
        if !self.cold_room(bytes, &mut on) {
            return CacheLookup::Stream(bytes);
        }
        self.held[id as usize] = held | part;
        self.cold_used += bytes;
        self.cold_pinned += bytes;
        self.cold.push_front(id);
        CacheLookup::Load(bytes)
    }

    fn take_cluster(&mut self, id: u32, mut on: impl FnMut(Event)) -> CacheLookup {
        if self.hot.contains(id) {
            self.use_cluster(id);
            return CacheLookup::Hot;
        }
        let members = self.members(id);
        let whole = self.cluster_bytes(id);
        let held: u64 = members.clone().map(|n| self.held_bytes(n)).sum();
        if !self.hot_room(whole, &mut on) {
            // Neurons that are not read stay as long as the step.
            members.for_each(|n| self.use_neuron(n));
            return CacheLookup::Stream(whole - held);
        }
        for neuron in members {
            if self.forget(neuron) {
                on(Event::Promote(neuron));
            }
        }
        self.hot_used += whole;
        self.hot_pinned += whole;
        self.cluster_stamps[id as usize] = self.now;
        self.hot.push_front(id);
        CacheLookup::Load(whole - held)
    }

    /// Marks a neuron as used in this step; the cold region may hold nothing or some of it.
    fn use_neuron(&mut self, id: u32) {
        if std::mem::replace(&mut self.stamps[id as usize], self.now) != self.now {
            self.cold_pinned += self.held_bytes(id);
        }
        if self.held[id as usize] != 0 {
            self.cold.push_front(id);
        }
    }

    /// Marks a cluster of the hot region as used in this step.
    fn use_cluster(&mut self, id: u32) {
        if std::mem::replace(&mut self.cluster_stamps[id as usize], self.now) != self.now {
            self.hot_pinned += self.cluster_bytes(id);
        }
        self.hot.push_front(id);
    }

    /// Makes room in the hot region; returns `false`, without an eviction, if what this step has used leaves
    /// too little.
    fn hot_room(&mut self, bytes: u64, on: &mut impl FnMut(Event)) -> bool {
        if bytes > self.regions.hot.saturating_sub(self.hot_pinned) {
            return false;
        }
        while self.hot_used + bytes > self.regions.hot {
            // Clusters that this step has used precede all others.
            let Some(id) = self.hot.back() else { return false };
            self.hot.remove(id);
            self.hot_used -= self.cluster_bytes(id);
            self.clusters.evicted += 1;
            on(Event::Drop(id));
        }
        true
    }

    /// Makes room in the cold region; returns `false`, without an eviction, if what this step has used leaves
    /// too little.
    fn cold_room(&mut self, bytes: u64, on: &mut impl FnMut(Event)) -> bool {
        if bytes > self.regions.cold.saturating_sub(self.cold_pinned) {
            return false;
        }
        while self.cold_used + bytes > self.regions.cold {
            // As in the hot region.
            let Some(id) = self.cold.back() else { return false };
            self.forget(id);
            self.neurons.evicted += 1;
            on(Event::Evict(id));
        }
        true
    }

    /// Removes a neuron from the cold region; returns whether it was there.
    fn forget(&mut self, id: u32) -> bool {
        let bytes = self.held_bytes(id);
        self.cold_used -= bytes;
        if self.stamps[id as usize] == self.now {
            self.cold_pinned -= bytes;
        }
        self.cold.remove(id);
        std::mem::take(&mut self.held[id as usize]) != 0
    }

    fn cluster_bytes(&self, cluster: u32) -> u64 {
        let members = self.members(cluster);
        self.shape.neuron_bytes() * u64::from(members.end - members.start)
    }

    fn members(&self, cluster: u32) -> std::ops::Range<u32> {
        let (matrix, at) = self.shape.cluster(cluster);
        let first = at * self.shape.cluster;
        let end = self.shape.neurons.min(first.saturating_add(self.shape.cluster));
        let of = matrix * self.shape.neurons;
        of + first..of + end
    }

    fn held_bytes(&self, id: u32) -> u64 {
        self.missing(0, self.held[id as usize])
    }

    /// Bytes of the requested parts that are not in memory.
    fn missing(&self, held: u8, requested: u8) -> u64 {
        let part = |bit: u8, bytes: u64| if requested & !held & bit == 0 { 0 } else { bytes };
        part(GATE, self.shape.gate) + part(UP_DOWN, self.shape.up_down)
    }
}

#[cfg(test)]
mod tests;
