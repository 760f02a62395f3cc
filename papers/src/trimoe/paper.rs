//! What TriMoE's paper says, and nothing else: every number here is printed there, under the place that is named. Bars
//! of figures without a number are not read off.

use crate::printed::Printed::{self, Below, Is, Over, Within};

/// Batches of the evaluation (§5.1.3).
pub const BATCHES: [usize; 3] = [256, 512, 768];
/// Batch of the ablation (Figure 8).
pub const BATCH: usize = 512;
/// Batches of §5.5 with the speedups over the strongest baseline, of Qwen3.
pub const ROBUST: [(usize, f64); 3] = [(128, 2.72), (64, 2.18), (32, 1.82)];

/// §5.2.1: decode speedup over the best baseline, on average of each model.
pub const SPEEDUP: Printed = Within(2.12, 2.83);
/// §5.2.2: throughput from end to end over the strongest baseline, in the order of Table 2.
pub const THROUGHPUT: [f64; 3] = [2.78, 2.22, 2.09];
/// §5.3: what each component adds.
pub const ABLATION: [(&str, f64); 3] = [("+CPU", 1.75), ("+Refinement", 1.28), ("+Relayout", 1.16)];
/// §5.4.1: DIMMs from which on latency is stable.
pub const STABLE_DIMMS: usize = 16;
/// §5.4.2: multiple of the processor's rate from which on latency is flat.
pub const FLAT_CPU: f64 = 0.5;
/// §3.1: utilization of the GPU that fetches warm experts.
pub const GPU_FETCHING: Printed = Below(0.086);
/// §3.1: how much longer near-data units take with warm experts.
pub const NDP_WARM: f64 = 7.0;
/// §4.3: right decisions of the predictor.
pub const ACCURACY: Printed = Over(0.78);
/// §4.3: its memory, in KB.
pub const PREDICTOR_KB: Printed = Is(38.0);
/// §5.5: migrating up to four experts, in milliseconds.
pub const MIGRATION_MS: Printed = Is(0.63);
/// §5.5: the GPU's calculation beside it, in milliseconds.
pub const WINDOW_MS: Printed = Is(0.68);
/// §5.5: overhead of migration.
pub const OVERHEAD: Printed = Below(0.033);
/// Table 2: bytes of the experts in GB, in its order.
pub const EXPERT_GB: [f64; 3] = [422.0, 423.0, 190.0];

/// A column of Table 3: utilization.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Used {
    /// System.
    pub system: &'static str,
    /// GPU.
    pub gpu: f64,
    /// Processor, where it has one.
    pub cpu: Option<f64>,
    /// Near-data units, where it has any.
    pub ndp: Option<f64>,
}

/// Table 3.
pub const USED: [Used; 4] = [
    Used { system: "Klotski", gpu: 0.286, cpu: None, ndp: None },
    Used { system: "En-KTransformers", gpu: 0.576, cpu: Some(0.42), ndp: None },
    Used { system: "MoNDE", gpu: 0.339, cpu: None, ndp: Some(0.701) },
    Used { system: "TriMoE", gpu: 0.660, cpu: Some(0.749), ndp: Some(0.878) },
];
