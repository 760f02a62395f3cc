//! `moec report`: a bundle as one page for a browser.

mod page;
pub(crate) mod speed;
pub(super) mod summary;

use crate::output;
use moec_base::error::io_error;
use moec_base::progress::Progress;
use moec_base::{Result, disk, human};
use moec_bundle::read::Bundle;
use serde_json::json;
use std::path::PathBuf;

/// Write an HTML report about a bundle: placement, memory, hot experts, formats, expected speed, decisions
///
/// The report is one self-contained file without scripts.
#[derive(Clone, Debug, clap::Args)]
pub struct Args {
    /// The bundle
    pub bundle: PathBuf,
    /// File to write; an existing file is replaced
    #[arg(long, short, value_name = "FILE", default_value = "report.html")]
    pub output: PathBuf,
    /// Predict the speed on this device instead of the bundle's target: a device name, or a device file that
    /// `moec profile-device` wrote
    #[arg(long, value_name = "NAME|FILE")]
    pub device: Option<String>,
    /// Print one JSON object to stdout
    #[arg(long)]
    pub json: bool,
}

/// Writes the report.
///
/// # Errors
/// Fails if the bundle cannot be read, or the file cannot be written.
pub fn run(args: &Args, progress: &Progress) -> Result<()> {
    let bundle = Bundle::open(&args.bundle)?;
    let device = args.device.as_deref().map(moec_targets::device).transpose()?;
    let summary = summary::of(&bundle, device.as_ref())?;
    let page = page::page(&summary);
    disk::write_whole(&args.output, page.as_bytes()).map_err(|e| io_error("write", &args.output, &e))?;
    let size = human::bytes(page.len() as u64);
    progress.stage("Wrote", &format!("`{}`, {size}", args.output.display()));
    if args.json {
        let expected = summary.expected.iter().map(|e| {
            let p = &e.parts;
            json!({
                "entry": e.entry, "rows": e.rows, "seconds": p.seconds(), "tokens_per_s": e.rate,
                "matrices_seconds": p.matrices, "reading_seconds": p.reading, "attention_seconds": p.states,
                "barriers_seconds": p.barriers, "others_seconds": p.others + p.sampling,
            })
        });
        output::json(&json!({
            "bundle": args.bundle, "page": args.output, "bytes": page.len(),
            "expected": expected.collect::<Vec<_>>(), "threads": summary.machine.threads, "tokens": summary.machine.tokens,
        }))?;
    }
    Ok(())
}
