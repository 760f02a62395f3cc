//! What the paper prints, and where.

/// A row of Table II with MoBiLE: the model, the task, the fallback ratio, the speedup.
pub type Fallback = (&'static str, &'static str, f64, f64);

/// Speedups with half of the experts and no fallback, Table II, in the order of [`super::models::MODELS`].
pub const LITTLE: [f64; 2] = [1.82, 1.85];
/// The rows of Table II with MoBiLE.
pub const TABLE_2: [Fallback; 4] = [
    ("Qwen MoE", "GSM8K", 0.11, 1.72),
    ("Qwen MoE", "Humaneval", 0.11, 1.72),
    ("OLMoE", "GSM8K", 0.21, 1.57),
    ("OLMoE", "Humaneval", 0.12, 1.63),
];
/// Table III, OLMoE on GSM8K: threshold, fallback ratio, speedup. The first is the row of [`LITTLE`].
pub const TABLE_3: [(f64, f64, f64); 4] =
    [(0.0, 0.0, 1.85), (0.5, 0.10, 1.65), (0.7, 0.21, 1.57), (0.8, 0.27, 1.54)];
/// Table IV, OLMoE on GSM8K: experts of the little model, fallback ratio. It prints no speedup.
pub const TABLE_4: [(usize, f64); 3] = [(2, 0.29), (4, 0.21), (6, 0.21)];
/// §IV-B: average speedups of MoBiLE over Pre-gated MoE and AdapMoE.
pub const OVER_OTHERS: [f64; 2] = [1.28, 1.21];
/// §IV-B: average speedup of MoBiLE with gates that foretell the next layer, over the baseline.
pub const WITH_GATES: f64 = 1.92;
