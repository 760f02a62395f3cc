//! Calls of the library: every `unsafe` block of this crate is below here.
//!
//! One call at a time: a lock serialises them, so that log lines belong to the current call, and thread
//! safety of the library does not matter.

mod context;
mod device;
mod dlc;
mod loaded;
mod log;
mod marshal;
mod system;

pub use context::{Context, Graph};
pub use device::{Backend, Device};
pub use dlc::write_dlc;
pub use system::{BinaryInfo, GraphInfo, System, TensorInfo};
