//! Experts by neurons: how they lie on disk, which are hot, in which order their clusters are read and computed, and traces to
//! replay them on (PowerInfer-2). The cache is the runtime's ([`moec_runtime::offload::neurons`]).

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
