//! States of every kind: toys with a recurrence, a convolution, a cache or a ring go back exactly, or the
//! error names the state that cannot.
#![allow(clippy::cast_possible_truncation, reason = "numbers of tests are small")]
#![allow(clippy::unwrap_used, clippy::panic, reason = "what fails here fails the test")]

#[path = "../common/mod.rs"]
mod common;

mod acts;
mod decoding;
mod folding;
mod rings;
mod saved;
mod snapshots;
mod toy;
