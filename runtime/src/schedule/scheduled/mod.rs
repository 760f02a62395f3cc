//! Experts that are scheduled over units and the host's memories, and move between these (TriMoE, §4.2 and
//! §4.3).
//!
//! [`Placement`] is the location of the experts of a layer, and [`ExpertScheduler`] holds the placements of
//! all layers. [`ExpertScheduler::dispatch`] assigns the experts of a step by `sums` of units' times.
//! [`ExpertScheduler::moves_for`] chooses the moves before a layer's next step, by the loads that a
//! [`Predictor`] expects (equation 8), within the free time of the links. Until a move has ended, its expert
//! is scheduled where it was. [`Running`] does all this for a running plan.

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
pub use running::{MoveCounts, Running, StepLoads};
pub use schedule::{Action, ExpertUnit, Move, Schedule, ScheduledUnit, Streamed};
pub use scheduler::ExpertScheduler;
pub use setup::{MOST_EXPERTS, MOST_LAYERS, MOST_MEMORIES, Setup, Window, Windows};
