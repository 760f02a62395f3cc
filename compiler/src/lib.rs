//! The ahead-of-time compiler for Mixture-of-Experts models: what is decided.

pub mod error;

pub use error::{Error, Fault, Result};
