//! A layer as three timelines: a GPU, the CPU, and the link over which experts arrive (HybriMoE, §IV-B).
//!
//! [`TimelineScheduler::schedule`] divides the [`Task`]s of a layer by one of the
//! [solvers](crate::schedule::Solver). One fills three timelines in turn, as in the paper. One takes the best
//! of all cuts through the experts by load, and improves it by moves, swaps and a search. The others follow a
//! fixed rule. All times are in microseconds.

mod allocation;
mod cut;
mod paper;
mod repair;
mod scheduler;
mod search;
mod task;

pub use scheduler::TimelineScheduler;
pub use task::{Free, Run, Task, Timelines};
