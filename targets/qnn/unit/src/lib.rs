//! Executes the context binaries of a bundle as steps of a plan, where QNN's library runs: on a phone with a
//! Hexagon, or on the library's emulator of one. See `docs/qnn.md`, On a phone.
//!
//! * [`Hexagon`] implements [`Graphs`](moec_runtime::exec::graphs::Graphs): graphs are found by their names
//!   in the contexts of a bundle, and executed in this process.
//! * `chip`: the library with what is loaded of a bundle, on a thread of its own.
//! * [`queue`]: the requests to that thread: to execute, and to have graphs ready that a call will come to.
//!   Another thread reads contexts meanwhile (PowerInfer-2, §4.1.3).
//! * `loader`: which contexts are loaded, and which are freed where memory has a budget.
//! * [`attention`]: what graphs of attention are given, and the keys and values that are kept for them.
//! * `graph_io`: numbers as a graph's inputs and outputs hold them.
//!
//! [`NATIVE`] is what a bundle's `run` gives its subcommands, to have this unit.
//!
//! Invariant: this crate reaches `moec-ir`, `moec-runtime` and `moec-qnn-sys`, and nothing else of the
//! workspace, so that it builds beside a generated runner. It has no `unsafe` code.
#![cfg_attr(test, allow(clippy::cast_possible_truncation, reason = "numbers of tests are small"))]

pub mod attention;
mod chip;
mod graph_io;
mod loader;
pub mod queue;
mod unit;

pub use loader::artifacts;
pub use unit::{BACKEND, Hexagon, NATIVE};
