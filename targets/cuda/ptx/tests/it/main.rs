//! Tests of reading, checking and executing PTX.
#![allow(clippy::cast_possible_truncation, reason = "numbers of tests are small")]
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

mod common;
mod faults;
mod kernels;
mod messages;
mod opcodes;
mod round_trip;
mod samples;
mod warps;
