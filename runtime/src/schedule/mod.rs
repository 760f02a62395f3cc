//! Schedules of experts that several units can compute: the unit of each expert of a step, and the placement
//! of experts.
//!
//! * [`Costs`]: the time of an expert on each unit and on each link. [`System`]: the solver for a layer's
//!   experts ([`Solver`]), the placement ([`GpuResidents`]), and the prediction ([`Prediction`]).
//! * A layer's time is modelled in two ways, each with its solvers: `sums` of units' times, and [`timelines`]
//!   on which experts arrive.
//! * Experts are placed in two ways. [`scheduled`] uses the memories of the host and frames of each layer,
//!   with predicted loads. [`cached`] uses frames that all layers share, with predictions by gates.
//! * [`dispatch`] calls one of these at each dispatch of a running plan, and carries out its decisions.
//!
//! * [`warm_up`] corrects the costs of a plan by what the first calls of a run measure.
//!
//! Only [`dispatch`] reads, waits or looks at a clock: with equal costs, a running plan and a simulated one
//! get the same decisions. Nothing here depends on the implementation of a unit.

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
pub mod warm_up;

pub use costs::{Costs, NearCosts, Table, UnitCosts};
pub use error::ScheduleError;
pub use policy::*;
pub use scheduled::ExpertUnit;
