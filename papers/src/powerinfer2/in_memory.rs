//! Decoding with everything in memory, neurons or whole matrices; and whole matrices that are mapped from
//! UFS.

use super::activity::{expected, popularity};
use super::block::{Block, Group, Times};
use super::dense::{CLUSTER, Dense, DenseUnits, PAGED, POSITIONS, hot_neurons};
use super::models::{CHANNEL, GROUPED, Model, PREDICTOR, TOGETHER};
use super::phone::Phone;
use moec_sim::neurons::{NeuronError, Order};

/// Decoding with everything in memory: expected numbers of neurons.
#[derive(Clone, Copy, Debug)]
pub struct InMemory<'a> {
    /// The phone.
    pub phone: &'a Phone,
    /// The model.
    pub model: &'a Model,
    /// True if the NPU is used.
    pub npu: bool,
    /// Part of the neurons that is hot; 0 without the NPU.
    pub hot: f64,
    /// Sequences.
    pub batch: usize,
}

impl InMemory<'_> {
    /// Times of a step.
    ///
    /// # Errors
    /// As [`Case::run`](super::decode::Case::run).
    pub fn run(&self) -> Result<Times, NeuronError> {
        let Self { phone, model, .. } = *self;
        let workers = phone.workers(None);
        let dense = Dense {
            phone,
            model,
            memory: phone.memory,
            units: if self.npu { DenseUnits::One } else { DenseUnits::Cores },
            batch: self.batch as f64,
            part: workers.iter().sum(),
        };
        let of = popularity(model.active, model.inner);
        let first = if self.npu { hot_neurons(model, self.hot) } else { 0 };
        let weights = first as f64 * model.neuron();
        let npu = (weights * CHANNEL).max(phone.npu_bytes_of(weights * self.batch as f64));
        let row = model.hidden as f64;
        // Of all groups: bytes that are read, and bytes that take the cores as long.
        let (mut read, mut took) = (0.0, 0.0);
        let group = |start: usize| {
            let range = start..(start + CLUSTER).min(model.inner);
            let (union, uses) = expected(&of, range.clone(), self.batch);
            let mut bytes = |bytes: f64, macs: f64| {
                let as_long = bytes.max(phone.cpu_bytes_of(macs));
                read += bytes;
                took += as_long;
                as_long
            };
            let mut rows = |part: f64| bytes(part * union * row * GROUPED, part * uses * row);
            let (gate, rest) = (rows(1.0), rows(2.0 * TOGETHER));
            // A predictor's weights have 4 bits.
            let predictor = range.len() as f64 * PREDICTOR;
            let predict = bytes(predictor, 2.0 * predictor * self.batch as f64);
            Group { stages: [predict, 0.0, gate, 0.0, rest] }
        };
        let groups: Vec<Group> = (first..model.inner).step_by(CLUSTER).map(group).collect();
        let order = Some(Order::Cluster);
        let density = if took > 0.0 { read / took } else { 1.0 };
        let mut layer = Block { npu, groups, density }.run(&dense.memory, &workers, order)?;
        layer += dense.attention();
        let mut all = layer.times(model.layers as f64);
        all += dense.head();
        Ok(all)
    }
}

/// Times of a step that computes all weights, everything in memory: bytes of a weight, and the unit's rates.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AllWeightsStep {
    /// Bytes of a weight.
    pub bytes: f64,
    /// Bytes per second.
    pub rate: f64,
    /// Multiply-adds per second.
    pub macs: f64,
}

impl AllWeightsStep {
    /// llama.cpp, on all cores.
    pub fn cpu(phone: &Phone) -> Self {
        Self { bytes: GROUPED, rate: phone.memory.cpu, macs: phone.cpu_macs }
    }

    /// QNN, on the NPU.
    pub fn npu(phone: &Phone) -> Self {
        Self { bytes: CHANNEL, rate: phone.memory.npu, macs: phone.npu_macs }
    }

    /// MLC-LLM, on the GPU. Its rate is not printed: that of the NPU, for the part of the time in which it
    /// computes (§2.3.1).
    pub fn gpu(phone: &Phone) -> Self {
        let rate = phone.memory.npu * phone.gpu_busy;
        Self { bytes: GROUPED, rate, macs: phone.gpu_macs }
    }

    /// Seconds of a step of so many sequences.
    pub fn seconds(&self, model: &Model, batch: usize) -> f64 {
        let kv = model.kv_bytes(POSITIONS) * model.layers as f64 * batch as f64;
        let routed = if model.experts == 1 { model.k } else { (model.k * batch).min(model.experts) };
        let layers = model.attention() + routed as f64 * model.inner as f64 * model.neuron();
        let weights = layers * model.layers as f64 + model.head();
        (weights * self.bytes / self.rate).max(used(model) * batch as f64 / self.macs) + kv / self.rate
    }
}

/// Weights that a token is multiplied with.
pub fn used(model: &Model) -> f64 {
    (model.attention() + model.routed()) * model.layers as f64 + model.head()
}

/// Bytes of the reads ahead of a file that is mapped: Linux's 128 KiB.
const AHEAD: u64 = 128 << 10;

/// Seconds of a token of llama.cpp with its weights mapped from UFS, `held` of those of the feed-forward part
/// in memory.
///
/// Threads read what they compute. Weights of a dense model are used cyclically, so that each has left memory
/// before its next use. Experts are sampled, and hit by the share that memory holds.
pub fn mapped(phone: &Phone, model: &Model, held: f64) -> f64 {
    let missing = if model.experts == 1 { 1.0 } else { 1.0 - held };
    let bytes = missing * model.routed() * model.layers as f64 * GROUPED;
    let reading = phone.ufs.sequential_seconds(bytes, AHEAD) / phone.ufs.contended;
    AllWeightsStep::cpu(phone).seconds(model, 1) * PAGED + reading
}
