//! Steps of a model whose experts are shared by a GPU, the CPU and near-data units, in virtual time.
//!
//! Who computes what and who moves where is decided by [`moec_runtime::schedule::scheduled::Scheduler`], the same that a plan
//! asks that runs. Here is what then happens: experts wait for their units, weights travel, and units that read the
//! same memory at once takes rate from the others. A scheduler adds up times (TriMoE, §4.2, equations 5 to 7); how
//! far that is from what is simulated is part of each [`LayerReport`].
//!
//! Nothing is executed, and nothing of a model but its shapes is known.

mod error;
mod event;
mod fluid;
mod lanes;
mod rates;
mod report;
mod simulator;
mod system;
#[cfg(test)]
mod tests;
mod work;

pub use error::StepsError;
pub use event::{Event, Track};
pub use rates::Rates;
pub use report::{Busy, LayerReport, StepReport};
pub use simulator::Simulator;
pub use system::System;
pub use work::{Before, Rows};
