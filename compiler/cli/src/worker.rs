//! `moec worker`: a family's process. Hidden; moec starts it by itself.

use moec_base::{Error, Result};
use moec_targets::families::FAMILIES;
use std::process::ExitCode;

/// Do what a family wants done in a process of its own, until stdin ends
#[derive(Clone, Debug, clap::Args)]
pub struct Args {
    /// The family
    pub family: String,
}

/// Answers requests.
///
/// # Errors
/// A family that has no such process.
pub fn run(args: &Args) -> Result<ExitCode> {
    let family = FAMILIES.iter().find(|f| f.name() == args.family);
    let served = family.and_then(|f| f.serve());
    served.ok_or_else(|| Error::usage(format!("no family `{}` has a process of its own", args.family)))
}
