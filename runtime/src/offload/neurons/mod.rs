//! Experts by neurons: which stay in memory (PowerInfer-2, §4.2).
//!
//! A neuron is the i-th row of gate and up and the i-th column of down; where an activation gives exact zeros, only the
//! active ones are needed.
//!
//! * [`cache`]: memory in three regions, fixed, hot by clusters and cold by neurons, whose borders move with the batch size.
//!
//! Nothing here reads, waits or looks at a clock: events come in, decisions go out, for memory that is real and for
//! memory that is simulated.

pub mod cache;
mod error;

pub use cache::{CacheLookup, Counts, Event, Part, Regions, Segmented, Shape};
pub use error::NeuronError;
