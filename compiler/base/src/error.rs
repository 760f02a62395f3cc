//! The compiler's error, which backends share.

pub use moec_backend::error::{Error, Fault, Result, io_error};
