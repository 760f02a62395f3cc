//! Tests of reading, checking and executing PTX.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

mod common;
mod faults;
mod kernels;
mod messages;
mod opcodes;
mod round_trip;
mod samples;
mod warps;
