//! Experts that are scheduled over units and the host's memories, and move between these (TriMoE, §4.2 and §4.3).
//!
//! [`Placement`] says where the experts of a layer are. [`ExpertScheduler`] holds that for all layers: [`ExpertScheduler::dispatch`] assigns the
//! experts of a step by `sums` of units' times, and [`ExpertScheduler::moves_for`] says what moves before a layer's next
//! step, by loads that a [`Predictor`] expects (equation 8), and keeps within the time that the links have.

mod budget;
mod initial;
mod migrate;
mod placement;
mod predictor;
mod running;
mod schedule;
mod scheduler;
mod setup;
#[cfg(test)]
mod tests;

pub use placement::{Layout, Place, Placement};
pub use predictor::{ALPHA, Class, PredictionCounters, Predictor};
pub use running::Running;
pub use schedule::{Action, ExpertUnit, Move, Schedule, ScheduledUnit};
pub use scheduler::ExpertScheduler;
pub use setup::{MOST_EXPERTS, MOST_LAYERS, MOST_MEMORIES, Setup, Window};
