//! `moec report`: a bundle as one page for a browser.

mod page;
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
    let summary = summary::of(&bundle)?;
    let page = page::page(&summary);
    disk::write_whole(&args.output, page.as_bytes()).map_err(|e| io_error("write", &args.output, &e))?;
    let size = human::bytes(page.len() as u64);
    progress.stage("Wrote", &format!("`{}`, {size}", args.output.display()));
    if args.json {
        output::json(&json!({"bundle": args.bundle, "page": args.output, "bytes": page.len()}))?;
    }
    Ok(())
}
