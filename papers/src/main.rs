//! `moec-papers`: published evaluations again. `cargo xtask npumoe`, `trimoe`, `powerinfer2`, `hybrimoe`,
//! `mobile`, `padding` and `docs` call it.
#![allow(clippy::cast_possible_truncation, reason = "figures of published evaluations")]

use clap::Parser;
use moec::output;
use moec_base::progress::Progress;
use moec_base::{Error, Result};
use moec_bundle::read::Bundle;
use moec_costs::Model;
use moec_costs::units::Units;
use moec_papers::capacities::{profiled, recorded, table};
use moec_papers::npumoe::drops::{Extent, SHARES};
use moec_papers::npumoe::reproduce::{DEVICES, serial};
use moec_papers::npumoe::{drops, page, report, tables};
use moec_papers::{hybrimoe, mechanisms, mobile, outliers, powerinfer2, trimoe};
use moec_profile::Profile;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

/// Most tokens of either text that `drops` records loads of, and most that it measures.
const TOKENS: [usize; 2] = [16 << 10, 32 << 10];

/// Published evaluations again, simulated
#[derive(Debug, Parser)]
#[command(name = "moec-papers", max_term_width = 100, disable_help_subcommand = true)]
enum Commands {
    /// Rerun the evaluation of NPUMoE, and print every figure of it beside the simulated one
    Npumoe {
        /// One of the devices that it measured [default: all]
        #[arg(long, value_name = "NAME", value_parser = DEVICES)]
        target: Option<String>,
        /// Print one JSON object to stdout
        #[arg(long)]
        json: bool,
    },
    /// Print the same as docs/npumoe.md
    Page,
    /// Print docs/mechanisms.md: what the five papers do, and how far moec has it
    Mechanisms,
    /// Rerun the evaluation of TriMoE, and print a page with every figure of it beside the simulated one
    Trimoe(Run),
    /// Rerun the evaluation of PowerInfer-2, and print a page with every figure of it beside the simulated
    /// one
    #[command(name = "powerinfer2")]
    PowerInfer2(Run),
    /// Rerun the evaluation of HybriMoE, and print a page with every figure of it beside the simulated one
    #[command(name = "hybrimoe")]
    HybriMoe(Run),
    /// Rerun the evaluation of MoBiLE, and print a page with every figure of it beside the simulated one
    #[command(name = "mobile")]
    MoBile(Run),
    /// Compare shares of output channels with 8 bits, others with 4: the error of a checkpoint's experts
    Outliers {
        /// A folder with a checkpoint
        checkpoint: PathBuf,
    },
    /// Measure a checkpoint's quality with tokens past capacities dropped and spilled, and print the figures of
    /// docs/npumoe.md
    Drops {
        /// A folder with a checkpoint
        checkpoint: PathBuf,
        /// Text that capacities come from
        #[arg(long, value_name = "FILE")]
        calibration: PathBuf,
        /// Text that is measured
        #[arg(long, value_name = "FILE")]
        text: PathBuf,
    },
    /// Compare settings of `[experts]`: of a bundle with the loads of a profile, else of published shapes
    /// with recorded routing
    Padding {
        /// A bundle for a device with a neural processing unit
        #[arg(requires = "trace")]
        bundle: Option<PathBuf>,
        /// Profile that the loads of the experts are from
        #[arg(long, value_name = "PROFILE", requires = "bundle")]
        trace: Option<PathBuf>,
    },
}

/// Run of an evaluation, and its page.
#[derive(Debug, clap::Args)]
struct Run {
    /// Write the page and its plots into this folder instead
    #[arg(long, value_name = "FOLDER")]
    docs: Option<PathBuf>,
    /// Write nothing; fail if files in the folder differ
    #[arg(long, requires = "docs")]
    check: bool,
    /// A short run: other numbers, for a look at the page
    #[arg(long, conflicts_with = "docs")]
    quick: bool,
}

fn main() -> ExitCode {
    let command = match Commands::try_parse() {
        Ok(command) => command,
        Err(e) => {
            output::usage(&e);
            return ExitCode::from(u8::try_from(e.exit_code()).unwrap_or(2));
        }
    };
    match run(&command) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            output::error(&error);
            ExitCode::from(error.exit_code())
        }
    }
}

fn run(command: &Commands) -> Result<()> {
    match command {
        Commands::Npumoe { target, json } => {
            let report = report(target.as_deref())?;
            if *json { output::json(&tables::value(&report)) } else { output::data(&tables::text(&report)) }
        }
        Commands::Page => output::data(&page::page(&report(None)?)),
        Commands::Mechanisms => output::data(&mechanisms::page()?),
        Commands::Trimoe(run) => {
            let size = if run.quick { trimoe::bench::Size::QUICK } else { trimoe::bench::Size::FULL };
            publish(trimoe::pages(size)?, run, "trimoe")
        }
        Commands::PowerInfer2(run) => {
            let size =
                if run.quick { powerinfer2::decode::Size::QUICK } else { powerinfer2::decode::Size::FULL };
            publish(powerinfer2::pages(size)?, run, "powerinfer2")
        }
        Commands::HybriMoe(run) => {
            let size = if run.quick { hybrimoe::report::Size::QUICK } else { hybrimoe::report::Size::FULL };
            publish(hybrimoe::pages(size)?, run, "hybrimoe")
        }
        Commands::MoBile(run) => {
            let size = if run.quick { mobile::report::Size::QUICK } else { mobile::report::Size::FULL };
            publish(mobile::pages(size)?, run, "mobile")
        }
        Commands::Outliers { checkpoint } => output::data(&outliers::table(&outliers::rows(checkpoint)?)),
        Commands::Drops { checkpoint, calibration, text } => {
            let [recorded, tokens] = TOKENS;
            let extent = Extent { calibration, text, recorded, tokens, shares: &SHARES };
            output::data(&drops::file(&drops::measure(checkpoint, &extent, &Progress::new(false, false))?)?)
        }
        Commands::Padding { bundle, trace } => padding(bundle.as_deref().zip(trace.as_deref())),
    }
}

/// A page with its plots: printed, written, or compared with what `cargo xtask` has written by that command.
fn publish(pages: Vec<(String, String)>, run: &Run, command: &str) -> Result<()> {
    let Some(docs) = &run.docs else {
        return pages.first().map_or(Ok(()), |(_, page)| output::data(page));
    };
    for (name, text) in pages {
        let path = docs.join(name);
        if run.check {
            let there = std::fs::read_to_string(&path).unwrap_or_default();
            if there != text {
                let stale = format!("`{}` is stale: `cargo xtask {command}` writes it", path.display());
                return Err(Error::input(stale));
            }
            continue;
        }
        let failed = |e: std::io::Error| Error::input(format!("`{}` cannot be written: {e}", path.display()));
        path.parent().map_or(Ok(()), std::fs::create_dir_all).map_err(failed)?;
        std::fs::write(&path, text).map_err(failed)?;
    }
    Ok(())
}

/// Settings of `[experts]`, as tables in Markdown.
fn padding(measured: Option<(&Path, &Path)>) -> Result<()> {
    let bundle = measured.map(|(bundle, _)| Bundle::open(bundle)).transpose()?;
    let device =
        bundle.as_ref().map_or_else(|| moec_targets::device("m2-ultra").map(serial), Bundle::device)?;
    let units = Units::of(&device)
        .ok_or_else(|| Error::input(format!("`{}` has no neural processing unit", device.name)))?;
    let models = match bundle.zip(measured) {
        None => recorded(&units)?,
        Some((bundle, (_, trace))) => {
            let info = &bundle.plan.model;
            let model = Model::of(&bundle.graph()?, &info.family, info.layers)?;
            vec![profiled(model, &Profile::read(trace)?, &units)?]
        }
    };
    let tables: Vec<String> = models.iter().map(|(name, costs)| table(name, costs)).collect();
    output::data(&tables.join("\n"))
}
