//! Execution: blocks of warps, an instruction of a warp at a time.
#![expect(
    clippy::cast_possible_truncation,
    reason = "registers hold 64 bits of which an instruction takes its own; places were checked when the module was"
)]

mod access;
mod block;
mod clocks;
mod collective;
mod error;
mod launch;
mod matrix;
mod report;
mod settings;
mod shared;
mod warp;
mod warp_scheduler;

pub use error::{ExecutionError, Kind, LaunchError};
pub use launch::{Argument, Program};
pub use report::{ClassCount, Report, Traffic};
pub use settings::Launch;
