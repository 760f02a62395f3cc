//! `moec build`, from a `model.toml` to a bundle on disk.

use moec_base::cache_dir;
use moec_base::error::{Error, Fault, Result};
use moec_base::human;
use moec_base::progress::Progress;
use moec_bundle::toolchain::{Missing, Route};
use moec_bundle::write::{self, Summary};
use moec_bundle::{cargo, destination, workspace};
use moec_config::{Config, HostPlacement, PlacementConfig, Predict, Rounding, Size, Threshold, UnitSetting};
use moec_costs::units::{UnitList, Units};
use moec_cpu::{CpuTarget, WeightImportance};
use moec_device::{Device, UnitKind};
use moec_import::{Checkpoint, ImportOptions, ModelSpec};
use moec_ir::plan::Plan;
use moec_measure::hosts::Division;
use moec_measure::job::Job;
use moec_measure::quality::Measured;
use moec_measure::tuner::Tuner;
use moec_measure::{calibrate, chunk, gamma, hosts, mix, thresholds};
use moec_passes::decisions::Decision;
use moec_passes::tune::KernelTimer;
use moec_passes::{gpu_expert_cache, tier};
use moec_pipeline::{Compilation, Compiled, Inputs, QualityProbe, Stops, first_token};
use moec_profile::{Importance, Profile};
use moec_service::template::Templates;
use moec_targets::backends;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Request for a build.
#[derive(Clone, Copy, Debug)]
pub struct Request<'a> {
    /// The `model.toml`.
    pub config: &'a Path,
    /// Name of a target, or path of a device file.
    pub target: &'a str,
    /// Folder of the bundle.
    pub output: Option<&'a Path>,
    /// Percentage of the experts that a GPU's memory holds; overrides the `model.toml`.
    pub gpu_experts: Option<u8>,
    /// Time budget for tuning kernels, if they are tuned.
    pub tune: Option<Duration>,
    /// Whether the executable `run` is linked.
    pub link: bool,
    /// Whether cargo builds `run` from the bundle's sources, even if a precompiled runtime is available.
    pub from_source: bool,
    /// Whether the bundle contains the runtime's sources. It always does if cargo builds its `run`.
    pub sources: bool,
    /// Whether weights are reused from an earlier bundle of the same checkpoint.
    pub reuse: bool,
    /// Passes after which the IR is printed, and the pass after which the build stops.
    pub stops: Stops<'a>,
    /// Hosts that divide the texts of measurements.
    pub job: Job<'a>,
}

/// A bundle that has been written.
#[derive(Clone, Debug)]
pub struct BuiltBundle {
    /// Path of the bundle.
    pub folder: PathBuf,
    /// Plan of the bundle.
    pub plan: Plan,
    /// Summary of what was written.
    pub summary: Summary,
}

/// Builds a bundle. Returns `None` if the request stops before a bundle is written, and on every host of a job but the
/// first, which writes it.
///
/// # Errors
/// Those of the request, the checkpoint and the machine. No files of the bundle remain then.
pub fn build(
    request: &Request<'_>,
    progress: &Progress,
    print: &mut dyn FnMut(&str),
) -> Result<Option<BuiltBundle>> {
    let device = moec_targets::device(request.target)?;
    let target = moec_targets::target_of(&device, request.target)?;
    let config = configure(request, &device)?;
    let folder = request.output.map_or_else(|| default_output(&config, target.name()), Path::to_owned);
    let target = target.with_activations(config.weights.activations);
    let job = request.job;
    let route = if job.is_first() { prepare(request, &config, &target, &folder, progress)? } else { None };
    let tuner = request
        .tune
        .filter(|_| job.is_first())
        .map(|time| Tuner::new(&target, time, progress))
        .transpose()?;
    let (checkpoint, spec) = open(&config, progress)?;

    let mut inputs = Inputs::new(&config, &checkpoint, &spec, &target);
    inputs.units = Units::of(&device);
    check(&inputs, progress)?;
    let profile = recorded(&inputs, job, progress)?;
    inputs.profile = profile.as_ref();
    let probe = probe(&inputs, job, progress)?;
    inputs.quality = probe.as_ref().map(|p| p as &dyn QualityProbe);
    let mix = mixed(&mut inputs, job, progress)?;
    let spent = mix.first().and_then(|of| of.figure(mix::INCREASE)).unwrap_or(0.0);
    let (chosen, thresholds) = thresholds::choose(&inputs, spent, job, progress)?.unzip();
    inputs.thresholds = chosen.unwrap_or_default();
    let (gamma, gamma_decision) = gamma::choose(&inputs, progress)?.unzip();
    inputs.gamma = gamma;
    let (chunk, chunk_decision) = chunk::choose(&inputs)?.unzip();
    inputs.chunk = chunk;
    let (division, hosts_decisions) = hosts::choose(&inputs)?.unzip();
    if let Some(Division { placement, whole_experts, cut_attention }) = division.clone() {
        inputs.division = Some(placement);
        (inputs.whole_experts, inputs.cut_attention) = (whole_experts, cut_attention);
    }

    let mut compilation = Compilation::new(inputs);
    compilation.timer = tuner.map(|tuner| Box::new(tuner) as Box<dyn KernelTimer>);
    let ran = compilation.run(request.stops, progress, print);
    if let Some(few) = compilation.placed.placement.as_ref().and_then(tier::few) {
        progress.warn(&few);
    }
    if !ran? {
        return Ok(None);
    }
    let weighed = calibrate::importance(&compilation.inputs, &compilation.module, job, progress)?;
    if !job.is_first() {
        return Ok(None);
    }
    let weighed = weighed.as_ref();

    let mut compiled = compilation.finish()?;
    let used = profile.as_ref().map(calibrate::expert_use);
    let used = used.or_else(|| weighed.map(|w| w.expert_use.clone()));
    let importance = weighed.map(|w| &w.importance);
    compiled.decisions.rounding = importance.map_or(Rounding::Nearest, Importance::rounding);
    compiled.decisions.expert_use = used.unwrap_or_default();
    let before = mix.into_iter().chain(thresholds.into_iter().flatten());
    let before =
        before.chain(gamma_decision).chain(chunk_decision).chain(hosts_decisions.into_iter().flatten());
    compiled.decisions.decisions.splice(..0, before);
    check_size(&compiled, config.weights.size)?;
    if let Some(note) = idle(&compiled.plan, &device) {
        progress.stage("Note", &note);
    }
    let alone = division.is_some_and(|d| d.placement == HostPlacement::Alone);
    if alone && config.placement.hosts.is_none() {
        progress.stage(
            "Note",
            "the first host computes everything, because that is fastest: `moec explain BUNDLE` shows the costs; `hosts` under `[placement]` in `model.toml` overrides the decision",
        );
    }
    moec_base::interrupt::check()?;
    let entry = profile.as_ref().map(|profile| calibrate::entry(&config, profile)).transpose()?;
    let from_source = request.from_source || backends::needs_cargo(&device);
    let options = write::Options {
        route,
        reuse: request.reuse,
        sources: request.sources || Route::needs_sources(target.triple(), from_source),
        importance: importance.map(|i| i as &dyn WeightImportance),
        profile: weighed.map(|w| w.entry.clone()).or(entry),
    };
    let (plan, summary) = write::write(&compiled, &folder, options, progress)?;
    Ok(Some(BuiltBundle { folder, plan, summary }))
}

/// Reads the `model.toml` and applies the overrides of the request.
///
/// # Errors
/// Fails if the file is invalid, or if it needs something that the device cannot do.
fn configure(request: &Request<'_>, device: &Device) -> Result<Config> {
    if let Some(percent) = request.gpu_experts {
        check_gpu_experts(device, percent, request.target)?;
    }
    let mut config = Config::load(request.config)?;
    if let Some(percent) = request.gpu_experts {
        config.placement.experts = gpu_experts(percent);
        config.placement.policy.get_or_insert(moec_config::POLICY);
    }
    gpu_expert_cache::check(&UnitList::of(device), &config.placement)?;
    Ok(config)
}

/// Checks this machine before the long compilation: whether the bundle can be written, and how its `run` is
/// made.
///
/// # Errors
/// Errors that the build would otherwise report at its end.
fn prepare(
    request: &Request<'_>,
    config: &Config,
    target: &CpuTarget,
    folder: &Path,
    progress: &Progress,
) -> Result<Option<Result<Route, Missing>>> {
    let writes = request.stops.stop_after.is_none();
    if writes {
        // `write` checks this again.
        workspace::recover(folder)?.iter().for_each(|note| progress.warn(note));
        destination::look(folder, folder)?;
    }
    let from_source = request.from_source || backends::needs_cargo(target.device());
    let route = (request.link && writes).then(|| Route::find(target.triple(), from_source));
    if let Some(Ok(Route::Cargo(_))) = &route {
        cargo::cache_folder()?;
    }
    require_calibration(config)?;
    if writes && Units::of(target.device()).is_some() {
        cache_dir::path().map_err(|e| {
            e.context("the tools that write artifacts for its units are installed in the cache folder")
        })?;
    }
    Ok(route)
}

/// Opens the checkpoint.
///
/// # Errors
/// Fails if the checkpoint cannot be read or is not supported by this version.
fn open(config: &Config, progress: &Progress) -> Result<(Checkpoint, ModelSpec)> {
    let options = ImportOptions { allow_nonfinite: config.model.allow_nonfinite };
    let _phase = progress.phase("Importing", &config.model.source.display().to_string());
    moec_import::open(&config.model.source, &options)
}

/// Checks the inputs that go into the bundle unchanged, before anything is computed.
///
/// # Errors
/// Fails if the tokenizer or the sampling options are unusable, or the placement names units that the device
/// does not have.
fn check(inputs: &Inputs<'_>, progress: &Progress) -> Result<()> {
    let (checkpoint, spec) = (inputs.checkpoint()?, inputs.spec()?);
    spec.warnings.iter().for_each(|w| progress.warn(w));
    inputs.list.check(&inputs.config.placement)?.iter().for_each(|note| progress.warn(note));
    for limit in checkpoint.limits(spec)? {
        progress.stage("Note", &limit);
    }
    check_templates(checkpoint, progress)?;
    check_sampling(checkpoint)?;
    first_token(checkpoint, spec)?;
    Ok(())
}

/// Calibration profile, if a decision depends on it: static shapes, experts that do not fit into memory,
/// approximations, or γ.
///
/// # Errors
/// Those of calibration; also fails if a profile is needed and there is none.
fn recorded(inputs: &Inputs<'_>, job: Job<'_>, progress: &Progress) -> Result<Option<Profile>> {
    let config = inputs.config;
    let approximates = config.experts.predict != Predict::Off || config.experts.threshold != Threshold::Off;
    let elsewhere = inputs.units.is_some() || !inputs.list.accelerators.is_empty();
    let chooses_gamma = config.decode.fallback_share().is_some();
    let decides = elsewhere || config.memory.budget.is_some() || approximates || chooses_gamma;
    let profile = if decides { calibrate::profile(inputs, job, progress)? } else { None };
    if profile.is_none() && config.experts.predict.is_requested() {
        return Err(Error::input("`predict` under `[experts]` needs a profile to train on")
            .hint("name `text` or `profile` under `[calibrate]`"));
    }
    Ok(profile)
}

/// Probe for quality loss, if the user allows some.
///
/// # Errors
/// Fails if a text cannot be read.
fn probe<'a>(inputs: &Inputs<'a>, job: Job<'a>, progress: &'a Progress) -> Result<Option<Measured<'a>>> {
    match inputs.profile.filter(|_| inputs.config.quality.max_perplexity_increase.is_some()) {
        Some(profile) => {
            Measured::new(inputs.config, inputs.checkpoint()?, profile, inputs.spec()?, progress)?
                .map(|measured| measured.with_job(job))
                .transpose()
        }
        None => Ok(None),
    }
}

/// Chooses formats of single weights, if the user gives a size for all weights.
///
/// # Errors
/// Fails if no choice of formats has that size, or if graphs are static: these have formats of their own.
fn mixed(inputs: &mut Inputs<'_>, job: Job<'_>, progress: &Progress) -> Result<Vec<Decision>> {
    match inputs.config.weights.size {
        Size::Any => Ok(Vec::new()),
        Size::Auto | Size::Most(_) if !inputs.config.weights.stored.is_empty() => Err(Error::limit(
            "`size` under `[weights]` chooses formats, and `stored` keeps those of the checkpoint",
        )
        .hint("remove one of the two")),
        Size::Auto | Size::Most(_) if inputs.units.is_some() => {
            Err(Error::limit("`size` under `[weights]` is not supported for static graphs")
                .hint("remove it, or build for a target with only a CPU"))
        }
        Size::Auto | Size::Most(_) => {
            let (formats, decisions) = mix::choose(inputs, job, progress)?;
            inputs.formats = formats;
            Ok(decisions)
        }
    }
}

/// Note for the user that names the accelerators of the device without any step of the plan; `None` if there
/// are none.
fn idle(plan: &Plan, device: &Device) -> Option<String> {
    let works = |name: &str| {
        let steps = plan.entries.iter().flat_map(|entry| &entry.steps);
        steps.filter_map(|step| plan.units.get(step.unit as usize)).any(|unit| unit.name == name)
    };
    let idle = device.units.iter().filter(|unit| unit.kind != UnitKind::Cpu && !works(&unit.name));
    let idle: Vec<_> = idle.map(|unit| format!("`{}`", unit.name)).collect();
    let names = (!idle.is_empty()).then(|| idle.join(", "))?;
    Some(format!(
        "nothing runs on {names} of `{}`: `moec explain BUNDLE` shows the costs; `[placement]` in `model.toml` overrides the decision",
        device.name
    ))
}

/// Compares the size of the packed weights with the size that the user gives.
///
/// # Errors
/// Fails if the weights are larger.
fn check_size(compiled: &Compiled<'_>, size: Size) -> Result<()> {
    let most = match size {
        Size::Most(bytes) => bytes,
        Size::Any | Size::Auto => u64::MAX,
    };
    let bytes = compiled.plan.segments.iter().map(|s| s.bytes).sum::<u64>();
    if bytes <= most {
        return Ok(());
    }
    Err(Error::limit(format!(
        "the weights take {} on `{}`, more than `size` under `[weights]` permits",
        human::bytes(bytes),
        compiled.target.name()
    ))
    .because("the target's panels are wider than those of the machine on which formats were chosen")
    .hint("reduce `size` by the difference"))
}

/// Placement of experts that `--gpu-experts` describes.
fn gpu_experts(percent: u8) -> UnitSetting {
    UnitSetting::Share(UnitKind::Gpu.name().to_owned(), percent)
}

/// Checks `--gpu-experts` against the target, before any file is read.
///
/// # Errors
/// Fails if the target has no GPU, or if it gives no costs of experts.
fn check_gpu_experts(device: &Device, percent: u8, target: &str) -> Result<()> {
    if device.unit_of(UnitKind::Gpu).is_none() {
        return Err(Error::usage(format!("`--gpu-experts` requires a GPU, and `{}` has none", device.name))
            .hint("`moec targets` lists targets with one; or leave `--gpu-experts` out"));
    }
    let config = PlacementConfig {
        experts: gpu_experts(percent),
        policy: Some(moec_config::POLICY),
        ..PlacementConfig::defaults()
    };
    gpu_expert_cache::check(&UnitList::of(device), &config).map_err(|why| {
        let hint = format!("{}; or leave `--gpu-experts` out", why.hint.clone().unwrap_or_default());
        let why = why.context(format!("`--gpu-experts {percent}%` cannot be used with `--target {target}`"));
        Error { fault: Fault::Usage, hint: Some(hint), ..why }
    })
}

/// Parses the chat templates of a checkpoint. An invalid template is a warning: texts can be continued
/// without it.
///
/// # Errors
/// Fails if a template is larger than the limit.
fn check_templates(checkpoint: &Checkpoint, progress: &Progress) -> Result<()> {
    let Some(bytes) = checkpoint.chat_templates()? else { return Ok(()) };
    let templates = Templates::parse(&bytes).map_err(|e| Error::bug("the chat templates").because(e))?;
    for (name, template) in templates.all() {
        let refused = |e: moec_service::Error| {
            Error::input(format!("the chat template `{name}` of the checkpoint cannot be used: {}", e.what))
                .hint("correct or remove `chat_template` in `tokenizer_config.json` or `chat_template.jinja`")
        };
        if let Some(why) = template.check().map_err(refused)? {
            progress.warn(&format!("the chat template `{name}` cannot be used: {}", why.what));
        }
    }
    Ok(())
}

/// Checks sampling options.
///
/// # Errors
/// Fails if an option has the wrong type or is out of range.
fn check_sampling(checkpoint: &Checkpoint) -> Result<()> {
    let Some(bytes) = checkpoint.sampling()? else { return Ok(()) };
    moec_service::sampling::parse(&bytes).map(|_| ()).map_err(|why| {
        Error::input(format!("the options of sampling in `generation_config.json` cannot be used: {why}"))
            .hint("correct or remove the key")
    })
}

/// Checks that the cache folder is writable, since calibration takes minutes and its profile is kept there.
fn require_calibration(config: &Config) -> Result<()> {
    if config.calibrate.profile.is_none() && !config.calibrate.text.is_empty() {
        cache_dir::writable_for(
            "calibration on `text` under `[calibrate]`",
            Some("record a profile elsewhere with `moec calibrate`, and name it as `profile` there"),
        )?;
    }
    Ok(())
}

/// Default path of the bundle, next to the `model.toml`: `olmoe-native.moec`.
fn default_output(config: &Config, target: &str) -> PathBuf {
    let source = std::fs::canonicalize(&config.model.source).unwrap_or_else(|_| config.model.source.clone());
    let name = source.file_name().map_or_else(|| "model".to_owned(), |n| n.to_string_lossy().into_owned());
    config.path.with_file_name(format!("{name}-{target}.moec"))
}
