//! The Core ML backend.
//!
//! [`emit`] writes [programs](program) for the Neural Engine: groups of experts at fixed capacities, attention over a
//! chunk with its KV cache as state, the head in parts. [`helper`] starts `moec-coreml`, a program of its own that
//! turns them into `.mlpackage` folders with coremltools, wherever Python runs: no Mac is needed to build for one.
//! [`parts`] finds in a Graph what becomes programs, [`legalise`] brings it to the form that the Neural Engine runs, and
//! [`backend`] is the row by which the compiler knows all of it.
//! [`package`] reads a saved `.mlpackage` back from disk and trusts nothing in it, [`exec`] executes its functions in
//! fp16, and [`check`] tests from the file that the Neural Engine can run them.
//!
//! Invariant: this crate knows no model family, and links no Python.
#![cfg_attr(test, allow(clippy::cast_possible_truncation, reason = "numbers of tests are small"))]

pub mod backend;
pub mod check;
pub mod emit;
pub mod exec;
pub mod helper;
pub mod legalise;
pub mod package;
pub mod parts;
pub mod program;

pub use backend::CoreMl;
