//! The backend of NDP DIMMs.
//!
//! The unit is that of TriMoE (§4.1): on the buffer chip of a DIMM, it multiplies the experts in this DIMM.
//! [`image`] is the form of an expert there, and [`allocation`] assigns its rows. [`emit`](mod@emit) writes
//! the command stream that computes it, and [`artifact`] stores the streams of a layer. [`machine`] executes
//! streams and gives their time; [`evaluate`] is the reference for their results. [`steps`] simulates steps
//! of a whole model in virtual time. [`backend`] is the interface to the compiler, [`mod@unit`] the one to
//! the runtime.
//!
//! Invariant: nothing of the compiler or the runtime names this crate, but its row in the table of backends.
#![cfg_attr(test, allow(clippy::cast_possible_truncation, reason = "numbers of tests are small"))]

pub mod allocation;
pub mod artifact;
pub mod backend;
pub mod emit;
pub mod evaluate;
pub mod image;
pub mod kinds;
pub mod machine;
mod sim;
pub mod steps;
pub mod unit;

pub use backend::Ndp;

/// Name of the backend.
pub const NAME: &str = "ndp";
