//! `moec build`, from a `model.toml` to a bundle on disk.

use moec_base::cache_dir;
use moec_base::error::{Error, Fault, Result};
use moec_base::human;
use moec_base::progress::Progress;
use moec_bundle::toolchain::{Missing, Route};
use moec_bundle::write::{self, Summary};
use moec_bundle::{cargo, destination, workspace};
use moec_config::{Config, PlacementConfig, Predict, Rounding, Size, Threshold, UnitSetting};
use moec_costs::units::{UnitList, Units};
use moec_cpu::{CpuTarget, WeightImportance};
use moec_device::{Device, UnitKind};
use moec_import::{Checkpoint, ImportOptions, ModelSpec};
use moec_ir::plan::Plan;
use moec_measure::quality::Measured;
use moec_measure::tuner::Tuner;
use moec_measure::{calibrate, mix, thresholds};
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
    /// Name of a target, or a path of a device file.
    pub target: &'a str,
    /// Folder of the bundle.
    pub output: Option<&'a Path>,
    /// Share of the experts, in percent, that a GPU's memory holds, in place of what the `model.toml` says.
    pub gpu_experts: Option<u8>,
    /// Time for measuring kernels, if they are measured.
    pub tune: Option<Duration>,
    /// Whether `run` is linked.
    pub link: bool,
    /// Whether cargo builds it from the bundle's sources, though the runtime is there precompiled.
    pub from_source: bool,
    /// Whether the bundle has the runtime's sources, which it has in any case where cargo builds its `run`.
    pub sources: bool,
    /// Whether weights that an earlier bundle of the checkpoint has are taken from there.
    pub reuse: bool,
    /// Passes to print after and to stop at.
    pub stops: Stops<'a>,
}

/// A bundle that was written.
#[derive(Clone, Debug)]
pub struct BuiltBundle {
    /// Its folder.
    pub folder: PathBuf,
    /// Its plan.
    pub plan: Plan,
    /// Summary of what was written.
    pub summary: Summary,
}

/// Builds. Gives `None` where the request stops before a bundle is written.
///
/// # Errors
/// Whatever is wrong with the request, the checkpoint or the machine; nothing is left behind then.
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
    let route = prepare(request, &config, &target, &folder, progress)?;
    let tuner = request.tune.map(|time| Tuner::new(&target, time, progress)).transpose()?;
    let (checkpoint, spec) = open(&config, progress)?;

    let mut inputs = Inputs::new(&config, &checkpoint, &spec, &target);
    inputs.units = Units::of(&device);
    check(&inputs, progress)?;
    let profile = recorded(&inputs, progress)?;
    inputs.profile = profile.as_ref();
    let probe = probe(&inputs, progress)?;
    inputs.quality = probe.as_ref().map(|p| p as &dyn QualityProbe);
    let mix = mixed(&mut inputs, progress)?;
    let spent = mix.first().and_then(|of| of.figure(mix::INCREASE)).unwrap_or(0.0);
    let (chosen, thresholds) = thresholds::choose(&inputs, spent, progress)?.unzip();
    inputs.thresholds = chosen.unwrap_or_default();

    let mut compilation = Compilation::new(inputs);
    compilation.timer = tuner.map(|tuner| Box::new(tuner) as Box<dyn KernelTimer>);
    let ran = compilation.run(request.stops, progress, print);
    if let Some(few) = compilation.placed.placement.as_ref().and_then(tier::few) {
        progress.warn(&few);
    }
    if !ran? {
        return Ok(None);
    }
    let weighed = calibrate::importance(&compilation.inputs, &compilation.module, progress)?;
    let weighed = weighed.as_ref();

    let mut compiled = compilation.finish()?;
    let used = profile.as_ref().map(calibrate::expert_use);
    let used = used.or_else(|| weighed.map(|w| w.expert_use.clone()));
    let importance = weighed.map(|w| &w.importance);
    compiled.decisions.rounding = importance.map_or(Rounding::Nearest, Importance::rounding);
    compiled.decisions.expert_use = used.unwrap_or_default();
    let before = mix.into_iter().chain(thresholds.into_iter().flatten());
    compiled.decisions.decisions.splice(..0, before);
    check_size(&compiled, config.weights.size)?;
    if let Some(note) = idle(&compiled.plan, &device) {
        progress.stage("Note", &note);
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

/// Configuration of the user: the `model.toml`, with what the request has in place of it.
///
/// # Errors
/// A file that cannot be used, or that requests what the device cannot do.
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

/// Looks at this machine before minutes of compiling: whether the bundle can be written, and how its `run` comes about.
///
/// # Errors
/// What the build would fail for at its end.
fn prepare(
    request: &Request<'_>,
    config: &Config,
    target: &CpuTarget,
    folder: &Path,
    progress: &Progress,
) -> Result<Option<Result<Route, Missing>>> {
    let writes = request.stops.stop_after.is_none();
    if writes {
        // `write` looks again.
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
        cache_dir::path()
            .map_err(|e| e.context("what writes artifacts for its units is installed in the cache folder"))?;
    }
    Ok(route)
}

/// Opens the checkpoint.
///
/// # Errors
/// One that cannot be read, or that this version does not support.
fn open(config: &Config, progress: &Progress) -> Result<(Checkpoint, ModelSpec)> {
    let options = ImportOptions { allow_nonfinite: config.model.allow_nonfinite };
    let _phase = progress.phase("Importing", &config.model.source.display().to_string());
    moec_import::open(&config.model.source, &options)
}

/// Looks at what goes into the bundle as it is, before anything is computed.
///
/// # Errors
/// A tokenizer or options that no run could use, a placement on units that the device does not have.
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

/// Profile of the calibration, where something is decided by it: what is static, what does not fit, what is approximated.
///
/// # Errors
/// Those of a calibration; no profile where one is needed.
fn recorded(inputs: &Inputs<'_>, progress: &Progress) -> Result<Option<Profile>> {
    let config = inputs.config;
    let approximates = config.experts.predict != Predict::Off || config.experts.threshold != Threshold::Off;
    let elsewhere = inputs.units.is_some() || !inputs.list.accelerators.is_empty();
    let decides = elsewhere || config.memory.budget.is_some() || approximates;
    let profile = if decides { calibrate::profile(inputs, progress)? } else { None };
    if profile.is_none() && config.experts.predict.is_requested() {
        return Err(Error::input("`predict` under `[experts]` needs a profile to train on")
            .hint("name `text` or `profile` under `[calibrate]`"));
    }
    Ok(profile)
}

/// Probe of losses of quality, where the user allows some.
///
/// # Errors
/// Texts that cannot be read.
fn probe<'a>(inputs: &Inputs<'a>, progress: &'a Progress) -> Result<Option<Measured<'a>>> {
    match inputs.profile.filter(|_| inputs.config.quality.max_perplexity_increase.is_some()) {
        Some(profile) => {
            Measured::new(inputs.config, inputs.checkpoint()?, profile, inputs.spec()?, progress)
        }
        None => Ok(None),
    }
}

/// Buys formats of weights, where the user gives a size for them.
///
/// # Errors
/// A size that no choice of formats has, or static graphs, which have formats of their own.
fn mixed(inputs: &mut Inputs<'_>, progress: &Progress) -> Result<Vec<Decision>> {
    match inputs.config.weights.size {
        Size::Any => Ok(Vec::new()),
        Size::Auto | Size::Most(_) if inputs.units.is_some() => {
            Err(Error::limit("`size` under `[weights]` and static graphs do not go together yet")
                .hint("leave it out, or build for a target of the CPU alone"))
        }
        Size::Auto | Size::Most(_) => {
            let (formats, decisions) = mix::choose(inputs, progress)?;
            inputs.formats = formats;
            Ok(decisions)
        }
    }
}

/// The accelerators of the device that no step of the plan runs on, in a sentence for the user; `None` where there are none.
fn idle(plan: &Plan, device: &Device) -> Option<String> {
    let works = |name: &str| {
        let steps = plan.entries.iter().flat_map(|entry| &entry.steps);
        steps.filter_map(|step| plan.units.get(step.unit as usize)).any(|unit| unit.name == name)
    };
    let idle = device.units.iter().filter(|unit| unit.kind != UnitKind::Cpu && !works(&unit.name));
    let idle: Vec<_> = idle.map(|unit| format!("`{}`", unit.name)).collect();
    let names = (!idle.is_empty()).then(|| idle.join(", "))?;
    Some(format!(
        "nothing runs on {names} of `{}`: `moec explain BUNDLE` prints the costs, `[placement]` in `model.toml` decides otherwise",
        device.name
    ))
}

/// Compares the packed weights with the size that the user gives.
///
/// # Errors
/// They are larger.
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
        "the weights take {} on `{}`, more than `size` under `[weights]` says",
        human::bytes(bytes),
        compiled.target.name()
    ))
    .because("its panels are wider than those of the machine that formats were chosen on")
    .hint("say so much less under `size`"))
}

/// Placement of experts by `--gpu-experts`.
fn gpu_experts(percent: u8) -> UnitSetting {
    UnitSetting::Share(UnitKind::Gpu.name().to_owned(), percent)
}

/// Checks `--gpu-experts` against the target, before anything is read.
///
/// # Errors
/// A target without a GPU, or one that does not say what experts cost.
fn check_gpu_experts(device: &Device, percent: u8, target: &str) -> Result<()> {
    if device.unit_of(UnitKind::Gpu).is_none() {
        return Err(Error::usage(format!("`--gpu-experts` requires a GPU, and `{}` has none", device.name))
            .hint("`moec targets` lists targets with one; or leave `--gpu-experts` out"));
    }
    let wanted = PlacementConfig {
        experts: gpu_experts(percent),
        policy: Some(moec_config::POLICY),
        ..PlacementConfig::defaults()
    };
    gpu_expert_cache::check(&UnitList::of(device), &wanted).map_err(|why| {
        let hint = format!("{}; or leave `--gpu-experts` out", why.hint.clone().unwrap_or_default());
        let why = why.context(format!("`--gpu-experts {percent}%` cannot be used with `--target {target}`"));
        Error { fault: Fault::Usage, hint: Some(hint), ..why }
    })
}

/// Parses the chat templates of a checkpoint. One that is not a template is a warning: texts can be continued without it.
///
/// # Errors
/// A template that takes more than any may.
fn check_templates(checkpoint: &Checkpoint, progress: &Progress) -> Result<()> {
    let Some(bytes) = checkpoint.chat_templates()? else { return Ok(()) };
    let templates = Templates::parse(&bytes).map_err(|e| Error::bug("the chat templates").because(e))?;
    for (name, template) in templates.all() {
        let refused = |e: moec_service::Error| {
            Error::input(format!("the chat template `{name}` of the checkpoint cannot be used: {}", e.what))
                .hint("mend or remove `chat_template` in `tokenizer_config.json` or `chat_template.jinja`")
        };
        if let Some(why) = template.check().map_err(refused)? {
            progress.warn(&format!("the chat template `{name}` cannot be used: {}", why.what));
        }
    }
    Ok(())
}

/// Refuses options of sampling that no run could use.
///
/// # Errors
/// One of another type, or out of its range.
fn check_sampling(checkpoint: &Checkpoint) -> Result<()> {
    let Some(bytes) = checkpoint.sampling()? else { return Ok(()) };
    moec_service::sampling::parse(&bytes).map(|_| ()).map_err(|why| {
        Error::input(format!("the options of sampling in `generation_config.json` cannot be used: {why}"))
            .hint("mend or remove the key")
    })
}

/// The cache folder must be writable before texts are read for minutes whose profile is kept there.
fn require_calibration(config: &Config) -> Result<()> {
    if config.calibrate.profile.is_none() && !config.calibrate.text.is_empty() {
        cache_dir::writable_for(
            "calibration on `text` under `[calibrate]`",
            Some("record a profile elsewhere with `moec calibrate`, and name it as `profile` there"),
        )?;
    }
    Ok(())
}

/// `olmoe-native.moec`, beside the `model.toml`.
fn default_output(config: &Config, target: &str) -> PathBuf {
    let source = std::fs::canonicalize(&config.model.source).unwrap_or_else(|_| config.model.source.clone());
    let name = source.file_name().map_or_else(|| "model".to_owned(), |n| n.to_string_lossy().into_owned());
    config.path.with_file_name(format!("{name}-{target}.moec"))
}
