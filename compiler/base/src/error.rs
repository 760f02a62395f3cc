//! The error type of the compiler, which backends share.

pub use moec_backend::error::{Error, Fault, Result, io_error};
