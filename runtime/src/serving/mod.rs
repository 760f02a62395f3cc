//! From sequences to tokens: batches, samplers, texts.

#[allow(clippy::cast_possible_truncation, reason = "indices and sizes of a verified plan")]
pub mod best_of;
pub mod big_little;
pub mod generate;
#[allow(clippy::cast_possible_truncation, reason = "numerics of policies and counters")]
pub mod sampler;
#[allow(clippy::cast_possible_truncation, reason = "indices and sizes of a verified plan")]
pub mod scheduler;
pub mod speculate;
pub mod stops;
pub mod text;
