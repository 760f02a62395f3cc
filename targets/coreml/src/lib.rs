//! The Core ML target family.
//!
//! [`package`] reads a saved `.mlpackage` back from disk and trusts nothing in it, [`exec`] executes its
//! functions in fp16, and [`check`] tests from the file that the Neural Engine can run them.

pub mod check;
pub mod exec;
pub mod package;
