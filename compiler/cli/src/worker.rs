//! `moec worker`: a backend's process. Hidden; moec starts it by itself.

use moec_base::{Error, Result};
use moec_targets::backends::BACKENDS;
use std::process::ExitCode;

/// Serve requests of a backend in a separate process, until stdin ends
#[derive(Clone, Debug, clap::Args)]
pub struct Args {
    /// The backend
    pub backend: String,
}

/// Serves requests.
///
/// # Errors
/// Fails if the backend has no such process.
pub fn run(args: &Args) -> Result<ExitCode> {
    let backend = BACKENDS.iter().find(|f| f.name() == args.backend);
    let served = backend.and_then(|f| f.serve());
    served.ok_or_else(|| Error::usage(format!("no backend `{}` has a process of its own", args.backend)))
}
