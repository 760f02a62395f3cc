//! The engine: calls of entry points, the units that execute steps, counters and timelines.

#[allow(clippy::cast_possible_truncation, reason = "indices and sizes of a verified plan")]
pub mod accelerators;
#[allow(clippy::cast_possible_truncation, reason = "indices and sizes of a verified plan")]
pub mod builtin;
#[allow(clippy::cast_possible_truncation, reason = "indices and sizes of a verified plan")]
pub(crate) mod call;
#[allow(clippy::cast_possible_truncation, reason = "indices and sizes of a verified plan")]
pub(crate) mod capacity_limit;
pub mod chunk;
#[allow(clippy::cast_possible_truncation, reason = "indices and sizes of a verified plan")]
pub(crate) mod clusters;
#[allow(clippy::cast_possible_truncation, reason = "indices and sizes of a verified plan")]
pub(crate) mod cpu;
#[allow(clippy::cast_possible_truncation, reason = "indices and sizes of a verified plan")]
pub mod engine;
pub(crate) mod graph_queues;
#[allow(clippy::cast_possible_truncation, reason = "indices and sizes of a verified plan")]
pub(crate) mod graph_unit;
pub mod graphs;
pub(crate) mod node_unit;
pub mod operations;
#[allow(clippy::cast_possible_truncation, reason = "indices and sizes of a verified plan")]
pub mod overflow;
#[allow(clippy::cast_possible_truncation, reason = "numerics of policies and counters")]
pub mod timeline;
#[allow(clippy::cast_possible_truncation, reason = "numerics of policies and counters")]
pub mod trace;
pub mod traffic;
pub mod unit;
pub mod unit_steps;
