//! Which unit computes which expert of a step, where several can.

#[allow(clippy::cast_possible_truncation, reason = "indices and sizes of a verified plan")]
pub mod assign;
#[allow(clippy::cast_possible_truncation, reason = "numerics of policies and counters")]
pub mod hybrid;
#[allow(clippy::cast_possible_truncation, reason = "numerics of policies and counters")]
pub mod makespan;
