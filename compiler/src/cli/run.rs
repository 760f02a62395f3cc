//! `moec run`.

use super::verbs;
use crate::Result;
use crate::progress::Progress;
use std::ffi::OsString;
use std::path::PathBuf;
use std::process::ExitCode;

/// Run a bundle's own verbs in this process
///
/// The same as `BUNDLE/run VERB …`, for machines without the linked program: generate, logits, bench, info. A bundle is a
/// program: run only what you trust.
#[derive(Clone, Debug, clap::Args)]
pub struct Args {
    /// Emulate what this machine lacks, slowly: AMX instructions, or the unit that executes the bundle's packages. Stands
    /// before the verb
    #[arg(long)]
    pub emulate: bool,
    /// Run only if this public key's owner has signed the bundle and every file is as it was. Stands before the verb
    #[arg(long, value_name = "PUB")]
    pub key: Option<PathBuf>,
    /// The bundle
    pub bundle: PathBuf,
    /// Verb and its arguments, passed on as they are
    #[arg(value_name = "ARGS", trailing_var_arg = true, allow_hyphen_values = true)]
    pub args: Vec<OsString>,
}

/// Runs; gives the exit code of the bundle's verb.
///
/// # Errors
/// The bundle cannot be opened, or its verb fails.
pub fn run(args: &Args, progress: &Progress) -> Result<ExitCode> {
    verbs::run(args, progress)
}
