//! Experts of a layer over a GPU, the processor and the link between them (HybriMoE).
//!
//! * [`Costs`] say what an expert takes on each of the three, with what the first task on each takes more (§IV-B, Figure 3e).
//! * [`Scheduler::schedule`] divides the [`Task`]s of a layer: three timelines are filled in turn as the paper does it, or the
//!   best of all cuts through the experts by load is taken, mended and searched on ([`Policy`] is the table, with the fixed splits that
//!   others use).
//! * [`prefetch`] weighs experts of the next layers by what the simulated layer gains from having them on the GPU (§IV-C).
//! * [`Levels`] keeps count of experts on flash, in the host's memory and on the GPU: two caches, one inside of the other (§IV-D).
//! * [`Director`] puts these together for a plan that runs: who computes a layer's experts, who is brought into which frame, and when.
//!   [`SYSTEMS`] is the table of what builds can ask for.
//!
//! Nothing here reads, waits or looks at a clock: the same decisions are made for a plan that runs and for one that is
//! simulated. All times are in microseconds.

mod allocation;
mod costs;
mod cut;
pub mod director;
mod error;
mod levels;
mod paper;
mod policy;
pub mod prefetch;
mod repair;
mod schedule;
mod scheduler;
mod search;
mod system;
#[cfg(test)]
mod tests;

pub use costs::{Costs, UnitCosts};
pub use director::Director;
pub use error::HybridError;
pub use levels::{Level, Levels, Moved};
pub use policy::{Order, POLICIES, Policy};
pub use schedule::{Free, Run, Schedule, Task, Unit};
pub use scheduler::Scheduler;
pub use system::{
    ADAPMOE, FIDDLER, HYBRIMOE, KTRANSFORMERS, Keeps, LLAMA_CPP, LRU, MOEC, MRS, MRS_BYPASS, SYSTEMS, System,
};
