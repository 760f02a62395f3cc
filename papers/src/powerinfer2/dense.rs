//! Dense work of a token, attention and the head, and what all runs have in common: clusters, bundles.

use super::block::Times;
use super::models::{CHANNEL, GROUPED, Model, TOGETHER};
use super::phone::{Memory, Phone};
use moec_sim::neurons::{Bundle, NeuronError, QuantFormat, RatesByBlock};

/// Neurons of a cluster (§4.1.2: chunks of 512 rows).
pub const CLUSTER: usize = 512;
/// Bytes of a block of UFS.
pub const BLOCK: u64 = 4096;
/// Bytes of a long read (§2.3.2).
pub const LONG: u64 = 512 << 10;
/// Factor by which units are slower on weights in a neuron cache. The paper does not explain it. Fitted to
/// the 404.6 tokens/s of §7.3, and used for all systems with weights on UFS, in decoding as well.
pub const PAGED: f64 = 1.92;
/// Positions of a sequence on average: up to 64 of the prompt, and half of 1024 (§7.1).
pub const POSITIONS: f64 = 64.0 + 512.0;

/// Units that compute attention and the head.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DenseUnits {
    /// The cores.
    Cores,
    /// The cores or the NPU, whichever takes less time: one of them computes all of it, as in a bundle.
    One,
    /// Both, each a part of the heads (§4.1.2). No bundle does that.
    Both,
}

/// Dense costs of a layer.
#[derive(Clone, Copy, Debug)]
pub struct Dense<'a> {
    /// The phone.
    pub phone: &'a Phone,
    /// The model.
    pub model: &'a Model,
    /// Its memory, as fast as it is here.
    pub memory: Memory,
    /// Units that compute it.
    pub units: DenseUnits,
    /// Sequences.
    pub batch: f64,
    /// Sum of the computing cores' parts.
    pub part: f64,
}

impl Dense<'_> {
    /// Times of weights that every token uses, while other bytes are read. The NPU reads the weights `calls`
    /// times.
    fn times(&self, weights: f64, other_bytes: f64, calls: f64) -> Times {
        let macs = weights * self.batch;
        let cpu = (weights * GROUPED).max(self.phone.cpu_bytes_of(macs)) + other_bytes;
        let density = (weights * GROUPED + other_bytes) / cpu;
        let npu = (weights * CHANNEL * calls).max(self.phone.npu_bytes_of(macs)) + other_bytes;
        let on_cores = cpu / self.memory.rates(self.part, density, false).0;
        let on_npu = npu / self.memory.rates(0.0, 1.0, true).1;
        match self.units {
            DenseUnits::Both => {
                let npu = (weights * CHANNEL).max(self.phone.npu_bytes_of(macs)) + other_bytes;
                let all = self.memory.split(self.part, density, cpu, npu);
                Times { all, both: all, ..Times::default() }
            }
            DenseUnits::One if on_npu < on_cores => Times { all: on_npu, npu: on_npu, ..Times::default() },
            DenseUnits::One | DenseUnits::Cores => Times { all: on_cores, cpu: on_cores, ..Times::default() },
        }
    }

    /// Attention of a layer. A graph of the NPU computes it for one sequence at a time.
    pub fn attention(&self) -> Times {
        let kv_bytes = self.model.kv_bytes(POSITIONS) * self.batch;
        self.times(self.model.attention(), kv_bytes, self.batch)
    }

    /// The head, once for a token.
    pub fn head(&self) -> Times {
        self.times(self.model.head(), 0.0, 1.0)
    }
}

/// The bundle of a model's neurons (§4.4).
///
/// # Errors
/// Our bug: a width that is not a whole number of groups.
pub fn bundle(model: &Model, rates: &RatesByBlock) -> Result<Bundle, NeuronError> {
    Bundle::choose(model.hidden as u64, QuantFormat::Q4_PAPER, BLOCK, rates, TOGETHER)
}

/// Whole clusters of a matrix that are nearest to a share.
pub fn hot_neurons(model: &Model, share: f64) -> usize {
    ((share * model.inner as f64 / CLUSTER as f64).round() as usize * CLUSTER)
        .min(model.inner / CLUSTER * CLUSTER)
}
