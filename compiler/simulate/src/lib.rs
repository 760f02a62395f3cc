//! `moec simulate`: times of a model on a CPU and an NPU that need not be available, and the decisions and
//! times of a model with experts on disk, by the costs of a device file.
//!
//! [`systems`] has the placements; [`moec_costs`] executes them, and [`perfetto`] writes the timeline for a
//! browser.
//!
//! [`paged`] has the runtime itself decide what of experts on disk is read and kept, under virtual time;
//! [`costs`] says how long what is computed takes.
//!
//! [`phone`] decodes by hot and cold neurons, with the runtime's policies of them.
//!
//! [`hosts`] compares the divisions of a model between numbers of hosts.
//!
//! [`assigned`] has the runtime's scheduler give experts to units in every step, with NDP DIMMs.
#![expect(clippy::cast_possible_truncation, reason = "a simulator: times and counts of one model")]

pub mod assigned;
pub mod bundle;
pub mod costs;
pub mod hosts;
pub mod paged;
pub mod perfetto;
pub mod phone;
pub mod systems;
#[cfg(test)]
mod tests;

pub use systems::System;
