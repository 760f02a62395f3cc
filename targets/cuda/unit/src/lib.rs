//! Drives an NVIDIA GPU, as a unit of a plan. See `docs/cuda.md`, On a GPU.
//!
//! * [`Gpu`] implements [`ComputeUnit`](moec_runtime::exec::unit::ComputeUnit): GPU kernels are launched, and
//!   rows are copied.
//! * [`device`]: a GPU as its driver shows it: a context, two streams, pinned memory, a module. Code that
//!   measures one uses it, too.
//! * `api`: the functions of the driver that are called, found in `libcuda.so.1` when a GPU is first
//!   requested.
//! * [`text`]: the artifacts of a unit: PTX, and what NVIDIA's assembler made of it.
//!
//! [`NATIVE`] is what a bundle's `run` gives its subcommands, to have this unit.
//!
//! Invariant: this crate reaches `moec-ir` and `moec-runtime`, and nothing else of the workspace, so that it
//! builds beside a generated runner.
#![cfg_attr(test, allow(clippy::cast_possible_truncation, reason = "numbers of tests are small"))]

mod api;
pub mod device;
mod gpu;
#[cfg(test)]
mod tests;
pub mod text;

pub use gpu::{Gpu, open};

use moec_ir::plan::UnitRef;
use moec_runtime::Result;
use moec_runtime::cli::Native;
use moec_runtime::exec::accelerators::Executor;

/// The backend of units that this crate drives.
pub const BACKEND: &str = "cuda";

/// Executor of a unit: the first GPU of this machine.
fn executor(unit: &UnitRef) -> Result<Executor> {
    Gpu::open(&unit.name).map(|gpu| Executor::Unit(Box::new(gpu)))
}

/// This crate's unit, for the `run` of a bundle whose units are driven here.
pub const NATIVE: Native<'static> = Native { backend: BACKEND, executor: &|unit| Some(executor(unit)) };
