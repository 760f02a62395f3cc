//! Cacheable neurons, and the division of memory.

use crate::offload::neurons::error::NeuronError;

/// The neurons of a model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shape {
    /// Matrices: the experts of all layers, numbered consecutively, or the layers of a dense model.
    pub matrices: u32,
    /// Neurons of a matrix, hot to cold.
    pub neurons: u32,
    /// Neurons of a cluster; the last one of a matrix may have fewer.
    pub cluster: u32,
    /// Bytes of a neuron's first part.
    pub gate: u64,
    /// Bytes of its second part; 0 where a neuron is one read.
    pub up_down: u64,
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
        self.gate + self.up_down
    }

    /// Matrix and neuron of a number in an [`Event`](super::Event).
    pub fn neuron(&self, id: u32) -> (u32, u32) {
        (id / self.neurons, id % self.neurons)
    }

    /// Matrix and cluster of a number in an [`Event`](super::Event).
    pub fn cluster(&self, id: u32) -> (u32, u32) {
        (id / self.clusters(), id % self.clusters())
    }

    pub(super) fn check(&self) -> Result<(), NeuronError> {
        let wrong = |what: &str| Err(NeuronError::Shape(what.to_owned()));
        if self.matrices == 0 || self.neurons == 0 || self.cluster == 0 || self.gate == 0 {
            return wrong("matrices, neurons, clusters and the first part of a neuron are 1 at least");
        }
        let count = u64::from(self.matrices) * u64::from(self.neurons);
        if count > MOST {
            return wrong("there are more than 2^28 neurons");
        }
        let bytes = self.gate.checked_add(self.up_down).and_then(|b| b.checked_mul(count));
        if bytes.is_none_or(|b| b > 1 << 62) {
            return wrong("their bytes pass 2^62");
        }
        Ok(())
    }
}

/// Capacity of each region, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Regions {
    /// For data that always stays.
    pub fixed: u64,
    /// For clusters.
    pub hot: u64,
    /// For single neurons.
    pub cold: u64,
}

impl Regions {
    /// Regions of `capacity` bytes: the rest after fixed and hot is cold.
    ///
    /// # Errors
    /// [`NeuronError::Regions`] if fixed and hot exceed the capacity.
    pub fn of(capacity: u64, fixed: u64, hot: u64) -> Result<Self, NeuronError> {
        let requested = fixed.saturating_add(hot);
        match capacity.checked_sub(requested) {
            Some(cold) => Ok(Self { fixed, hot, cold }),
            None => Err(NeuronError::Regions { requested, capacity }),
        }
    }

    /// Bytes of all regions; 2⁶⁴ - 1 on overflow.
    pub fn capacity(&self) -> u64 {
        self.fixed.saturating_add(self.hot).saturating_add(self.cold)
    }
}
