//! `moec simulate`: what a model costs on a processor and a neural processing unit that are not at hand.
//!
//! A [`model::Model`] gives the shapes, [`systems`] what runs where, a recorded trace the loads of the experts. Of these
//! [`work`] makes tasks with the costs of a device file, [`timeline`] lets the units' queues execute them, [`energy`]
//! counts joules, and [`perfetto`] writes the timeline for a browser.
//!
//! [`paper`] holds what NPUMoE measured, [`fit`] finds the constants that no device file has from some of these
//! figures, [`reproduce`] puts the ratios and [`figures`] everything else beside what is simulated, and [`page`] writes all of it
//! as a page of the documentation. Nothing else knows the paper's results.

pub mod bundle;
pub mod capacities;
pub mod energy;
pub mod figures;
pub mod fit;
pub mod model;
pub mod page;
pub mod paper;
pub mod perfetto;
pub mod recorded;
pub mod reproduce;
pub mod request;
pub mod run;
pub mod systems;
#[cfg(test)]
mod tests;
pub mod timeline;
pub mod work;

pub use energy::Energy;
pub use fit::Constants;
pub use model::Model;
pub use systems::System;
pub use timeline::{Queue, Task, Timeline, What};
