//! Tests of the library with its emulator: results of graphs, saving and loading, errors.
#![allow(clippy::cast_possible_truncation, reason = "numbers of tests are small")]
#![allow(clippy::unwrap_used, clippy::panic, clippy::print_stdout, reason = "a test fails by panicking")]

mod attention;
mod contexts;
mod linear;
mod mixed;
mod operators;
mod process;
mod refused;
mod rounding;
mod support;
