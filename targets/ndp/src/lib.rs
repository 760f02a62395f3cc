//! The backend of NDP DIMMs.
//!
//! The unit is that of TriMoE (§4.1): on the buffer chip of a DIMM, it multiplies the experts that lie in this DIMM.
//! [`image`] says what an expert is made of there, [`allot`] which rows it gets, [`emit`](mod@emit) which command stream
//! computes it, [`artifact`] how the streams of a layer are stored. [`machine`] executes streams and says how long they take;
//! [`evaluate`] is what its results are held against. [`steps`] are steps of a whole model in virtual time. [`backend`] is what
//! the compiler asks, [`mod@unit`] what the runtime runs.
//!
//! Invariant: nothing of the compiler or the runtime names this crate, but its row in the table of backends.
#![cfg_attr(test, allow(clippy::cast_possible_truncation, reason = "numbers of tests are small"))]

pub mod allot;
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
