//! The Core ML backend.
//!
//! [`emit`] writes [programs](program) for the Neural Engine: groups of experts at fixed capacities,
//! attention over a chunk with its KV cache as state, the head in parts. [`helper`] starts `moec-coreml`, a
//! separate program that turns them into `.mlpackage` folders with coremltools, wherever Python runs. So
//! building for a Mac requires no Mac. [`subgraphs`] finds in a Graph the parts that become programs, and
//! [`legalise`] converts them to the form that the Neural Engine runs. [`backend`] is the interface to the
//! compiler. [`package`] reads a saved `.mlpackage` from disk without trusting it, and [`exec`] executes its
//! functions in fp16. [`check`] tests by the file that the Neural Engine can run them.
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
pub mod program;
pub mod subgraphs;

pub use backend::CoreMl;
