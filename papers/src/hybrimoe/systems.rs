//! The systems, as rows of one simulator.

use moec_runtime::hybrid::{Order, Policy};

/// What becomes of the experts on the GPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Keeps {
    /// The most popular of every layer, for good.
    Popular,
    /// All of the first layers, for good.
    Layers,
    /// What a policy keeps of those that come.
    Cache(&'static str),
}

/// A system.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct System {
    /// Name.
    pub name: &'static str,
    /// Who divides the experts of a layer of a prompt, and of a token.
    pub prefill: Policy,
    /// Of a token.
    pub decode: Policy,
    /// What stays on the GPU.
    pub keeps: Keeps,
    /// Layers ahead for which experts are transferred.
    pub ahead: usize,
}

/// MRS as the paper has it: every expert that comes is kept. It gives no α; with this one most uses are hits, of 0.1 to 0.99.
pub const MRS: &str = "mrs alpha=0.9 depth=2 bypass=0";
/// MRS that keeps no expert that ranks below all that are there.
pub const MRS_BYPASS: &str = "mrs alpha=0.9 depth=2 bypass=1";
/// LRU.
pub const LRU: &str = "lru";

const PAPER: Policy = Policy::Paper(Order::Next);

/// llama.cpp: the first layers on the GPU, the others on the processor.
pub const LLAMA_CPP: System = System {
    name: "llama.cpp",
    prefill: Policy::Fixed,
    decode: Policy::Fixed,
    keeps: Keeps::Layers,
    ahead: 0,
};
/// AdapMoE: the GPU alone, experts of the next layer ahead, LRU.
pub const ADAPMOE: System =
    System { name: "AdapMoE", prefill: Policy::Gpu, decode: Policy::Gpu, keeps: Keeps::Cache(LRU), ahead: 1 };
/// Fiddler: popular experts on the GPU, each other one where it is computed sooner.
pub const FIDDLER: System = System {
    name: "Fiddler",
    prefill: Policy::Cheapest,
    decode: Policy::Cheapest,
    keeps: Keeps::Popular,
    ahead: 0,
};
/// KTransformers: popular experts on the GPU; the processor has the others in decoding, the GPU in prefill (Table I).
pub const KTRANSFORMERS: System = System {
    name: "KTransformers",
    prefill: Policy::Gpu,
    decode: Policy::Fixed,
    keeps: Keeps::Popular,
    ahead: 0,
};
/// HybriMoE.
pub const HYBRIMOE: System =
    System { name: "HybriMoE", prefill: PAPER, decode: PAPER, keeps: Keeps::Cache(MRS), ahead: 3 };
/// moec: the same with its own division, and MRS with bypass.
pub const MOEC: System = System {
    name: "moec",
    prefill: Policy::Cut,
    decode: Policy::Cut,
    keeps: Keeps::Cache(MRS_BYPASS),
    ahead: 3,
};

/// All that are compared.
pub const SYSTEMS: [System; 6] = [LLAMA_CPP, ADAPMOE, FIDDLER, KTRANSFORMERS, HYBRIMOE, MOEC];
/// Where in [`SYSTEMS`] the baseline of the paper's speedups is.
pub const BASELINE: usize = 3;

/// The rows of Table III: KTransformers, and what is added to it.
pub const ABLATION: [System; 5] = [
    System { name: "Baseline", ..KTRANSFORMERS },
    System { name: "Baseline+Scheduling", prefill: PAPER, decode: PAPER, ..KTRANSFORMERS },
    System { name: "Baseline+Prefetching", ahead: 3, ..KTRANSFORMERS },
    System { name: "Baseline+Caching", keeps: Keeps::Cache(MRS), ..KTRANSFORMERS },
    System { name: "All", ..HYBRIMOE },
];
