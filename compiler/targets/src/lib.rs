//! The backends, one row each, and the devices that they compile for.

pub mod backends;
mod devices;

pub use devices::{device, target, target_of};
