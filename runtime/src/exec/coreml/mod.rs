//! Static graphs on the Apple Neural Engine: packages are executed by Core ML.
//!
//! [`CoreMl`] implements [`Graphs`](crate::exec::graphs::Graphs). A package is compiled for the machine once (`cache`), each
//! of its functions is loaded as a model of its own, and a call hands Core ML the caller's memory (`strides` says how
//! it lies there).
//!
//! What Apple documents, and this module relies on:
//! * functions of a package are chosen by `MLModelConfiguration.functionName`, and states exist, from macOS 15 on;
//! * `MLState` is a handle that is given to each prediction, begins as zeros, and must see one prediction at a time;
//! * an `MLMultiArray` over memory of one's own copies nothing;
//! * Core ML may ignore a backing that is offered for an output, and then returns an array of its own, whose strides need
//!   not be dense.
//!
//! What is known from others, and not documented: functions of one package accept the same `MLState` (ANEMLL runs
//! prefill and decode like this); the Neural Engine writes only to memory of its own kind (`IOSurface`), so Core ML
//! copies results into a plain backing.
//!
//! **Not executed.** No test of this project runs on a Mac. What is portable here (the cache of compiled packages, strided
//! copies) is tested everywhere; the calls of Core ML are compiled for macOS by `cargo xtask check-apple`, and no more.
//! Exceptions of Objective-C are not caught: Core ML reports errors by values, and an exception ends the process.

mod cache;
mod strides;
#[cfg(target_os = "macos")]
mod unit;

#[cfg(target_os = "macos")]
pub use unit::CoreMl;
