//! The ahead-of-time compiler for Mixture-of-Experts models: what is decided.
//!
//! [`pipeline`] lists the passes in order; [`import`] is the only place that knows Hugging Face;
//! [`bundle`] writes what comes out; [`cli`] is what the user sees.
#![cfg_attr(test, allow(clippy::cast_possible_truncation, reason = "numbers of tests are small"))]

pub mod build;
pub mod bundle;
pub mod cache_dir;
pub mod calibrate;
pub mod cli;
pub mod config;
pub mod decisions;
mod disk;
pub mod error;
pub mod evaluate;
pub mod families;
pub mod filetest;
pub mod hashing;
pub mod human;
pub mod import;
pub mod interrupt;
mod locked_folder;
pub mod mix;
mod objects;
pub(crate) mod packed;
pub mod passes;
pub mod pipeline;
pub mod profile;
pub mod progress;
pub mod quality;
mod scratch;
pub mod simulate;
pub mod synth;
pub mod targets;
pub mod thresholds;
pub mod tools;
pub mod trained;
pub mod tuner;
pub mod twin;
pub mod verify;

pub use error::{Error, Fault, Result};
