//! Tests of reading, executing and checking packages.
#![allow(clippy::cast_possible_truncation, reason = "numbers of tests are small")]
#![allow(
    clippy::panic,
    clippy::print_stdout,
    reason = "a test fails by panicking, and one prints its measurement"
)]

mod builder;
mod checks;
mod compressed;
mod damage;
mod errors;
mod exactness;
mod golden;
mod ops;
mod states;
