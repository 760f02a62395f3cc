//! `moec simulate`: what a model costs on a CPU and a neural processing unit that are not at hand; and what a
//! model with experts on disk does, and how long that takes, with the costs of a device file.
//!
//! [`systems`] says what runs where; [`moec_costs`] executes it, and [`perfetto`] writes the timeline for a
//! browser.
//!
//! [`paged`] has the runtime itself decide what of experts on disk is read and kept, under virtual time;
//! [`costs`] says how long what is computed takes.
//!
//! [`phone`] decodes by hot and cold neurons, with the runtime's policies of them.
//!
//! [`assigned`] has the runtime's scheduler give experts to units in every step, with NDP DIMMs.
#![expect(clippy::cast_possible_truncation, reason = "a simulator: times and counts of one model")]

pub mod assigned;
pub mod bundle;
pub mod costs;
pub mod paged;
pub mod perfetto;
pub mod phone;
pub mod systems;
#[cfg(test)]
mod tests;

pub use systems::System;
