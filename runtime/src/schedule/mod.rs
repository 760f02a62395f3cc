//! Units of the experts of a step, and places of experts, where several units can compute them.
//!
//! * [`Costs`] are the prices: what an expert takes on each unit and on each link. [`System`] says who
//!   divides a layer's experts ([`Solver`]), what stays where ([`Keeps`]), and what is predicted ([`Prediction`]).
//! * A layer's time is modelled in two ways, each with its solvers: `sums` of units' times, and [`timelines`] on which experts arrive.
//! * Where experts are is kept in two ways: [`scheduled`] over the memories of the host and frames of each layer, with loads
//!   predicted; [`cached`] in frames that all layers share, with gates predicted.
//! * [`dispatch`] calls one of these at each dispatch of a running plan, and does what it says.
//!
//! Nothing here but [`dispatch`] reads, waits or looks at a clock: the same decisions are made for a plan that runs and for one that is
//! simulated. Nothing here knows what a unit is.

#[allow(clippy::cast_possible_truncation, reason = "numerics of policies and counters")]
pub mod cached;
#[allow(clippy::cast_possible_truncation, reason = "numerics of policies and counters")]
mod costs;
pub mod decision;
#[allow(clippy::cast_possible_truncation, reason = "indices and sizes of a verified plan")]
pub mod dispatch;
mod error;
mod policy;
#[allow(clippy::cast_possible_truncation, reason = "numerics of policies and counters")]
pub mod scheduled;
#[allow(clippy::cast_possible_truncation, reason = "numerics of policies and counters")]
mod sums;
#[allow(clippy::cast_possible_truncation, reason = "numerics of policies and counters")]
pub mod timelines;

pub use costs::{Costs, NearCosts, Table, UnitCosts};
pub use error::ScheduleError;
pub use policy::*;
pub use scheduled::ExpertUnit;
