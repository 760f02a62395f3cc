//! `moec passes`: the passes of the compiler in their order.

use super::output;
use moec_base::Result;
use moec_pipeline::{PIPELINE, Pass};
use serde_json::json;

/// List the passes of the compiler in their order
///
/// Lists for each pass when it runs, the level of IR that `--print-after PASS` of `moec build` prints, and
/// the reason for its position.
#[derive(Clone, Debug, clap::Args)]
pub struct Args {
    /// Print one JSON object to stdout
    #[arg(long)]
    pub json: bool,
}

/// Prints the passes.
///
/// # Errors
/// Fails if stdout cannot be written.
pub fn run(args: &Args) -> Result<()> {
    if args.json {
        let row = |p: &Pass| json!({ "name": p.name, "when": p.when.words(), "level": p.ir_level.word(), "why": p.why });
        return output::json(&json!({ "passes": PIPELINE.iter().map(row).collect::<Vec<_>>() }));
    }
    let head = ["pass", "runs", "level", "reason"].map(str::to_owned).to_vec();
    let row = |p: &Pass| [p.name, p.when.words(), p.ir_level.word(), p.why].map(str::to_owned).to_vec();
    output::data(&output::table(&[vec![head], PIPELINE.iter().map(row).collect()].concat()))
}
