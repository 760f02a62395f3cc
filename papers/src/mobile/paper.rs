//! Runs of the paper; their speedups are in `claims/mobile.toml`.

/// A row of Table II with MoBiLE: the model, the task, the fallback ratio.
pub type Fallback = (&'static str, &'static str, f64);

/// The rows of Table II with MoBiLE.
pub const TABLE_2: [Fallback; 4] = [
    ("Qwen MoE", "GSM8K", 0.11),
    ("Qwen MoE", "Humaneval", 0.11),
    ("OLMoE", "GSM8K", 0.21),
    ("OLMoE", "Humaneval", 0.12),
];
/// Table III, OLMoE on GSM8K: threshold, fallback ratio. The first is the row of Table II with half of the
/// experts.
pub const TABLE_3: [(f64, f64); 4] = [(0.0, 0.0), (0.5, 0.10), (0.7, 0.21), (0.8, 0.27)];
/// Table IV, OLMoE on GSM8K: experts of the little model, fallback ratio. It prints no speedup.
pub const TABLE_4: [(usize, f64); 3] = [(2, 0.29), (4, 0.21), (6, 0.21)];
