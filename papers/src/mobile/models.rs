//! The models of §IV by their shapes, as their configurations on Hugging Face have them.

use crate::hybrimoe::models::Model;

/// Qwen1.5-MoE-A2.7B. The paper counts 64 experts in Table II and 60 in §IV; its configuration has 60, and a
/// shared one. Choices repeat as those of [`OLMOE`].
pub const QWEN: Model = Model {
    name: "Qwen MoE",
    layers: 24,
    experts: 60,
    k: 4,
    width: 2048,
    inner: 1408,
    attention: 4 * 2048 * 2048,
    shared: 3 * 2048 * 5632,
    persistence: PERSISTENCE,
};

/// OLMoE-1B-7B-0924.
pub const OLMOE: Model = Model {
    name: "OLMoE",
    layers: 16,
    experts: 64,
    k: 8,
    width: 2048,
    inner: 1024,
    attention: 4 * 2048 * 2048,
    shared: 0,
    persistence: PERSISTENCE,
};

/// Correlation of a token's choices with those before: between the two models of 64 experts in HybriMoE's
/// Figure 9. It affects only systems with a cache.
pub const PERSISTENCE: f64 = 0.43;

/// Both, in the order of Table II.
pub const MODELS: [Model; 2] = [QWEN, OLMOE];

/// Rows of the output matrix, in the order of [`MODELS`].
pub const VOCABULARY: [u64; 2] = [151_936, 50_304];
