//! Runs of the paper; its figures are in `claims/hybrimoe.toml`.

/// Shares of the experts that the GPU holds.
pub const CACHED: [f64; 3] = [0.25, 0.5, 0.75];
/// Tokens of prompts, §VI-B.
pub const PROMPTS: [usize; 4] = [32, 128, 512, 1024];
