//! Experts and neurons on disk: reads, caches and policies.

pub(crate) mod border;
#[allow(clippy::cast_possible_truncation, reason = "numerics of policies and counters")]
pub mod cache;
#[allow(clippy::cast_possible_truncation, reason = "indices and sizes of a verified plan")]
pub mod disk;
#[allow(clippy::cast_possible_truncation, reason = "numerics of policies and counters")]
pub mod neurons;
#[allow(clippy::cast_possible_truncation, reason = "indices and sizes of a verified plan")]
pub mod paging;
