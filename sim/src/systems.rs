//! Systems of other authors and of moec, as rows of one table: the values of `[placement] policy`, and the
//! subjects of experiments.

use moec_runtime::schedule::{
    ExpertUnit, GpuResidents, Order, Prediction, Solver, System, TRIMOE, Units, trimoe,
};

/// The name of a system in `model.toml`.
pub fn key(system: &System) -> String {
    system.name.to_ascii_lowercase()
}

/// The system with this name in `model.toml`, among those with frames.
pub fn of_key(name: &str) -> Option<&'static System> {
    CACHED.iter().find(|s| key(s) == name)
}

/// Whether an expert may be transferred for one step only, in addition to those that stay.
pub fn passes(system: &System) -> bool {
    let brings = |p| !matches!(p, Solver::Fixed | Solver::Cpu);
    !matches!(system.gpu_residents, GpuResidents::Cache(_))
        && (brings(system.prefill) || brings(system.decode))
}

/// MRS as in the paper: every transferred expert is kept. The paper gives no α; of 0.1 to 0.99 this value
/// gives the most hits.
pub const MRS: &str = "mrs alpha=0.9 depth=2 bypass=0";
/// MRS that does not keep an expert that ranks below all resident ones.
pub const MRS_BYPASS: &str = "mrs alpha=0.9 depth=2 bypass=1";
/// LRU.
pub const LRU: &str = "lru";

const PAPER: Solver = Solver::Paper(Order::Next);
/// The GPU and the CPU.
const TWO: Units = Units { misses: true, cpu: true, near: false };
/// Loads of the next step, for transfers alone.
const AHEAD: Prediction = Prediction::Loads { relayout: false };

/// llama.cpp: the first layers on the GPU, the others on the CPU.
pub const LLAMA_CPP: System = System {
    name: "llama.cpp",
    prefill: Solver::Fixed,
    decode: Solver::Fixed,
    units: TWO,
    gpu_residents: GpuResidents::Layers,
    prediction: Prediction::Nothing,
    description: "whole layers on the GPU, the experts of the others on the CPU",
};
/// AdapMoE: the GPU alone, experts of the next layer ahead, LRU. The same holds for Klotski, whose batches
/// hide more of the transfers.
pub const ADAPMOE: System = System {
    name: "AdapMoE",
    prefill: Solver::Gpu,
    decode: Solver::Gpu,
    units: TWO,
    gpu_residents: GpuResidents::Cache(LRU),
    prediction: Prediction::Gates(1),
    description: "all experts on the GPU; missing ones are transferred, one layer ahead where predicted (Klotski, AdapMoE)",
};
/// Fiddler: popular experts on the GPU, each other one on the unit that computes it sooner.
pub const FIDDLER: System = System {
    name: "Fiddler",
    prefill: Solver::Cheapest,
    decode: Solver::Cheapest,
    units: TWO,
    gpu_residents: GpuResidents::Popular,
    prediction: Prediction::Nothing,
    description: "popular experts stay on the GPU, each other one is computed where it is done sooner",
};
/// KTransformers: popular experts on the GPU; the CPU has the others in decoding, the GPU in prefill (Table
/// I).
pub const KTRANSFORMERS: System = System {
    name: "KTransformers",
    prefill: Solver::Gpu,
    decode: Solver::Fixed,
    units: TWO,
    gpu_residents: GpuResidents::Popular,
    prediction: Prediction::Nothing,
    description: "popular experts stay on the GPU; the CPU computes the others while tokens are decoded",
};
/// HybriMoE.
pub const HYBRIMOE: System = System {
    name: "HybriMoE",
    prefill: PAPER,
    decode: PAPER,
    units: TWO,
    gpu_residents: GpuResidents::Cache(MRS),
    prediction: Prediction::Gates(3),
    description: "HybriMoE as published: three timelines, MRS, three layers ahead",
};
/// moec: HybriMoE with moec's solver, and MRS with bypass.
pub const MOEC: System = System {
    name: "moec",
    prefill: Solver::Best,
    decode: Solver::Best,
    units: TWO,
    gpu_residents: GpuResidents::Cache(MRS_BYPASS),
    prediction: Prediction::Gates(3),
    description: "HybriMoE with the best of all divisions, found by search, and the cache policy that gains most on the profile's routing",
};

/// All experts on the GPU, transferred after their layer's router. MoBiLE does the same, with fewer experts
/// first.
pub const OFFLOADING: System = System {
    name: "offloading",
    gpu_residents: GpuResidents::Token,
    prediction: Prediction::Nothing,
    description: "all experts on the GPU; missing ones are transferred",
    ..ADAPMOE
};
/// Pre-gated MoE: a layer's experts are known one layer before.
pub const PRE_GATED: System = System {
    name: "Pre-gated MoE",
    prediction: Prediction::Gates(1),
    description: "the same, and a gate predicts transfers one layer ahead",
    ..OFFLOADING
};

/// Systems with frames that all layers share: the values of `[placement] policy`.
pub const CACHED: [System; 6] = [LLAMA_CPP, ADAPMOE, FIDDLER, KTRANSFORMERS, HYBRIMOE, MOEC];

/// Klotski: the GPU alone; weights are transferred while others are computed, and hot experts before that.
pub const KLOTSKI: System = System::of_sums(
    "Klotski",
    Solver::Cheapest,
    Units { misses: true, cpu: false, near: false },
    GpuResidents::Popular,
    AHEAD,
    "all on the GPU; weights travel while others are computed",
);
/// KTransformers with transfers ahead: the GPU computes what it holds.
pub const EN_KTRANSFORMERS_HELD: System = System::of_sums(
    "En-KTransformers, held",
    Solver::Cheapest,
    Units { misses: false, cpu: true, near: false },
    GpuResidents::Popular,
    AHEAD,
    "what the GPU holds on either, the rest on the CPU",
);
/// The same, with as many of the hottest others on the GPU as shorten the step.
pub const EN_KTRANSFORMERS: System = System::of_sums(
    "En-KTransformers",
    Solver::Hottest(ExpertUnit::Cpu),
    TWO,
    GpuResidents::Popular,
    AHEAD,
    "the hottest on the GPU, the rest on the CPU, cut where the step is shortest",
);
/// MoNDE: GPU and NDP units; the hottest experts go to the GPU, as many as balance the two.
pub const MONDE: System = System::of_sums(
    "MoNDE",
    Solver::Hottest(ExpertUnit::Near),
    Units { misses: true, cpu: false, near: true },
    GpuResidents::Local,
    Prediction::Nothing,
    "the hottest on the GPU, the rest on NDP units, rows over the link counted",
);
/// Systems with units in the host's memories, or compared with these: TriMoE, its parts, and other systems.
pub const SCHEDULED: [System; 10] = [
    KLOTSKI,
    EN_KTRANSFORMERS_HELD,
    EN_KTRANSFORMERS,
    MONDE,
    trimoe("TriMoE, greedy, still", Solver::Cheapest, false),
    trimoe("TriMoE, still", Solver::Refined, false),
    trimoe("moec on memories, still", Solver::Best, false),
    trimoe("TriMoE, greedy", Solver::Cheapest, true),
    TRIMOE,
    trimoe("moec on memories", Solver::Best, true),
];
