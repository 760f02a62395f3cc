//! The compiler's error, which target families share.

pub use moec_family::error::{Error, Fault, Result, io_error};
