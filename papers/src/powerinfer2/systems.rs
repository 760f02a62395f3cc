//! Compared systems: how each reads, keeps and computes neurons.

use super::dense::DenseUnits;
use super::phone::Cluster;
use moec_sim::neurons::Order;

/// Reads that come with a neuron that memory lacks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reads {
    /// Its three rows, each from its matrix, in all pages of the row.
    Rows,
    /// Its bundle, in two reads if that is faster (§4.4).
    Bundle,
    /// The bundles of so many neighbours in one read: LLMFlash's bundles of neurons that may be active
    /// together (§4.2).
    Together(u32),
}

/// A system that computes neurons and not whole matrices.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct System {
    /// Name.
    pub name: &'static str,
    /// Reads.
    pub reads: Reads,
    /// True if it caches what it read.
    pub cached: bool,
    /// Order of overlaps; `None`: nothing is computed while UFS is read.
    pub order: Option<Order>,
    /// The NPU computes the hot neurons, and attention and the head where it takes less time than the cores.
    pub npu: bool,
    /// Attention and the head are divided between both units (§4.1.2).
    pub divides_attention: bool,
    /// The core that only reads; `None`: all cores compute and read.
    pub reader: Option<Cluster>,
}

impl System {
    /// Units that compute attention and the head.
    pub const fn dense_units(&self) -> DenseUnits {
        match (self.npu, self.divides_attention) {
            (false, _) => DenseUnits::Cores,
            (true, false) => DenseUnits::One,
            (true, true) => DenseUnits::Both,
        }
    }
}

/// PowerInfer-2.
pub const POWERINFER2: System = System {
    name: "PowerInfer-2",
    reads: Reads::Bundle,
    cached: true,
    order: Some(Order::Cluster),
    npu: true,
    divides_attention: false,
    reader: Some(Cluster::Big),
};

/// PowerInfer-2 without the NPU while decoding (§7.4).
pub const CPU_ONLY: System = System { name: "PowerInfer-2-CPUOnly", npu: false, ..POWERINFER2 };

/// Neurons that LLMFlash reads together. The paper does not state the number; fitted to the 76.7 % of Table
/// 4.
pub const TOGETHER: u32 = 6;

/// LLMFlash as §4.2 and §7.1 describe it: in llama.cpp, whose threads read what they compute.
pub const LLMFLASH: System = System {
    name: "LLMFlash",
    reads: Reads::Together(TOGETHER),
    cached: true,
    order: None,
    npu: false,
    divides_attention: false,
    reader: None,
};

/// Figure 14: each adds to the one before it.
pub const ABLATION: [System; 5] = [
    System { name: "Baseline", reads: Reads::Rows, cached: false, order: None, npu: false, ..POWERINFER2 },
    System { name: "+Bundle", cached: false, order: None, npu: false, ..POWERINFER2 },
    System { name: "+Cache", order: None, npu: false, ..POWERINFER2 },
    System { name: "+Pipeline", npu: false, ..POWERINFER2 },
    System { name: "+XPU", ..POWERINFER2 },
];

/// The paper's division of attention between the units, which no bundle has.
pub const DIVIDED: System =
    System { name: "+XPU, attention divided (§4.1.2)", divides_attention: true, ..POWERINFER2 };

/// With a barrier between matrices (Figure 6a), which the paper does not measure.
pub const MATRIX: System =
    System { name: "a pipeline of matrices", order: Some(Order::Matrix), npu: false, ..POWERINFER2 };
