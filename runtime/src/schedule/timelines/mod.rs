//! A layer as three timelines: a GPU, the CPU, and the link over which experts arrive (HybriMoE, §IV-B).
//!
//! [`TimelineScheduler::schedule`] divides the [`Task`]s of a layer by one of the [solvers](crate::schedule::Solver): three timelines are filled
//! in turn as the paper does it, or the best of all cuts through the experts by load is taken, mended and searched on, or each goes
//! where a fixed rule says. All times are in microseconds.

mod allocation;
mod cut;
mod paper;
mod repair;
mod scheduler;
mod search;
mod task;

pub use scheduler::TimelineScheduler;
pub use task::{Free, Run, Task, Timelines};
