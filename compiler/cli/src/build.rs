//! `moec build`.

use super::{bundle, output};
use moec_base::progress::Progress;
use moec_base::{Result, human};
use moec_bundle::toolchain::Missing;
use moec_measure::job::{self, Job};
use moec_pipeline::Stops;
use serde_json::json;
use std::path::PathBuf;
use std::time::{Duration, Instant};

/// Compile a model into a bundle
///
/// A bundle is a folder with packed weights, object code, a plan and a program that runs it. It is written
/// completely or not at all, and replaces an earlier bundle of the same name. Builds are reproducible. Started by
/// `mpirun -n 2`, two hosts divide the texts that it measures on.
#[derive(Clone, Debug, clap::Args)]
pub struct Args {
    /// Path of the model.toml
    #[arg(value_name = "MODEL.TOML")]
    pub config: PathBuf,
    /// Name of a target (`moec targets` lists them), or path of a device file
    #[arg(long, short, value_name = "TARGET", default_value = "native")]
    pub target: String,
    /// Folder to write [default: the checkpoint's name, the target and `.moec`]
    #[arg(long, short, value_name = "DIR")]
    pub output: Option<PathBuf>,
    /// Keep this share of all experts in the GPU's memory, and copy others there at run time; sets `policy`
    /// and `experts` under `[placement]`
    #[arg(long, value_name = "SHARE", value_parser = share)]
    pub gpu_experts: Option<u8>,
    /// Time kernels on this machine and use the fastest; results are cached for later builds
    #[arg(long)]
    pub tune: bool,
    /// Time limit of `--tune` in seconds
    #[arg(long, value_name = "SECONDS", default_value_t = 60, value_parser = clap::value_parser!(u32).range(1..=86400))]
    pub tune_time: u32,
    /// Print the IR after this pass to stdout (`moec passes` lists the passes)
    #[arg(long, value_name = "PASS")]
    pub print_after: Option<String>,
    /// Stop after this pass, and write nothing
    #[arg(long, value_name = "PASS")]
    pub stop_after: Option<String>,
    /// Do not build the `run` program, which requires a C compiler, or cargo for machines of another kind
    #[arg(long)]
    pub no_run: bool,
    /// Copy the runtime's sources into the bundle, to `runner/vendor`, so that cargo can build `runner/`
    ///
    /// Bundles for macOS, Android and machines of another kind always contain them, because cargo builds
    /// their `run`.
    #[arg(long)]
    pub with_sources: bool,
    /// Compile `run` with cargo from the runtime's sources instead of linking the precompiled runtime
    #[arg(long, conflicts_with = "no_run")]
    pub run_from_source: bool,
    /// Pack all weights again, even if an earlier bundle of this checkpoint contains them
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

/// Builds a bundle.
///
/// # Errors
/// Fails if the bundle cannot be written.
pub fn run(args: &Args, progress: &Progress) -> Result<()> {
    job::run(progress, |job, progress| build(args, job, progress))
}

fn build(args: &Args, job: Job<'_>, progress: &Progress) -> Result<()> {
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
            print_after: args.print_after.as_deref().filter(|_| job.is_first()),
            stop_after: args.stop_after.as_deref(),
            ..Stops::default()
        },
        job,
    };
    let mut printed = Ok(());
    let built = moec_driver::build(&request, progress, &mut |text| printed = output::data(text))?;
    printed?;
    let Some(built) = built else { return Ok(()) };
    let folder = built.folder.display();
    if let Some(missing) = &built.summary.missing {
        let hint = match missing {
            Missing::Mac(_) => missing.hint(),
            _ => "`moec doctor` shows what to install".to_owned(),
        };
        progress.warn(&format!(
            "`{folder}` has no `run` program: {missing} ({hint}); `moec run {folder} …` works without it on a \
             machine of the target's kind"
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
