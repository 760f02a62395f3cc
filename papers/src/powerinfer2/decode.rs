//! Decoding in virtual time, token by token: the neurons that each token requests, those that memory holds,
//! and the unit that computes them.

use super::activity::{Activity, Routed};
use super::block::{Block, Group, Times};
use super::dense::{BLOCK, CLUSTER, Dense, LONG, PAGED, bundle, hot_neurons};
use super::models::{CHANNEL, GROUPED, Model, PREDICTOR};
use super::phone::{Cluster, Phone};
use super::systems::{Reads, System};
use moec_runtime::offload::neurons::{CacheLookup, Part, Regions, Segmented, Shape};
use moec_sim::neurons::{NeuronError, Stage};

/// Size of a simulation. Layers are equal, so that some represent all.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Size {
    /// Layers.
    pub layers: usize,
    /// Tokens that come before those that count.
    pub warmup: usize,
    /// Tokens that count.
    pub tokens: usize,
}

impl Size {
    /// Size that the page is written from.
    pub const FULL: Self = Self { layers: 2, warmup: 150, tokens: 1024 };
    /// For a test.
    pub const QUICK: Self = Self { layers: 1, warmup: 40, tokens: 30 };
}

/// A run with weights on UFS, one sequence.
#[derive(Clone, Copy, Debug)]
pub struct Case<'a> {
    /// The phone.
    pub phone: &'a Phone,
    /// The model.
    pub model: &'a Model,
    /// The system.
    pub system: System,
    /// Part of the feed-forward weights that memory holds.
    pub held: f64,
    /// Share of hot neurons, if the NPU is used.
    pub hot: f64,
    /// Its size.
    pub size: Size,
    /// Seed of random numbers.
    pub seed: u64,
}

/// Result.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Outcome {
    /// Seconds of each token.
    pub tokens: Vec<f64>,
    /// Part of the neurons that each token requested which had to be read.
    pub misses: Vec<f64>,
    /// All tokens together.
    pub times: Times,
    /// Bytes of UFS for a token.
    pub bytes: f64,
}

impl Outcome {
    /// Tokens per second.
    pub fn speed(&self) -> f64 {
        1.0 / mean(&self.tokens)
    }

    /// Part of the time in which no unit computes, and UFS is read.
    pub fn io_share(&self) -> f64 {
        self.times.exposed / self.times.all
    }
}

/// The mean; 0 of none.
pub fn mean(of: &[f64]) -> f64 {
    of.iter().sum::<f64>() / of.len().max(1) as f64
}

/// The smallest number that so many are not above.
pub fn percentile(of: &[f64], part: f64) -> f64 {
    let mut sorted = of.to_vec();
    sorted.sort_by(f64::total_cmp);
    let at = (part * sorted.len() as f64).ceil() as usize;
    sorted.get(at.clamp(1, sorted.len().max(1)) - 1).copied().unwrap_or_default()
}

/// Reads of a system, in bytes and seconds.
#[derive(Clone, Copy, Debug)]
struct Costs {
    shape: Shape,
    /// Neurons that come together.
    of: u32,
    gate: f64,
    rest: f64,
}

impl Case<'_> {
    /// Simulates it.
    ///
    /// # Errors
    /// Our bug: a shape that cannot be.
    pub fn run(&self) -> Result<Outcome, NeuronError> {
        let mut activity = Activity::new(self.model, self.size.layers, self.seed);
        let costs = self.costs()?;
        let mut cache = self.cache(&costs)?;
        let workers = self.phone.workers(self.system.reader);
        let dense = Dense {
            phone: self.phone,
            model: self.model,
            memory: self.phone.memory.scaled(1.0 / PAGED),
            units: self.system.dense_units(),
            batch: 1.0,
            part: workers.iter().sum(),
        };
        let scale = self.model.layers as f64 / self.size.layers as f64;
        let mut out = Outcome::default();
        for token in 0..self.size.warmup + self.size.tokens {
            let (mut times, mut requested, mut missed, mut bytes) = (Times::default(), 0, 0, 0.0);
            for (layer, routed) in activity.token().iter().enumerate() {
                cache.begin();
                let attention = dense.attention();
                times += attention;
                let mut block = Block { npu: self.npu_bytes(), groups: Vec::new(), density: 1.0 };
                let mut hot = 0.0;
                for of in routed {
                    let matrix = (layer * self.model.experts) as u32 + of.expert;
                    hot += self.hot_clusters(matrix, &mut cache)?;
                    let read = self.groups(matrix, of, &costs, &mut cache, &mut block.groups)?;
                    requested += read.requested;
                    missed += read.missed;
                    bytes += read.bytes;
                }
                bytes += hot;
                // Hot neurons that are missing come while attention is computed (§4.4).
                let seconds = self.phone.ufs.sequential_seconds(hot, LONG);
                let late = (seconds - attention.all).max(0.0);
                times += Times { all: late, exposed: late, reading: seconds, ..Times::default() };
                times += block.run(&dense.memory, &workers, self.system.order)?;
            }
            let mut all = times.times(scale);
            all += dense.head();
            if token >= self.size.warmup {
                out.tokens.push(all.all);
                out.misses.push(f64::from(missed) / f64::from(requested).max(1.0));
                out.times += all;
                out.bytes += bytes * scale / self.size.tokens as f64;
            }
        }
        Ok(out)
    }

    fn hot(&self) -> usize {
        if self.system.npu { hot_neurons(self.model, self.hot) } else { 0 }
    }

    fn npu_bytes(&self) -> f64 {
        (self.hot() * self.model.k) as f64 * self.model.neuron() * CHANNEL
    }

    fn costs(&self) -> Result<Costs, NeuronError> {
        let (model, ufs) = (self.model, &self.phone.ufs);
        let (core, contended) = match self.system.reader {
            Some(core) => (core, 1.0),
            None => (Cluster::Mid, ufs.contended),
        };
        // Reads of a layer are scattered over the experts of a token.
        let bundle = bundle(model, &ufs.random)?;
        let range = (model.k * model.inner) as f64 * bundle.stride() as f64;
        let seconds = |bytes: u64, range: f64| ufs.random_seconds(bytes, range, core) / contended;
        let matrices = (self.size.layers * model.experts) as u32;
        let shape = |gate: u64, rest: u64| Shape {
            matrices,
            neurons: model.inner as u32,
            cluster: CLUSTER as u32,
            gate,
            up_down: rest,
        };
        Ok(match self.system.reads {
            Reads::Bundle => {
                let (gate, rest) = (bundle.gate().bytes, bundle.up_down().bytes);
                let [g, r] = [gate, rest].map(|b| if b == 0 { 0.0 } else { seconds(b, range) });
                Costs { shape: shape(gate, rest), of: 1, gate: g, rest: r }
            }
            Reads::Together(of) => {
                let all = (u64::from(of) * bundle.bytes()).next_multiple_of(BLOCK);
                Costs { shape: shape(all / u64::from(of), 0), of, gate: seconds(all, range), rest: 0.0 }
            }
            Reads::Rows => {
                // Rows are one after the other in their matrices: a read takes every block that its row
                // touches.
                let row = bundle.bytes() / 3;
                let step = greatest_common_divisor(row, BLOCK);
                let blocks = 1.0 + (row - step) as f64 / BLOCK as f64;
                let bytes = (blocks * BLOCK as f64) as u64;
                let everywhere = model.feed_forward() * CHANNEL;
                let row = seconds(bytes, everywhere);
                Costs { shape: shape(bytes, 2 * bytes), of: 1, gate: row, rest: 2.0 * row }
            }
        })
    }

    fn cache(&self, costs: &Costs) -> Result<Segmented, NeuronError> {
        let shape = costs.shape;
        let all = u64::from(shape.matrices) * u64::from(shape.neurons) * (shape.gate + shape.up_down);
        let capacity = if self.system.cached { (all as f64 * self.held) as u64 } else { 0 };
        let hot_bytes = all as f64 * self.hot() as f64 / self.model.inner as f64;
        let regions = Regions::of(capacity, 0, (hot_bytes.ceil() as u64).min(capacity))?;
        Ok(Segmented::new(shape, regions)?)
    }

    /// Uses the hot clusters of a matrix; bytes that have to be read.
    fn hot_clusters(&self, matrix: u32, cache: &mut Segmented) -> Result<f64, NeuronError> {
        let mut bytes = 0;
        for cluster in 0..self.hot() / CLUSTER {
            bytes += cache.cluster(matrix, cluster as u32, |_| {})?.read();
        }
        Ok(bytes as f64)
    }

    /// Two groups for each cluster of cold neurons: those in memory, and those that are read.
    fn groups(
        &self,
        matrix: u32,
        routed: &Routed,
        costs: &Costs,
        cache: &mut Segmented,
        groups: &mut Vec<Group>,
    ) -> Result<RequestCounters, NeuronError> {
        let row = self.model.hidden as f64 * GROUPED;
        let first = self.hot();
        let from = routed.neurons.partition_point(|n| (n.0 as usize) < first);
        // Hot neurons are in memory, and count as requested.
        let mut out = RequestCounters { requested: from as u32, ..RequestCounters::default() };
        let cold = &routed.neurons[from..];
        let found = request_cold(matrix, cold, cache)?;
        let mut left = cold.iter().zip(&found).peekable();
        let mut came_with = None;
        for start in (first..self.model.inner).step_by(CLUSTER) {
            let end = (start + CLUSTER).min(self.model.inner);
            let mut of = [Group::default(); 2];
            while let Some((&(neuron, active), &[gate, rest])) = left.next_if(|n| (n.0.0 as usize) < end) {
                let missing = gate.read() + rest.read() > 0;
                // A bundle that was read for another of its neurons is not read again.
                let bundle = neuron / costs.of;
                let came = missing && came_with.replace(bundle) == Some(bundle);
                let seconds =
                    |found: CacheLookup, seconds: f64| if found.read() > 0 && !came { seconds } else { 0.0 };
                out.requested += 1;
                out.missed += u32::from(missing);
                out.bytes +=
                    if came { 0.0 } else { (gate.read() * u64::from(costs.of) + rest.read()) as f64 };
                let stages = &mut of[usize::from(missing)].stages;
                stages[Stage::ReadGate as usize] += seconds(gate, costs.gate);
                stages[Stage::Gate as usize] += row;
                stages[Stage::ReadUpDown as usize] += seconds(rest, costs.rest);
                stages[Stage::UpDown as usize] += if active { 2.0 * row } else { 0.0 };
            }
            // Prediction is for all neurons of the cluster; each group gets its share of the cost.
            let gates = of.map(|g| g.stages[Stage::Gate as usize]);
            for (group, gate) in of.iter_mut().zip(gates).filter(|g| g.1 > 0.0) {
                let share = gate / (gates[0] + gates[1]);
                group.stages[Stage::Predict as usize] = (end - start) as f64 * PREDICTOR * share;
                groups.push(*group);
            }
        }
        Ok(out)
    }
}

/// Requests the cold neurons of a matrix: first those that are in memory, so that none of them makes room for
/// another.
fn request_cold(
    matrix: u32,
    cold: &[(u32, bool)],
    cache: &mut Segmented,
) -> Result<Vec<[CacheLookup; 2]>, NeuronError> {
    let two = cache.shape().up_down > 0;
    let part = |active: bool| if active && two { Part::Whole } else { Part::Gate };
    let there: Vec<bool> = cold.iter().map(|&(n, active)| cache.holds(matrix, n, part(active))).collect();
    let mut found = vec![[CacheLookup::Cold; 2]; cold.len()];
    for pass in [true, false] {
        let of = cold.iter().zip(&there).zip(&mut found).filter(|((_, there), _)| **there == pass);
        for ((&(neuron, active), _), found) in of {
            found[0] = cache.neuron(matrix, neuron, Part::Gate, |_| {})?;
            if active && two {
                found[1] = cache.neuron(matrix, neuron, Part::UpDown, |_| {})?;
            }
        }
    }
    Ok(found)
}

/// Counts of requests to a cache.
#[derive(Clone, Copy, Debug, Default)]
struct RequestCounters {
    requested: u32,
    missed: u32,
    bytes: f64,
}

fn greatest_common_divisor(a: u64, b: u64) -> u64 {
    if b == 0 { a } else { greatest_common_divisor(b, a % b) }
}
