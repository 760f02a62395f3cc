//! `moec build`.

use super::verbs;
use crate::Result;
use crate::progress::Progress;
use std::path::PathBuf;

/// Compile a model into a bundle
///
/// A bundle is a folder with packed weights, object code, a plan and a program that runs it. It is written
/// whole or not at all, and replaces an earlier bundle of the same name. Building twice gives the same bytes.
#[derive(Clone, Debug, clap::Args)]
pub struct Args {
    /// What to build
    #[arg(value_name = "MODEL.TOML")]
    pub config: PathBuf,
    /// A name that `moec targets` lists, or a path of your own device file
    #[arg(long, short, value_name = "TARGET", default_value = "native")]
    pub target: String,
    /// Folder to write [default: the checkpoint's name, the target and `.moec`]
    #[arg(long, short, value_name = "DIR")]
    pub output: Option<PathBuf>,
    /// Time kernels on this machine, and take the fastest; results are kept for later builds
    #[arg(long)]
    pub tune: bool,
    /// Seconds that `--tune` takes at most
    #[arg(long, value_name = "SECONDS", default_value_t = 60, value_parser = clap::value_parser!(u32).range(1..=86400))]
    pub tune_time: u32,
    /// Print the IR after this pass to stdout
    #[arg(long, value_name = "PASS")]
    pub print_after: Option<String>,
    /// Stop after this pass, and write nothing
    #[arg(long, value_name = "PASS")]
    pub stop_after: Option<String>,
    /// Write no `run` program (it needs a C compiler; for machines of another kind, cargo)
    #[arg(long)]
    pub no_run: bool,
    /// Compile `run` with cargo from the sources in the bundle, instead of linking the runtime that moec carries
    #[arg(long, conflicts_with = "no_run")]
    pub run_from_source: bool,
    /// Pack every weight anew, though an earlier bundle of this checkpoint has it
    #[arg(long)]
    pub no_reuse: bool,
    /// Print one JSON object to stdout when done
    #[arg(long)]
    pub json: bool,
}

/// Builds.
///
/// # Errors
/// Whatever keeps the bundle from being written.
pub fn run(args: &Args, progress: &Progress) -> Result<()> {
    verbs::build(args, progress)
}
