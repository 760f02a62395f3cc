//! Additions to the baseline, as rows of one simulator. The systems themselves are in [`moec_sim::systems`].

pub use moec_runtime::schedule::{GpuResidents, System};
use moec_runtime::schedule::{Order, Prediction, Solver};
pub use moec_sim::systems::{
    ADAPMOE, CACHED as SYSTEMS, FIDDLER, HYBRIMOE, KTRANSFORMERS, LLAMA_CPP, LRU, MOEC, MRS, MRS_BYPASS,
};

const PAPER: Solver = Solver::Paper(Order::Next);
/// Index in [`SYSTEMS`] of the baseline of the paper's speedups.
pub const BASELINE: usize = 3;

/// The rows of Table III: KTransformers and additions to it.
pub const ABLATION: [System; 5] = [
    System { name: "Baseline", ..KTRANSFORMERS },
    System { name: "Baseline+Scheduling", prefill: PAPER, decode: PAPER, ..KTRANSFORMERS },
    System { name: "Baseline+Prefetching", prediction: Prediction::Gates(3), ..KTRANSFORMERS },
    System { name: "Baseline+Caching", gpu_residents: GpuResidents::Cache(MRS), ..KTRANSFORMERS },
    System { name: "All", ..HYBRIMOE },
];
