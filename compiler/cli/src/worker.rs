//! `moec worker`: a backend's process. Hidden; moec starts it by itself.

use moec_base::{Error, Result};
use moec_targets::backends::BACKENDS;
use std::process::ExitCode;

/// Do what a backend wants done in a process of its own, until stdin ends
#[derive(Clone, Debug, clap::Args)]
pub struct Args {
    /// The backend
    pub backend: String,
}

/// Answers requests.
///
/// # Errors
/// A backend that has no such process.
pub fn run(args: &Args) -> Result<ExitCode> {
    let backend = BACKENDS.iter().find(|f| f.name() == args.backend);
    let served = backend.and_then(|f| f.serve());
    served.ok_or_else(|| Error::usage(format!("no backend `{}` has a process of its own", args.backend)))
}
