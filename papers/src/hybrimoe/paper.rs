//! What the paper prints, and where.

use crate::printed::Printed;

/// Shares of the experts that the GPU holds.
pub const CACHED: [f64; 3] = [0.25, 0.5, 0.75];
/// Tokens of prompts, §VI-B.
pub const PROMPTS: [usize; 4] = [32, 128, 512, 1024];
/// Mean speedup over KTransformers in prefill, §VI-B.
pub const PREFILL: Printed = Printed::Is(1.33);
/// The same in decoding.
pub const DECODE: Printed = Printed::Is(1.70);
/// Seconds of KTransformers, Table III: Qwen2, a quarter cached; prefill, decoding.
pub const BASELINE_S: [f64; 2] = [1.47, 0.21];
/// Speedups of Table III in the order of [`super::systems::ABLATION`]; `None` where it has no row.
pub const ABLATION: [[Option<f64>; 5]; 2] = [
    [None, Some(1.26), Some(1.06), None, Some(1.31)],
    [None, Some(1.46), Some(1.15), Some(1.38), Some(1.86)],
];
/// Hit rates of LRU and MRS that the text of §VI-D names: place in [`super::models::MODELS`], share cached.
pub const HITS: [(usize, f64, [f64; 2]); 4] = [
    (0, 0.25, [0.302, 0.362]),
    (1, 0.25, [0.450, 0.528]),
    (2, 0.25, [0.477, 0.527]),
    (0, 0.75, [0.806, 0.833]),
];
