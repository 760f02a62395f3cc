//! Artifacts of accelerators, which their backends read back and execute.

use moec_backend::{FunctionReport, HotLayer, StreamTrial, Trial};
use moec_base::error::Result;
use moec_base::interrupt;
use moec_base::paths::DECISIONS;
use moec_base::progress::Progress;
use moec_base::tools;
use moec_bundle::read::Bundle;
use moec_costs::units::{UnitList, Units};
use moec_ir::Module;
use moec_ir::eval::Evaluator;
use moec_passes::{hot, parts};
use moec_runtime::bundle::BundleReader;

/// Executed functions, and functions that could not be executed.
pub(super) type Executed = (Vec<FunctionReport>, Vec<String>);

/// Executes every function of every artifact. With `rounded`, the evaluator has the bundle's own weights.
///
/// # Errors
/// Fails if an artifact is missing, malformed, or does not run.
pub(super) fn verify(
    bundle: &Bundle,
    files: &BundleReader,
    module: &Module,
    evaluator: &mut Evaluator<'_>,
    rounded: bool,
    progress: &Progress,
) -> Result<Executed> {
    let placement = &bundle.plan.placement;
    let device = bundle.device()?;
    let Some(units) = Units::of(&device).filter(|_| !placement.is_dynamic()) else {
        return Ok(Executed::default());
    };
    let (groups, parts) = (parts::groups(placement, &units), parts::placed(module, placement, &units));
    let hot = hot_layers(bundle)?;
    let bar = progress.items("Executing", (groups.len() + parts.len() + hot.len()) as u64, "graphs");
    let next = |name: &str| {
        interrupt::check()?;
        bar.label(name);
        bar.add(1);
        Ok(())
    };
    let cache = tools::cache();
    let mut trial = Trial {
        files,
        plan: &bundle.plan,
        module,
        unit: units.npu,
        groups: &groups,
        parts: &parts,
        hot: &hot,
        evaluator,
        rounded,
        tools: tools::beside(&cache),
        unverified: Vec::new(),
        next: &next,
    };
    let reports = units.graphs.verify(&mut trial)?;
    // An interrupt ends the programs of a backend, too.
    interrupt::check()?;
    bar.finish();
    Ok((reports, trial.unverified))
}

/// Layers with networks of hot neurons in the bundle.
fn hot_layers(bundle: &Bundle) -> Result<Vec<HotLayer>> {
    if !bundle.manifest.files.contains_key(DECISIONS) {
        return Ok(Vec::new());
    }
    Ok(hot::layers(&bundle.decisions()?.decisions))
}

/// Executes the NDP command streams of every unit that has some.
///
/// # Errors
/// Those of [`verify`].
pub(super) fn verify_streams(
    bundle: &Bundle,
    files: &BundleReader,
    module: &Module,
    evaluator: &mut Evaluator<'_>,
    progress: &Progress,
) -> Result<Vec<FunctionReport>> {
    if bundle.plan.streams.is_empty() {
        return Ok(Vec::new());
    }
    let device = bundle.device()?;
    let bar = progress.items("Executing", bundle.plan.streams.len() as u64, "layers");
    let next = |name: &str| {
        interrupt::check()?;
        bar.label(name);
        bar.add(1);
        Ok(())
    };
    let mut reports = Vec::new();
    for accelerator in &UnitList::of(&device).accelerators {
        let Some(streams) = accelerator.backend.command_streams() else { continue };
        let plan = &bundle.plan;
        let mut trial = StreamTrial {
            files,
            plan,
            module,
            unit: accelerator.index,
            device: accelerator.unit,
            evaluator,
            next: &next,
        };
        reports.extend(streams.verify(&mut trial)?);
    }
    bar.finish();
    Ok(reports)
}

/// Reads every artifact that the plan calls and checks that its unit can run it; executes nothing. Returns
/// the number of functions.
///
/// # Errors
/// Fails if an artifact is missing, malformed or refused, or lacks a function that the plan calls.
pub(super) fn read(bundle: &Bundle, files: &BundleReader, module: &Module) -> Result<(usize, Vec<String>)> {
    let plan = &bundle.plan;
    let hot = hot_layers(bundle)?;
    if plan.graphs.is_empty() && plan.streams.is_empty() && plan.launches.is_empty() && hot.is_empty() {
        return Ok((0, Vec::new()));
    }
    let device = bundle.device()?;
    let mut read = 0;
    if let Some(units) = Units::of(&device) {
        read += units.graphs.read(files, &bundle.plan, units.npu)?;
        units.graphs.read_hot(files, module, &hot)?;
    }
    for accelerator in &UnitList::of(&device).accelerators {
        if let Some(streams) = accelerator.backend.command_streams() {
            read += streams.read(files, &bundle.plan, accelerator.index)?;
        }
    }
    let (kernels, unverified) = read_threads(bundle, files)?;
    Ok((read + kernels, unverified))
}

/// Reads the GPU kernels of every unit that launches some. Returns their number, and the kernels that could
/// not be verified.
///
/// # Errors
/// Those of [`read`].
pub(super) fn read_threads(bundle: &Bundle, files: &BundleReader) -> Result<(usize, Vec<String>)> {
    let (plan, by) = (&bundle.plan, bundle.manifest.assembler.as_deref());
    let (mut read, mut unverified) = (0, Vec::new());
    if plan.launches.is_empty() {
        return Ok((read, unverified));
    }
    let (device, cache) = (bundle.device()?, tools::cache());
    for accelerator in &UnitList::of(&device).accelerators {
        let launches = plan.launches.iter().any(|k| k.unit == accelerator.index);
        if let Some(threads) = accelerator.backend.gpu_kernels().filter(|_| launches) {
            let found = threads.read(files, plan, accelerator.index, by, tools::beside(&cache))?;
            read += found.kernels;
            unverified.extend(found.unverified);
        }
    }
    Ok((read, unverified))
}
