//! Devices that are modelled or that fail, for the runtime's reader of disks, and what measures a disk so that it can be modelled.

mod clock;
mod disk;
pub mod fault;
pub mod measure;
mod model;

pub use clock::VirtualClock;
pub use disk::VirtualDisk;
pub use model::{Link, Modelled};
