//! Drives a graphics processor of NVIDIA's, as a unit of a plan. See `docs/cuda.md`, On a card.
//!
//! * [`Gpu`] implements [`Unit`](moec_runtime::unit::Unit): kernels of threads are launched, and rows are copied.
//! * [`card`]: a card as its driver shows it: a context, two streams, pinned memory, a module. Whoever measures one uses it, too.
//! * `api`: the functions of the driver that are called, found in `libcuda.so.1` when a card is first asked for.
//! * [`text`]: the artifacts of a unit: PTX, and what NVIDIA's assembler made of it.
//!
//! [`main`] is all of a bundle's `run`: the runtime's verbs, with this unit.
//!
//! Invariant: this crate reaches `moec-ir` and `moec-runtime`, and nothing else of the workspace, so that it builds beside a
//! generated runner.

mod api;
pub mod card;
mod gpu;
#[cfg(test)]
mod tests;
pub mod text;

pub use gpu::{Gpu, open};

use moec_ir::plan::UnitRef;
use moec_runtime::Result;
use moec_runtime::abi::KernelFn;
use moec_runtime::beside::Executor;
use moec_runtime::cli::{self, Native};
use std::process::ExitCode;

/// The family of units that this crate drives.
pub const FAMILY: &str = "cuda";

/// What drives a unit: the first card of this machine.
fn executor(unit: &UnitRef) -> Result<Executor> {
    Gpu::open(&unit.name).map(|gpu| Executor::Unit(Box::new(gpu)))
}

/// The whole of a `run` whose units are driven here: as [`cli::main`], with this crate's unit.
pub fn main(plan: &[u8], kernels: &[KernelFn]) -> ExitCode {
    cli::main_with(plan, kernels, Native { family: FAMILY, executor: &|unit| Some(executor(unit)) })
}

/// As [`main`]. Returns the exit status, for a `main` that is C's.
pub fn main_status(plan: &[u8], kernels: &[KernelFn]) -> u8 {
    cli::main_status_with(plan, kernels, Native { family: FAMILY, executor: &|unit| Some(executor(unit)) })
}
