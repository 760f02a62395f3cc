//! Residency of single neurons of experts (PowerInfer-2, §4.2).
//!
//! A neuron is the i-th row of gate and up and the i-th column of down; if an activation gives exact zeros,
//! only the active ones are needed.
//!
//! * [`cache`]: memory in three regions, fixed, hot by clusters and cold by neurons, whose borders move with
//!   the batch size.
//!
//! Nothing here reads, waits or looks at a clock: requests come in, decisions go out, for real and for
//! simulated memory.

pub mod cache;
mod error;

pub use cache::{CacheLookup, Counts, Event, Part, Regions, Segmented, Shape};
pub use error::NeuronError;
