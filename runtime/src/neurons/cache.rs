//! Memory for neurons in three regions: fixed, hot by clusters, cold by neurons (PowerInfer-2, §4.2).
//!
//! The fixed region is for what always stays (attention, KV cache). In the hot region lie clusters, runs of neighbouring
//! neurons of a matrix (neurons are sorted hot to cold), and what was used longest ago goes. In the cold region neurons
//! come and go one by one, by the same rule. A neuron lies in one of them: when its cluster becomes hot it moves there and is
//! not read again. What goes is forgotten; nothing is written back.
//!
//! A neuron costs a look at three arrays and, where it is used, a move in a linked list, however many there are.

use super::error::NeuronError;
use crate::cache::list::List;

/// The neurons of a model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shape {
    /// Matrices: the experts of all layers, counted through, or the layers of a dense model.
    pub matrices: u32,
    /// Neurons of a matrix, hot to cold.
    pub neurons: u32,
    /// Neurons of a cluster; the last one of a matrix may have fewer.
    pub cluster: u32,
    /// Bytes of a neuron's first part ([`super::Bundle::gate`]).
    pub gate: u64,
    /// Bytes of its second part ([`super::Bundle::rest`]); 0 where a neuron is one read.
    pub rest: u64,
}

/// Most neurons; DeepSeek-V3 has 30 million.
const MOST: u64 = 1 << 28;

impl Shape {
    /// Clusters of a matrix.
    pub fn clusters(&self) -> u32 {
        self.neurons.div_ceil(self.cluster)
    }

    /// Bytes of a neuron.
    pub fn neuron_bytes(&self) -> u64 {
        self.gate + self.rest
    }

    /// Matrix and neuron of a number in an [`Event`].
    pub fn neuron(&self, id: u32) -> (u32, u32) {
        (id / self.neurons, id % self.neurons)
    }

    /// Matrix and cluster of a number in an [`Event`].
    pub fn cluster(&self, id: u32) -> (u32, u32) {
        (id / self.clusters(), id % self.clusters())
    }

    fn check(&self) -> Result<(), NeuronError> {
        let wrong = |what: &str| Err(NeuronError::Shape(what.to_owned()));
        if self.matrices == 0 || self.neurons == 0 || self.cluster == 0 || self.gate == 0 {
            return wrong("matrices, neurons, clusters and the first part of a neuron are 1 at least");
        }
        let count = u64::from(self.matrices) * u64::from(self.neurons);
        if count > MOST {
            return wrong("there are more than 2^28 neurons");
        }
        let bytes = self.gate.checked_add(self.rest).and_then(|b| b.checked_mul(count));
        if bytes.is_none_or(|b| b > 1 << 62) {
            return wrong("their bytes pass 2^62");
        }
        Ok(())
    }
}

/// What each region may hold, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Regions {
    /// For what always stays.
    pub fixed: u64,
    /// For clusters.
    pub hot: u64,
    /// For neurons.
    pub cold: u64,
}

impl Regions {
    /// Regions of `capacity` bytes: what is neither fixed nor hot is cold.
    ///
    /// # Errors
    /// [`NeuronError::Regions`] where fixed and hot need more.
    pub fn of(capacity: u64, fixed: u64, hot: u64) -> Result<Self, NeuronError> {
        let wanted = fixed.saturating_add(hot);
        match capacity.checked_sub(wanted) {
            Some(cold) => Ok(Self { fixed, hot, cold }),
            None => Err(NeuronError::Regions { wanted, capacity }),
        }
    }

    /// Bytes of all.
    pub fn capacity(&self) -> u64 {
        self.fixed + self.hot + self.cold
    }
}

/// What is asked of a neuron.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Part {
    /// What says whether it is active.
    Gate,
    /// What an active one needs beside it.
    Rest,
    /// Both.
    Whole,
}

const GATE: u8 = 1;
const REST: u8 = 2;

impl Part {
    fn mask(self) -> u8 {
        match self {
            Self::Gate => GATE,
            Self::Rest => REST,
            Self::Whole => GATE | REST,
        }
    }
}

/// Where what was asked for is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Found {
    /// In the hot region.
    Hot,
    /// In the cold region.
    Cold,
    /// So many bytes are read, and stay.
    Load(u64),
    /// So many bytes are read for this step only: there is no room that nothing of this step holds.
    Stream(u64),
}

impl Found {
    /// Bytes that are read.
    pub fn read(self) -> u64 {
        match self {
            Self::Hot | Self::Cold => 0,
            Self::Load(bytes) | Self::Stream(bytes) => bytes,
        }
    }
}

/// What happens to others when something is asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Event {
    /// A neuron leaves the cold region and is forgotten.
    Evict(u32),
    /// A cluster leaves the hot region and is forgotten.
    Drop(u32),
    /// A neuron goes over to the hot region with what is held of it; its cluster is being loaded.
    Promote(u32),
}

/// What was asked of one granularity.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Questions.
    pub asked: u64,
    /// Answered by the hot region.
    pub hot: u64,
    /// Answered by the cold region.
    pub cold: u64,
    /// Read and kept.
    pub loads: u64,
    /// Read for one step.
    pub streams: u64,
    /// Bytes read.
    pub read: u64,
    /// Went to make room, or since the region shrank.
    pub gone: u64,
}

impl Counts {
    fn count(&mut self, found: Found) -> Found {
        self.asked += 1;
        self.read += found.read();
        match found {
            Found::Hot => self.hot += 1,
            Found::Cold => self.cold += 1,
            Found::Load(_) => self.loads += 1,
            Found::Stream(_) => self.streams += 1,
        }
        found
    }

    /// Share of the questions that needed a read; 0 of none.
    pub fn miss_rate(&self) -> f64 {
        if self.asked == 0 { 0.0 } else { (self.loads + self.streams) as f64 / self.asked as f64 }
    }
}

/// The cache.
#[derive(Clone, Debug)]
pub struct Segmented {
    shape: Shape,
    regions: Regions,
    hot: List,
    cold: List,
    hot_used: u64,
    cold_used: u64,
    /// What the cold region holds of every neuron.
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
    /// [`NeuronError::Shape`] for neurons that cannot be numbered, [`NeuronError::Regions`] for regions past 64 bits.
    pub fn new(shape: Shape, regions: Regions) -> Result<Self, NeuronError> {
        shape.check()?;
        let capacity = regions.fixed.checked_add(regions.hot).and_then(|b| b.checked_add(regions.cold));
        if capacity.is_none() {
            return Err(NeuronError::Regions { wanted: u64::MAX, capacity: u64::MAX });
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
            held: vec![0; count],
            stamps: vec![0; count],
            cluster_stamps: vec![0; clusters],
            now: 1,
            neurons: Counts::default(),
            clusters: Counts::default(),
        })
    }

    /// What there is to cache.
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

    /// What was asked about neurons.
    pub fn neurons(&self) -> Counts {
        self.neurons
    }

    /// What was asked about clusters.
    pub fn clusters(&self) -> Counts {
        self.clusters
    }

    /// Forgets the counts, and nothing else.
    pub fn reset_counts(&mut self) {
        (self.neurons, self.clusters) = (Counts::default(), Counts::default());
    }

    /// A step begins: what the last one used may go.
    pub fn begin(&mut self) {
        self.now = self.now.checked_add(1).unwrap_or_else(|| {
            self.stamps.fill(0);
            self.cluster_stamps.fill(0);
            1
        });
    }

    /// A cluster is used densely.
    ///
    /// # Errors
    /// [`NeuronError::Missing`], before anything has happened.
    pub fn cluster(
        &mut self,
        matrix: u32,
        cluster: u32,
        on: impl FnMut(Event),
    ) -> Result<Found, NeuronError> {
        if matrix >= self.shape.matrices || cluster >= self.shape.clusters() {
            return Err(NeuronError::Missing { matrix, what: "cluster", index: cluster });
        }
        let found = self.take_cluster(matrix * self.shape.clusters() + cluster, on);
        Ok(self.clusters.count(found))
    }

    /// A part of a neuron is used.
    ///
    /// # Errors
    /// [`NeuronError::Missing`], before anything has happened.
    pub fn neuron(
        &mut self,
        matrix: u32,
        neuron: u32,
        part: Part,
        on: impl FnMut(Event),
    ) -> Result<Found, NeuronError> {
        if matrix >= self.shape.matrices || neuron >= self.shape.neurons {
            return Err(NeuronError::Missing { matrix, what: "neuron", index: neuron });
        }
        let found = self.take_neuron(matrix, neuron, part.mask(), on);
        Ok(self.neurons.count(found))
    }

    /// Whether a part of a neuron is held. `false` for one that does not exist.
    pub fn holds(&self, matrix: u32, neuron: u32, part: Part) -> bool {
        if matrix >= self.shape.matrices || neuron >= self.shape.neurons {
            return false;
        }
        let cluster = matrix * self.shape.clusters() + neuron / self.shape.cluster;
        let held = self.held[(matrix * self.shape.neurons + neuron) as usize];
        self.hot.contains(cluster) || self.missing(held, part.mask()) == 0
    }

    /// Moves the border between hot and cold, between two steps: a batch of another size wants another share of hot neurons
    /// (§4.1.3). Of the region that shrinks goes what was used longest ago.
    ///
    /// # Errors
    /// [`NeuronError::Regions`] where the hot region and the fixed one are more than there is; nothing has happened then.
    pub fn resize(&mut self, hot: u64, mut on: impl FnMut(Event)) -> Result<(), NeuronError> {
        self.regions = Regions::of(self.regions.capacity(), self.regions.fixed, hot)?;
        self.begin();
        self.hot_room(0, &mut on);
        self.cold_room(0, &mut on);
        Ok(())
    }

    /// Forgets what it holds, not what it counted.
    pub fn clear(&mut self) {
        self.hot.clear();
        self.cold.clear();
        (self.hot_used, self.cold_used) = (0, 0);
        self.held.fill(0);
    }

    fn take_neuron(&mut self, matrix: u32, neuron: u32, part: u8, mut on: impl FnMut(Event)) -> Found {
        let cluster = matrix * self.shape.clusters() + neuron / self.shape.cluster;
        if self.hot.contains(cluster) {
            self.hot.push_front(cluster);
            self.cluster_stamps[cluster as usize] = self.now;
            return Found::Hot;
        }
        let id = matrix * self.shape.neurons + neuron;
        let held = self.held[id as usize];
        self.stamps[id as usize] = self.now;
        if held != 0 {
            self.cold.push_front(id);
        }
        let bytes = self.missing(held, part);
        if bytes == 0 {
            return Found::Cold;
        }
        if !self.cold_room(bytes, &mut on) {
            return Found::Stream(bytes);
        }
        self.held[id as usize] = held | part;
        self.cold_used += bytes;
        self.cold.push_front(id);
        Found::Load(bytes)
    }

    fn take_cluster(&mut self, id: u32, mut on: impl FnMut(Event)) -> Found {
        self.cluster_stamps[id as usize] = self.now;
        if self.hot.contains(id) {
            self.hot.push_front(id);
            return Found::Hot;
        }
        let members = self.members(id);
        let whole = self.shape.neuron_bytes() * u64::from(members.end - members.start);
        let held: u64 = members.clone().map(|n| self.held_bytes(n)).sum();
        if !self.hot_room(whole, &mut on) {
            return Found::Stream(whole - held);
        }
        for neuron in members {
            if self.forget(neuron) {
                on(Event::Promote(neuron));
            }
        }
        self.hot_used += whole;
        self.hot.push_front(id);
        Found::Load(whole - held)
    }

    /// Makes room in the hot region; `false` where what is left is of this step.
    fn hot_room(&mut self, bytes: u64, on: &mut impl FnMut(Event)) -> bool {
        if bytes > self.regions.hot {
            return false;
        }
        while self.hot_used + bytes > self.regions.hot {
            let Some(id) = self.hot.back().filter(|&id| self.cluster_stamps[id as usize] != self.now) else {
                return false;
            };
            let members = self.members(id);
            self.hot.remove(id);
            self.hot_used -= self.shape.neuron_bytes() * u64::from(members.end - members.start);
            self.clusters.gone += 1;
            on(Event::Drop(id));
        }
        true
    }

    /// Makes room in the cold region; `false` where what is left is of this step.
    fn cold_room(&mut self, bytes: u64, on: &mut impl FnMut(Event)) -> bool {
        if bytes > self.regions.cold {
            return false;
        }
        while self.cold_used + bytes > self.regions.cold {
            let Some(id) = self.cold.back().filter(|&id| self.stamps[id as usize] != self.now) else {
                return false;
            };
            self.forget(id);
            self.neurons.gone += 1;
            on(Event::Evict(id));
        }
        true
    }

    /// Takes a neuron out of the cold region; whether it was there.
    fn forget(&mut self, id: u32) -> bool {
        self.cold_used -= self.held_bytes(id);
        self.cold.remove(id);
        std::mem::take(&mut self.held[id as usize]) != 0
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

    /// Bytes of the parts that are wanted and not held.
    fn missing(&self, held: u8, wanted: u8) -> u64 {
        let part = |bit: u8, bytes: u64| if wanted & !held & bit == 0 { 0 } else { bytes };
        part(GATE, self.shape.gate) + part(REST, self.shape.rest)
    }
}

#[cfg(test)]
mod tests;
