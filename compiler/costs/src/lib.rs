//! Costs of a model on a device: in time, and in joules.
//!
//! A [`model::Model`] gives the shapes, [`units`] what runs where, a recorded trace the loads of the experts. Of these [`work`] makes
//! tasks with the costs of a device file, [`timeline`] lets the units' queues execute them, and [`energy`] counts joules. A
//! [`run`] is a prompt on a placement; a [`request`] is what pass `assign_residency` compares placements by.
//!
//! [`constants`] is what no device file has, found from the evaluation of NPUMoE; the crate `moec-papers` runs that evaluation
//! again, and finds them.
#![expect(clippy::cast_possible_truncation, reason = "estimates: times and counts of one model")]

pub mod constants;
pub mod energy;
pub mod model;
pub mod request;
pub mod run;
pub mod timeline;
pub mod units;
pub mod work;

pub use constants::Constants;
pub use energy::Energy;
pub use model::Model;
pub use timeline::{Queue, Task, Timeline, What};
