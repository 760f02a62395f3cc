//! `moec fit`: from a model to a bundle that keeps limits of memory, speed and loss.
//!
//! Every candidate goes through the pipeline, but no weights are read: `candidate` predicts its size, memory and
//! speed, `loss` its loss of quality. The first in the order of the table that keeps all `limits` is built and
//! `measured`; the others are corrected by that, and the next one is built if it breaks a limit. `picture` draws
//! all of them.

pub(super) mod candidate;
pub(super) mod limits;
mod loss;
mod measured;
mod picture;
pub(super) mod shapes;

use super::{facts, init, output};
use candidate::{Candidate, Model};
use limits::Limits;
use loss::Losses;
use moec_base::error::io_error;
use moec_base::progress::Progress;
use moec_base::{Error, Result, disk, human};
use moec_config::Facts;
use moec_device::NATIVE;
use moec_import::{ImportOptions, hub};
use moec_measure::kernel_times::KernelTimes;
use moec_profile::{Origin, Profile};
use moec_runtime::platform::{available, regular};
use moec_runtime::weights;
use moec_targets::backends;
use serde_json::{Value, json};
use std::path::{Path, PathBuf};

/// Build a bundle that fits a machine: choose formats by predictions, build, measure
///
/// Predicts size, memory and speed of several formats of weights and KV cache, from the model's shapes alone. Where
/// the target is this machine (`native`), it times their kernels for some seconds.
/// Takes the first that keeps all limits, in the order of the table: formats with more bits come first. Then
/// builds it and measures it. If a measurement breaks a limit, the next one is built.
///
/// The loss of quality is predicted from a profile of this model only (`moec calibrate --losses`). Without one
/// the table shows what small models lost, by their names.
#[derive(Clone, Debug, clap::Args)]
pub struct Args {
    /// Folder of a Hugging Face checkpoint, a GGUF file, or the name of a model on the hub, as in `moec init`.
    /// With `--no-build` a folder with no more than a `config.json` is enough
    #[arg(value_name = "HF_DIR|NAME")]
    pub source: PathBuf,
    /// Name of a target (`moec targets` lists them), or path of a device file
    #[arg(long, short, value_name = "TARGET", default_value = "native")]
    pub target: String,
    /// Memory limit of a run, such as `16GiB` [default: the free memory of this machine, less 512 MiB]
    #[arg(long, value_name = "SIZE", value_parser = size)]
    pub memory: Option<u64>,
    /// Also try to keep experts on disk that do not fit into memory; sets `budget` under `[memory]`
    #[arg(long)]
    pub disk: bool,
    /// Required decode rate in tokens per second
    #[arg(long, value_name = "RATE")]
    pub tokens_per_s: Option<f64>,
    /// Largest permitted increase of perplexity, such as `2%`; needs `--profile`, or `--text` to measure it
    #[arg(long, value_name = "SHARE", value_parser = share)]
    pub max_loss: Option<f64>,
    /// Profile of this model: rounds weights, and predicts the loss if `moec calibrate --losses` recorded it;
    /// sets `profile` under `[calibrate]`
    #[arg(long, value_name = "FILE.TRACE")]
    pub profile: Option<PathBuf>,
    /// Held-out text: measure the loss on it after the build, beside the model in bf16, which is built for that
    #[arg(long, value_name = "FILE", conflicts_with = "no_build")]
    pub text: Option<PathBuf>,
    /// Longest sequence in tokens; several, separated by commas, are tried in this order [default: as in
    /// `moec init`]
    #[arg(long, value_name = "TOKENS,…", value_delimiter = ',', value_parser = clap::value_parser!(u32).range(1..=1 << 20))]
    pub context: Vec<u32>,
    /// Use only the local Hugging Face cache (`HF_HOME`); make no network requests
    #[arg(long)]
    pub offline: bool,
    /// Bundle to write [default: as in `moec build`]
    #[arg(long, short, value_name = "DIR", conflicts_with = "no_build")]
    pub output: Option<PathBuf>,
    /// model.toml to write
    #[arg(long, value_name = "FILE", default_value = "model.toml")]
    pub toml: PathBuf,
    /// Only predict, and write the model.toml: build and measure nothing
    #[arg(long)]
    pub no_build: bool,
    /// Also write table and picture as an HTML page
    #[arg(long, value_name = "FILE.HTML")]
    pub page: Option<PathBuf>,
    /// Replace an existing model.toml
    #[arg(long, short)]
    pub force: bool,
    /// Print one JSON object to stdout
    #[arg(long)]
    pub json: bool,
}

/// Chooses, writes and builds.
///
/// # Errors
/// Fails if the checkpoint is not supported, the profile is of another model, the target has no kernels, or no
/// candidate keeps the limits.
pub fn run(args: &Args, progress: &Progress) -> Result<()> {
    if backends::job()?.is_some() {
        return Err(Error::usage("`moec fit` measures the speed of one host")
            .hint("start it without a launcher of MPI"));
    }
    let device = moec_targets::device(&args.target)?;
    let profile = args.profile.as_deref().map(Profile::read).transpose()?;
    check(args, profile.as_ref())?;
    // The weights of a model on the hub are fetched when something is known to fit, and for its profile.
    let name = init::name(&args.source);
    let fetch = if profile.is_some() { hub::fetch } else { hub::fetch_shapes };
    let source = match &name {
        Some(name) => init::fetched(&args.source, fetch(name, args.offline, progress))?,
        None => args.source.clone(),
    };
    let (checkpoint, spec) = moec_import::open_shapes(&source, &ImportOptions::default())?;
    let alone = checkpoint.tensors().next().is_none_or(|(tensor, _)| checkpoint.bytes(tensor).is_none());
    if alone && name.is_none() && !(args.no_build && profile.is_none()) {
        return Err(Error::usage(format!("`{}` has no weights", source.display()))
            .hint("`--no-build` without `--profile` predicts from a `config.json` alone; or give the whole checkpoint"));
    }
    if let (Some(profile), Some(path)) = (&profile, &args.profile) {
        profile.origin.must_be(&Origin::of(&checkpoint, &spec)?, &path.display().to_string())?;
    }
    let text = args
        .text
        .as_deref()
        .map(|path| regular::read_text(path, regular::TEXT).map_err(|e| io_error("read", path, &e)));
    let text = text.transpose()?;
    let facts = facts::of(&spec, &|leaf| checkpoint.format(leaf));
    let limits = Limits {
        memory: memory(args)?,
        rate: args.tokens_per_s.unwrap_or(0.0),
        loss: args.max_loss,
        measures: text.is_some(),
    };
    let losses = Losses::of(profile.as_ref());

    let model = Model {
        checkpoint: &checkpoint,
        spec: &spec,
        facts: &facts,
        source: &source,
        device: &device,
        target: &args.target,
        profile: args.profile.as_deref().zip(profile.as_ref()),
        times: (device.name == NATIVE).then(KernelTimes::new).transpose()?,
    };
    let budgets = [None, Some(limits.memory)];
    let budgets = if args.disk { &budgets[..] } else { &budgets[..1] };
    let contexts: Vec<Option<u32>> =
        if args.context.is_empty() { vec![None] } else { args.context.iter().copied().map(Some).collect() };
    let mut candidates = candidate::all(&model, &contexts, budgets, progress)?;
    if let Some(times) = model.times.as_ref().filter(|times| times.count() > 0) {
        progress.stage("Timed", &format!("{} kernels on this machine, for the speeds", times.count()));
    }
    for c in &mut candidates {
        c.loss = losses.own(c.formats);
    }
    let mut builds = Vec::new();
    // The candidate whose bundle is there.
    let mut there = None;
    loop {
        let chosen = candidates.iter().position(|c| limits.broken_by(c).is_none());
        if let Some(page) = &args.page {
            let html = picture::page(&facts, &candidates, chosen, &limits, &losses);
            disk::write_whole(page, html.as_bytes()).map_err(|e| io_error("write", page, &e))?;
        }
        if !args.json {
            output::data(&picture::text(&candidates, chosen, &limits, &losses))?;
        }
        let ends = chosen.is_none_or(|at| args.no_build || candidates[at].measured);
        if args.json && ends {
            output::json(&report(args, &candidates, chosen, &limits, &losses, &builds))?;
        }
        let Some(at) = chosen else { return Err(limits.nothing(&candidates, args.disk, &model)) };
        if there == Some(at) {
            return Ok(());
        }
        progress.stage("Chose", &limits.why(&candidates, at));
        write(args, &model, &candidates[at], there.is_none())?;
        if args.no_build {
            progress.stage("Next", &format!("moec build {} --target {}", args.toml.display(), args.target));
            return Ok(());
        }
        if let Some(name) = name.as_ref().filter(|_| alone && there.is_none()) {
            init::fetched(&args.source, hub::fetch(name, args.offline, progress))?;
        }
        let folder = measured::build(args, &args.toml, args.output.as_deref(), true, progress)?;
        there = Some(at);
        if ends {
            // It was measured before one with more bits that broke a limit.
            return Ok(());
        }
        let found = measured::measure(args, &model, &candidates[at], (&folder, text.as_deref()), progress)?;
        let predicted = candidates[at].json();
        measured::correct(&mut candidates, at, &found);
        progress.stage("Measured", &found.line(&predicted));
        builds.push(json!({"bundle": folder, "predicted": predicted, "measured": found.json()}));
    }
}

/// Checks what can be checked before anything is predicted.
fn check(args: &Args, profile: Option<&Profile>) -> Result<()> {
    if let (Some(path), Some(profile)) = (&args.profile, profile)
        && profile.losses.is_empty()
        && args.max_loss.is_some()
        && args.text.is_none()
    {
        return Err(Error::usage(format!("`{}` has no losses of formats, which `--max-loss` needs", path.display()))
            .hint("record them with `moec calibrate --losses`, or measure the loss after the build with `--text FILE`"));
    }
    if args.max_loss.is_some() && profile.is_none() && args.text.is_none() {
        return Err(Error::usage("`--max-loss` needs losses of this model, and there are none")
            .hint("record them with `moec calibrate --losses`, and give `--profile FILE`; or measure the loss after the build with `--text FILE`"));
    }
    if !args.force && args.toml.exists() {
        return Err(Error::usage(format!("`{}` exists already", args.toml.display()))
            .hint("replace it with `--force`, or name another file with `--toml`"));
    }
    Ok(())
}

/// Writes the model.toml of a candidate. `first`: none was written before it.
fn write(args: &Args, model: &Model<'_>, chosen: &Candidate, first: bool) -> Result<()> {
    let source = init::relative_path(&args.toml, model.source)?;
    let settings = model.settings(chosen.choice, Some(&args.toml))?;
    let text = moec_config::template(&source, model.facts, false, &settings);
    init::write(&args.toml, &text, args.force || !first)
}

/// Memory that a run may take.
///
/// # Errors
/// Fails if no limit is given and the operating system does not report the free memory.
fn memory(args: &Args) -> Result<u64> {
    let free = || available::available().map(|free| free.saturating_sub(weights::RESERVE));
    args.memory.or_else(free).ok_or_else(|| {
        Error::environment("the operating system does not report how much memory is free")
            .hint("set the limit, as in `--memory 16GiB`")
    })
}

fn size(text: &str) -> std::result::Result<u64, String> {
    human::parse_bytes(text).filter(|n| *n > 0).ok_or_else(|| "expected a size such as `16GiB`".to_owned())
}

/// A share in percent, as `2%`.
fn share(text: &str) -> std::result::Result<f64, String> {
    let percent = text.strip_suffix('%').and_then(|n| n.trim().parse::<f64>().ok());
    let percent = percent.filter(|n| (0.0..=100.0).contains(n)).map(|n| n / 100.0);
    percent.ok_or_else(|| "expected a share such as `2%`".to_owned())
}

/// Everything as JSON.
fn report(
    args: &Args,
    candidates: &[Candidate],
    chosen: Option<usize>,
    limits: &Limits,
    losses: &Losses<'_>,
    builds: &[Value],
) -> Value {
    let of = |c: &Candidate| {
        let mut value = c.json();
        value["breaks"] = limits.broken_by(c).into();
        value
    };
    json!({
        "memory_bytes": limits.memory,
        "candidates": candidates.iter().map(of).collect::<Vec<_>>(),
        "chosen": chosen.and_then(|at| candidates.get(at)).map(Candidate::json),
        "losses_of_other_models": losses.others_json(candidates),
        "builds": builds,
        "model_toml": chosen.map(|_| &args.toml),
    })
}

/// The facts of a model as a title.
fn title(facts: &Facts) -> String {
    format!(
        "{}, {} parameters, {} active",
        facts.family,
        human::count(facts.parameters),
        human::count(facts.active_parameters)
    )
}

/// Path as the text of a TOML value.
fn quoted(path: &Path) -> String {
    format!("\"{}\"", path.display().to_string().replace('\\', "\\\\").replace('"', "\\\""))
}
