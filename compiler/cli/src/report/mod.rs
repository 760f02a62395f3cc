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

/// Write a page about a bundle: what runs where, memory, hot experts, formats, expected speed, decisions
///
/// One file for any browser, without scripts and without anything from elsewhere.
#[derive(Clone, Debug, clap::Args)]
pub struct Args {
    /// The bundle
    pub bundle: PathBuf,
    /// File to write; one that is there is replaced
    #[arg(long, short, value_name = "FILE", default_value = "report.html")]
    pub output: PathBuf,
    /// Expect the speed of this machine instead of the one that the bundle was built for: a device name, or a device file, such as
    /// `moec profile-device` writes
    #[arg(long, value_name = "NAME|FILE")]
    pub device: Option<String>,
    /// Print one JSON object to stdout
    #[arg(long)]
    pub json: bool,
}

/// Writes it.
///
/// # Errors
/// The bundle cannot be read, or the file not be written.
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
