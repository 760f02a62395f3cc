//! Which unit computes which expert of a step, and who moves where before the next (TriMoE, §4.2 and §4.3).
//!
//! * [`Costs`] say what an expert costs on each unit (equations 1 to 4), [`Placement`] where the experts of a layer are.
//! * [`Scheduler`] holds both for all layers. [`Scheduler::dispatch`] assigns the experts of a step: each to the unit
//!   where it costs least, then refined as the paper does it, then by a search that leaves plateaus; the makespan is
//!   that of equations 5 to 7. [`Scheduler::moves_for`] says what moves before a layer's next step, by loads that a
//!   [`Predictor`] expects (equation 8), and keeps within the time that the links have.
//! * [`POLICIES`] is the table of who decides: TriMoE, parts of it, and the systems that it is compared with.
//!
//! Nothing here reads, waits or looks at a clock: the same decisions are made for a plan that runs and for one that
//! is simulated.

mod assignment;
mod bound;
mod budget;
mod costs;
mod error;
mod exact;
mod hottest;
mod initial;
mod layout;
mod migrate;
mod policy;
mod predictor;
mod prices;
mod refine;
mod schedule;
mod scheduler;
mod search;
mod setup;
#[cfg(test)]
mod tests;
mod ticks;

pub use costs::{Costs, Dram, NdpCosts, Table};
pub use error::MakespanError;
pub use layout::{Layout, Place, Placement};
pub use policy::{POLICIES, Policy, Refinement, Split};
pub use predictor::{ALPHA, Class, Predictor, Tally};
pub use schedule::{Action, Home, Move, Schedule, Unit};
pub use scheduler::Scheduler;
pub use setup::{MOST_DIMMS, MOST_EXPERTS, MOST_LAYERS, Setup, Window};
