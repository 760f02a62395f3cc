//! Executes static graphs on the Apple Neural Engine: Core ML runs a bundle's packages.
//!
//! `unit::CoreMl` implements [`Graphs`](moec_runtime::exec::graphs::Graphs). A package is compiled for the
//! machine once (`cache`), and each of its functions is loaded as a model of its own. A call gives Core ML
//! the caller's memory (`strides` describes its layout). `compute_plan` reports the unit that Core ML prefers for
//! each operation.
//!
//! [`NATIVE`] is what a bundle's `run` gives its subcommands, to have this unit. Only macOS has Core ML:
//! elsewhere it brings none.
//!
//! Properties that Apple documents, and this crate relies on:
//! * functions of a package are chosen by `MLModelConfiguration.functionName`, and states exist, from macOS
//!   15 on;
//! * `MLState` is a handle that is given to each prediction, begins as zeros, and must see one prediction at
//!   a time;
//! * an `MLMultiArray` over memory of one's own copies nothing;
//! * Core ML may ignore a backing that is offered for an output, and then returns an array of its own, whose
//!   strides need not be dense;
//! * `MLComputePlan` names a preferred unit for each operation that it plans (macOS 14.4), and calls back from a
//!   thread of its own.
//!
//! Known from other projects, and not documented: functions of one package accept the same `MLState` (ANEMLL
//! runs prefill and decode like this). The Neural Engine writes only to memory of its own kind (`IOSurface`),
//! so Core ML copies results into a plain backing.
//!
//! **Not executed.** No test of this project runs on a Mac. What is portable here (the cache of compiled
//! packages, strided copies, names of operators) is tested everywhere; the calls of Core ML are compiled for macOS by `cargo
//! xtask check-apple`, and no more. Exceptions of Objective-C are not caught: Core ML reports errors by
//! values, and an exception ends the process.
//!
//! Invariant: this crate reaches `moec-ir` and `moec-runtime`, and nothing else of the workspace, so that it
//! builds beside a generated runner. `unsafe` is in `unit.rs` and `compute_plan.rs`.
#![allow(clippy::cast_possible_truncation, reason = "indices and sizes of a verified plan")]

#[cfg(any(target_os = "macos", test))]
mod cache;
#[cfg(target_os = "macos")]
mod compute_plan;
#[cfg(any(target_os = "macos", test))]
mod operators;
#[cfg(any(target_os = "macos", test))]
mod strides;
#[cfg(target_os = "macos")]
mod unit;

use moec_runtime::Result;
use moec_runtime::cli::Native;
use moec_runtime::exec::accelerators::Executor;

/// The backend of units that this crate executes.
pub const BACKEND: &str = "coreml";

/// This crate's unit, for the `run` of a bundle whose static graphs are executed here.
pub const NATIVE: Native<'static> = Native { backend: BACKEND, executor: &|_| open() };

/// Core ML of this machine; `None` on systems without it.
///
/// # Errors
/// A system that is too old, or has no cache folder.
#[cfg(target_os = "macos")]
pub fn open() -> Option<Result<Executor>> {
    Some(unit::CoreMl::new().map(|graphs| Executor::Graphs(Box::new(graphs))))
}

/// Core ML of this machine: this system has none.
#[cfg(not(target_os = "macos"))]
pub fn open() -> Option<Result<Executor>> {
    None
}
