//! Steps of a model whose experts are shared by a GPU, the CPU and NDP units, in virtual time.
//!
//! [`moec_runtime::schedule::scheduled::ExpertScheduler`], which also serves a running plan, decides the unit and
//! the moves of each expert. The simulation computes the consequences: experts wait for their units, weights
//! travel, and units that read the same memory at once slow each other down. A scheduler adds up times
//! (TriMoE, §4.2, equations 5 to 7); each [`LayerReport`] includes the difference to the simulated time.
//!
//! Nothing is executed, and nothing of a model but its shapes is known.

mod error;
mod event;
mod fluid;
mod rates;
mod report;
mod simulator;
mod system;
#[cfg(test)]
mod tests;
mod timeline;
mod work;

pub use error::StepsError;
pub use event::{Event, Track};
pub use rates::Rates;
pub use report::{Busy, LayerReport, StepReport};
pub use simulator::Simulator;
pub use system::System;
pub use work::{Before, Rows};
