//! Devices that are modelled or that fail, for the runtime's flash reader.

mod clock;
pub mod fault;
mod model;

pub use clock::VirtualClock;
pub use model::{Link, Modelled};
