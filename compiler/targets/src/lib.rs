//! The target families, one row each, and the devices that they compile for.

mod devices;
pub mod families;

pub use devices::{device, target, target_of};
