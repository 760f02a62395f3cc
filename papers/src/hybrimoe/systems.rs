//! What is added to the baseline, as rows of one simulator. The systems themselves are the runtime's.

pub use moec_runtime::schedule::{
    ADAPMOE, CACHED as SYSTEMS, FIDDLER, HYBRIMOE, KTRANSFORMERS, Keeps, LLAMA_CPP, LRU, MOEC, MRS,
    MRS_BYPASS, System,
};
use moec_runtime::schedule::{Foresees, Order, Solver};

const PAPER: Solver = Solver::Paper(Order::Next);
/// Where in [`SYSTEMS`] the baseline of the paper's speedups is.
pub const BASELINE: usize = 3;

/// The rows of Table III: KTransformers, and what is added to it.
pub const ABLATION: [System; 5] = [
    System { name: "Baseline", ..KTRANSFORMERS },
    System { name: "Baseline+Scheduling", prefill: PAPER, decode: PAPER, ..KTRANSFORMERS },
    System { name: "Baseline+Prefetching", foresees: Foresees::Gates(3), ..KTRANSFORMERS },
    System { name: "Baseline+Caching", keeps: Keeps::Cache(MRS), ..KTRANSFORMERS },
    System { name: "All", ..HYBRIMOE },
];
