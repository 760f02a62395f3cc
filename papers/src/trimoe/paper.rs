//! Runs of TriMoE's paper; its figures are in `claims/trimoe.toml`.

/// Batches of the evaluation (§5.1.3).
pub const BATCHES: [usize; 3] = [256, 512, 768];
/// Batch of the ablation (Figure 8).
pub const BATCH: usize = 512;
/// Batches of §5.5, of Qwen3.
pub const ROBUST: [usize; 3] = [128, 64, 32];
/// §5.4.1: DIMMs from which on latency is stable.
pub const STABLE_DIMMS: f64 = 16.0;
/// §5.4.2: multiple of the CPU's rate from which on latency is flat.
pub const FLAT_CPU: f64 = 0.5;
