//! Experts by neurons: which rows are read from flash, which stay, who computes what next (PowerInfer-2, §4.1.3 to §5).
//!
//! A neuron is the i-th row of gate and up and the i-th column of down; where an activation gives exact zeros, only the
//! active ones are needed.
//!
//! * [`bundle`]: how the three rows of a neuron lie on flash, and in how many reads they come.
//! * [`cache`]: memory in three regions, fixed, hot by clusters and cold by neurons, whose borders move with the batch size.
//! * [`pipeline`]: the five stages of a cluster, without a barrier between matrices, and with one, to compare;
//!   [`simulate()`] runs it in virtual time.
//! * [`plan`]: how many neurons are hot at a batch size, by what a trace asks for ([`Recorded`]).
//! * [`synthetic`] makes traces of activations, [`replay`] counts the bytes that each way to read takes on one.
//!
//! Nothing here reads, waits or looks at a clock: events come in, decisions go out, for memory that is real and for
//! memory that is simulated.

pub mod bundle;
pub mod cache;
mod error;
pub mod pipeline;
pub mod plan;
mod recorded;
pub mod replay;
mod simulate;
pub mod synthetic;

pub use bundle::{Bundle, Phases, RatesByBlock, RowFormat};
pub use cache::{Counts, Event, Found, Part, Regions, Segmented, Shape};
pub use error::NeuronError;
pub use pipeline::{Next, Order, Pipeline, Stage, Task};
pub use recorded::{Asked, Recorded};
pub use simulate::{Job, Outcome, Span, simulate};
