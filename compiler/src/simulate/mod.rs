//! `moec simulate`: what a model costs on a processor and a neural processing unit that are not at hand; and what a model
//! with experts on flash does, and how long that takes, with the costs of a device file.
//!
//! A [`model::Model`] gives the shapes, [`systems`] what runs where, a recorded trace the loads of the experts. Of these
//! [`work`] makes tasks with the costs of a device file, [`timeline`] lets the units' queues execute them, [`energy`]
//! counts joules, and [`perfetto`] writes the timeline for a browser.
//!
//! [`paged`] has the runtime itself decide what of experts on flash is read and kept, under virtual time; [`costs`] says how long
//! what is computed takes.
//!
//! [`phone`] decodes by hot and cold neurons, with the runtime's policies of them.
//!
//! [`assigned`] has the runtime's scheduler give experts to units in every step, where memory modules compute.
//!
//! [`constants`] is what no device file has, found from the evaluation of NPUMoE; the crate `moec-papers` runs that evaluation
//! again, and finds them.
#![expect(clippy::cast_possible_truncation, reason = "a simulator: times and counts of one model")]

pub mod assigned;
pub mod bundle;
pub mod constants;
pub mod costs;
pub mod energy;
pub mod model;
pub mod paged;
pub mod perfetto;
pub mod phone;
pub mod request;
pub mod run;
pub mod systems;
#[cfg(test)]
mod tests;
pub mod timeline;
pub mod work;

pub use constants::Constants;
pub use energy::Energy;
pub use model::Model;
pub use systems::System;
pub use timeline::{Queue, Task, Timeline, What};
