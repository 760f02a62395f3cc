//! Modelled and failing devices for the runtime's disk reader, and measurements of a disk for a model of it.

mod clock;
pub mod fault;
pub mod measure;
mod model;
mod virtual_disk;

pub use clock::VirtualClock;
pub use model::{Link, Modelled};
pub use virtual_disk::VirtualDisk;
