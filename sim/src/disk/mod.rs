//! Devices that are modelled or that fail, for the runtime's reader of disks, and what measures a disk so that it can be modelled.

mod clock;
pub mod fault;
pub mod measure;
mod model;
mod virtual_disk;

pub use clock::VirtualClock;
pub use model::{Link, Modelled};
pub use virtual_disk::VirtualDisk;
