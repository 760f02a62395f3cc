//! `moec verify`.

use super::verbs;
use crate::progress::Progress;
use crate::{Error, Result};
use std::path::PathBuf;

/// Execute a bundle's artifacts against the reference, and report the error
///
/// Checks every file against its hash, then runs every compiled step on this machine beside the reference
/// evaluator.
#[derive(Clone, Debug, clap::Args)]
pub struct Args {
    /// The bundle
    pub bundle: PathBuf,
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
