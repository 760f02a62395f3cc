//! Execution: blocks of warps, an instruction of a warp at a time.

mod access;
mod block;
mod clocks;
mod error;
mod launch;
mod matrix;
mod report;
mod settings;
mod shared;
mod together;
mod turns;
mod warp;

pub use error::{ExecutionError, Kind, LaunchError};
pub use launch::{Argument, Program};
pub use report::{ClassCount, Report, Traffic};
pub use settings::Launch;
