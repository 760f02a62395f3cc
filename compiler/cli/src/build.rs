//! `moec build`.

use super::{bundle, output};
use moec_base::progress::Progress;
use moec_base::{Result, human};
use moec_bundle::toolchain::Missing;
use moec_pipeline::Stops;
use serde_json::json;
use std::path::PathBuf;
use std::time::{Duration, Instant};

/// Compile a model into a bundle
///
/// A bundle is a folder with packed weights, object code, a plan and a program that runs it. It is written
/// whole or not at all, and replaces an earlier bundle of the same name. Building twice gives the same bytes.
#[derive(Clone, Debug, clap::Args)]
pub struct Args {
    /// Path of the model.toml
    #[arg(value_name = "MODEL.TOML")]
    pub config: PathBuf,
    /// A name that `moec targets` lists, or a path of your own device file
    #[arg(long, short, value_name = "TARGET", default_value = "native")]
    pub target: String,
    /// Folder to write [default: the checkpoint's name, the target and `.moec`]
    #[arg(long, short, value_name = "DIR")]
    pub output: Option<PathBuf>,
    /// Hold this share of all experts in the GPU's memory, and bring others there while the model runs: `policy` and
    /// `experts` under `[placement]`
    #[arg(long, value_name = "SHARE", value_parser = share)]
    pub gpu_experts: Option<u8>,
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
    /// Write the runtime's sources into the bundle, below `runner/vendor`: then cargo builds `runner/`
    ///
    /// Bundles whose `run` cargo builds have them in any case: those for macOS, Android and other machines than this one.
    #[arg(long)]
    pub with_sources: bool,
    /// Compile `run` with cargo from the runtime's sources, instead of linking the runtime that moec carries
    #[arg(long, conflicts_with = "no_run")]
    pub run_from_source: bool,
    /// Pack every weight anew, though an earlier bundle of this checkpoint has it
    #[arg(long)]
    pub no_reuse: bool,
    /// Print one JSON object to stdout when done
    #[arg(long)]
    pub json: bool,
}

/// A share in percent, as `25%`.
fn share(text: &str) -> std::result::Result<u8, String> {
    let percent = text.strip_suffix('%').and_then(|n| n.trim().parse().ok());
    percent.filter(|n| (1..=100).contains(n)).ok_or_else(|| "expected a share from 1% to 100%".to_owned())
}

/// Builds.
///
/// # Errors
/// Whatever keeps the bundle from being written.
pub fn run(args: &Args, progress: &Progress) -> Result<()> {
    let start = Instant::now();
    let request = moec_driver::Request {
        config: &args.config,
        target: &args.target,
        output: args.output.as_deref(),
        gpu_experts: args.gpu_experts,
        tune: args.tune.then(|| Duration::from_secs(u64::from(args.tune_time))),
        link: !args.no_run,
        from_source: args.run_from_source,
        sources: args.with_sources,
        reuse: !args.no_reuse,
        stops: Stops {
            print_after: args.print_after.as_deref(),
            stop_after: args.stop_after.as_deref(),
            ..Stops::default()
        },
    };
    let mut printed = Ok(());
    let built = moec_driver::build(&request, progress, &mut |text| printed = output::data(text))?;
    printed?;
    let Some(built) = built else { return Ok(()) };
    let folder = built.folder.display();
    if let Some(missing) = &built.summary.missing {
        let way = match missing {
            Missing::Mac(_) => missing.hint(),
            _ => "`moec doctor` says what to install".to_owned(),
        };
        progress.warn(&format!(
            "`{folder}` has no `run`: {missing} ({way}); `moec run {folder} …` needs none on a machine of the \
             target's kind"
        ));
    }
    built.summary.notes.iter().for_each(|note| progress.warn(note));
    progress.stage("Manifest", &format!("SHA-256 {}", built.summary.manifest_sha256));
    let [reused, all] = [built.summary.reused_bytes, built.summary.weight_bytes].map(human::bytes);
    let taken = if built.summary.reused_bytes > 0 {
        format!(", {reused} from earlier bundles")
    } else {
        String::new()
    };
    progress.finished(&format!("{folder} ({all}{taken})"), start);
    if args.json {
        output::json(&json!({
            "bundle": built.folder,
            "run": built.summary.run,
            "manifest_sha256": built.summary.manifest_sha256,
            "weight_bytes": built.summary.weight_bytes,
            "reused_bytes": built.summary.reused_bytes,
            "packing_seconds": built.summary.packing.as_secs_f64(),
            "package_bytes": built.summary.package_bytes,
            "notes": built.summary.notes,
            "seconds": start.elapsed().as_secs_f64(),
            "peak_memory_bytes": moec_runtime::platform::cpu::peak_memory(),
            "helper_peak_memory_bytes": moec_runtime::platform::cpu::peak_memory_of_children(),
            "plan": bundle::facts(&built.plan),
        }))?;
    }
    Ok(())
}
