//! Experts by neurons: their layout on disk, the share of hot ones, the order of their clusters, and traces
//! for replays (PowerInfer-2). The cache is the runtime's ([`moec_runtime::offload::neurons`]).

mod activations;
pub mod bundle;
mod error;
pub mod pipeline;
pub mod plan;
mod recorded;
pub mod replay;
mod simulate;
pub mod synthetic;

pub use activations::{Activations, Recorder};
pub use bundle::{Bundle, Phases, QuantFormat, RatesByBlock};
pub use error::NeuronError;
pub use pipeline::{Next, Order, Pipeline, Stage, Task};
pub use recorded::{Demand, Recorded};
pub use simulate::{Job, Outcome, Span, simulate};
