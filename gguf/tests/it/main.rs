//! Valid, damaged and hostile files; and decoded numbers, compared with ggml's own Python package.
#![allow(clippy::cast_possible_truncation, reason = "numbers of tests are small")]
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

mod builder;
mod damage;
mod headers;
mod numbers;
mod properties;
