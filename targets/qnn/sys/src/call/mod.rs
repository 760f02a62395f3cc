//! Calls of the library: every `unsafe` block of this crate is below here.
//!
//! One call at a time: a lock holds the others back, so that what is logged belongs to the call that is under way, and nothing
//! depends on whether the library minds several threads.

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
