//! Costs of a model on a device: in time, and in joules.
//!
//! A [`model::Model`] has the shapes, [`units`] the units, and a recorded trace the loads of the experts.
//! [`work`] makes tasks of these with the costs of a device file, [`timeline`] executes them on the units'
//! queues, and [`energy`] counts joules. A [`run`] is a prompt on a placement; pass `assign_residency`
//! compares placements by the cost of a [`request`]. [`hosts`] has the costs of a model on several hosts.
//!
//! [`constants`] are figures that device files do not have, fitted to the evaluation of NPUMoE; the crate
//! `moec-papers` reproduces that evaluation and fits them.
#![expect(clippy::cast_possible_truncation, reason = "estimates: times and counts of one model")]

pub mod constants;
pub mod energy;
pub mod hosts;
pub mod model;
pub mod request;
pub mod run;
pub mod timeline;
pub mod units;
pub mod work;

pub use constants::Constants;
pub use energy::Energy;
pub use model::Model;
pub use timeline::{Queue, Task, TaskKind, Timeline};
