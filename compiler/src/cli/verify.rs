//! `moec verify`.

use super::verbs;
use crate::progress::Progress;
use crate::{Error, Result};
use std::path::PathBuf;

/// Execute a bundle's artifacts against the reference, and report the error
///
/// Checks every file against its hash, then runs every compiled step on this machine beside the reference
/// evaluator. A bundle is a program, and this executes it: of bundles that you do not trust, use `--static`, which executes
/// nothing. Hashes and plan are checked against damage, not against malice: who can change a file can change its hash, too.
/// Against that there are signatures (`--key`), and the manifest's own SHA-256, which is printed to be compared.
#[derive(Clone, Debug, clap::Args)]
pub struct Args {
    /// The bundle
    pub bundle: PathBuf,
    /// Do everything but execute the bundle's code
    ///
    /// Hashes of all files and nothing else in the folder; plan, Graph, decisions and tokenizer; the symbols of the object
    /// code; packages; with `--source` every packed weight.
    #[arg(long = "static", conflicts_with = "bound")]
    pub without_execution: bool,
    /// Check the bundle's signature against this public key first
    #[arg(long, value_name = "PUB")]
    pub key: Option<PathBuf>,
    /// Checkpoint to compare the packed weights with
    #[arg(long, value_name = "HF_DIR")]
    pub source: Option<PathBuf>,
    /// Largest error of a step that passes [default: what its formats and arithmetic explain]
    ///
    /// As root mean square, relative to what is right. Steps in f32 may be off by 1e-4.
    #[arg(long, value_name = "X")]
    pub bound: Option<f64>,
    /// Print one JSON object to stdout
    #[arg(long)]
    pub json: bool,
}

/// Verifies.
///
/// # Errors
/// The bundle cannot be executed here, or it is wrong.
pub fn run(args: &Args, progress: &Progress) -> Result<()> {
    if let Some(bound) = args.bound
        && !(bound.is_finite() && bound >= 0.0)
    {
        return Err(Error::usage(format!("`--bound` is {bound}, expected a number of at least 0")));
    }
    verbs::verify(args, progress)
}
