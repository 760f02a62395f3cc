//! Tests of the crate's public interface, in one binary.
#![allow(clippy::cast_possible_truncation, reason = "numbers of tests are small")]
// The lint's exception for tests does not apply to their helper functions.
#![allow(clippy::unwrap_used)]

mod common;
mod experts;
mod hazards;
mod hot;
mod launches;
mod memories;
mod model;
mod ops;
mod plans;
mod state;
mod text;
mod verify;
mod weights;
