//! `moec passes`: what the compiler does, in order.

use super::output;
use moec_base::Result;
use moec_pipeline::{PIPELINE, Pass};
use serde_json::json;

/// List the passes of the compiler in their order
///
/// Each with when it runs, what is printed after it (`--print-after` of a build), and why it stands where it stands.
#[derive(Clone, Debug, clap::Args)]
pub struct Args {
    /// Print one JSON object to stdout
    #[arg(long)]
    pub json: bool,
}

/// Prints them.
///
/// # Errors
/// Stdout cannot be written.
pub fn run(args: &Args) -> Result<()> {
    if args.json {
        let row = |p: &Pass| json!({ "name": p.name, "when": p.when.words(), "prints": p.ir_level.word(), "why": p.why });
        return output::json(&json!({ "passes": PIPELINE.iter().map(row).collect::<Vec<_>>() }));
    }
    let head = ["pass", "runs", "prints", "why it stands there"].map(str::to_owned).to_vec();
    let row = |p: &Pass| [p.name, p.when.words(), p.ir_level.word(), p.why].map(str::to_owned).to_vec();
    output::data(&output::table(&[vec![head], PIPELINE.iter().map(row).collect()].concat()))
}
