//! `moec pass`: one pass on one small file. Hidden; for developers of the compiler.

use super::output;
use moec_base::Result;
use moec_filetest::Filetest;
use serde_json::json;
use std::path::PathBuf;

/// Run one pass on the text of a Graph, or on the input of a filetest, and print the result
///
/// `golden/passes` has two files for every pass; docs/extending.md describes their format.
#[derive(Clone, Debug, clap::Args)]
pub struct Args {
    /// The pass
    pub name: String,
    /// The file
    pub file: PathBuf,
    /// Print one JSON object to stdout
    #[arg(long)]
    pub json: bool,
}

/// Runs the pass and prints its output.
///
/// # Errors
/// Fails if the file is invalid, or the pass fails.
pub fn run(args: &Args) -> Result<()> {
    let text = Filetest::read(&args.file, Some(&args.name))?.run()?;
    if args.json { output::json(&json!({"pass": args.name, "text": text})) } else { output::data(&text) }
}
