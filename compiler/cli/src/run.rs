//! `moec run`.

use super::trust;
use moec_base::interrupt;
use moec_base::progress::Progress;
use moec_base::tools;
use moec_base::{Error, Result};
use moec_bundle::read::Bundle;
use moec_costs::units::Units;
use moec_ir::plan::UnitRef;
use moec_measure::host_build::HostBuild;
use moec_runtime::bundle::BundleReader;
use moec_runtime::cli::{Emulation, Front};
use moec_runtime::exec::accelerators::Executor;
use moec_runtime::{CheckLevel, Program};
use moec_targets::backends;
use std::ffi::OsString;
use std::path::PathBuf;
use std::process::ExitCode;

/// Run a bundle: generate, chat, serve, bench, …
///
/// The same as `BUNDLE/run SUBCOMMAND …`, for bundles without a linked `run` for this machine: generate,
/// chat, serve, logits, bench, info. A bundle is a program: run only bundles that you trust.
#[derive(Clone, Debug, clap::Args)]
pub struct Args {
    /// Emulate missing hardware, slowly: AMX instructions, accelerators, or another architecture. Must
    /// precede the subcommand
    ///
    /// A bundle for another architecture, such as a Mac's, is compiled for this machine from its own graph
    /// and weights. `--emulate=library` runs static graphs on the emulator of the unit's vendor, if it is
    /// installed, instead of moec's own. `--emulate=device` uses the vendor's emulator as `run` uses the
    /// device: with compiled graphs, in this process.
    #[arg(long, value_name = "WHOSE", num_args = 0..=1, require_equals = true, default_missing_value = "moec")]
    pub emulate: Option<Emulator>,
    /// Run only if the bundle has a valid signature for this public key and no file was changed. Must precede
    /// the subcommand
    #[arg(long, value_name = "PUB")]
    pub key: Option<PathBuf>,
    /// The bundle
    pub bundle: PathBuf,
    /// Subcommand and its arguments, passed on as they are
    #[arg(value_name = "ARGS", trailing_var_arg = true, allow_hyphen_values = true)]
    pub args: Vec<OsString>,
}

/// Emulator of static graphs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Emulator {
    /// moec's own
    Moec,
    /// The emulator of the unit's vendor
    Library,
    /// The same, used as the device is
    Device,
}

/// Runs a subcommand of the bundle and returns its exit code.
///
/// # Errors
/// Fails if the bundle cannot be opened, or its subcommand fails.
pub fn run(args: &Args, progress: &Progress) -> Result<ExitCode> {
    let bundle = Bundle::open(&args.bundle)?;
    if args.key.is_some() {
        trust::Trust::of(&bundle, args.key.as_deref(), progress)?;
        bundle.check_rest()?;
    }
    // With a key, the weights must be the signer's, too: they are checked as they are opened.
    let files = bundle.files(if args.key.is_some() { CheckLevel::All } else { CheckLevel::Small })?;
    let name = format!("moec run {}", args.bundle.display());
    if args.args.first().is_some_and(|subcommand| subcommand == SERVE) {
        interrupt::release();
    }
    let words = std::iter::once(name.clone().into()).chain(args.args.iter().cloned()).skip(1);
    if let Some(whose @ (Emulator::Library | Emulator::Device)) = args.emulate {
        return run_on_library(args, (&bundle, &files), whose, words, &name, progress);
    }
    let emulates = args.emulate.is_some();
    if emulates && bundle.needs_host_build() {
        let host_build = host_build(args, &bundle, progress)?;
        let emulation = Emulation { weights: host_build.folder(), executor: &host };
        return Ok(front(&name, Some(emulation), &files)
            .run(host_build.program(), &bundle.folder, words)
            .into());
    }
    let unit = if emulates { bundle.emulated_unit(progress)? } else { bundle.unit()? };
    let program = Program::new(bundle.plan.clone(), &|symbol| unit.resolve(symbol))
        .map_err(|e| Error::input("the plan cannot run on this machine").because(e))?
        .emulating(unit.emulated());
    let folder = &bundle.folder;
    let all = args.key.is_some() || args.args.iter().any(|word| word == CHECK);
    let check = if all { CheckLevel::All } else { CheckLevel::Small };
    if let Some(followed) = backends::follow(&program, folder, threads(&args.args), check) {
        return followed.map(|()| ExitCode::SUCCESS);
    }
    let info = args.args.first().is_some_and(|subcommand| subcommand == INFO);
    let has_executor = emulates || attached(&program, info)?;
    let executor: &dyn Fn(&UnitRef) -> Option<Executor> = if emulates { &host } else { &local_executor };
    let emulation = has_executor.then_some(Emulation { weights: folder, executor });
    let code = front(&name, emulation, &files).run(&program, folder, words);
    backends::leave(&program)?;
    Ok(code.into())
}

/// Threads that the arguments of a subcommand ask for.
fn threads(args: &[OsString]) -> Option<usize> {
    let words = || args.iter().filter_map(|word| word.to_str());
    let joined = words().find_map(|word| word.strip_prefix("--threads="));
    let apart = || words().skip_while(|word| *word != "--threads").nth(1);
    joined.or_else(apart)?.parse().ok()
}

/// A bundle's own subcommands, in this process.
fn front<'a>(name: &'a str, emulation: Option<Emulation<'a>>, files: &'a BundleReader) -> Front<'a> {
    Front { name, emulation, files: Some(files), ..moec_service::front(&[]) }
}

/// A bundle's host build, whose weights are packed from those of the bundle: with a key these are checked first.
fn host_build(args: &Args, bundle: &Bundle, progress: &Progress) -> Result<HostBuild> {
    if args.key.is_some() {
        bundle.manifest.check(&bundle.folder, true)?;
    }
    HostBuild::of(bundle, progress)
}

/// The option of subcommands that checks all files.
const CHECK: &str = "--check";

/// The subcommand that finishes its answers when a signal comes.
const SERVE: &str = "serve";

/// The subcommand that reports missing units and requires none.
const INFO: &str = "info";

/// Whether this machine has the accelerators whose backends find units by themselves; false where no unit is of such
/// a backend, or one is missing and only `info` needs it.
///
/// # Errors
/// A unit cannot be used.
fn attached(program: &Program, info: bool) -> Result<bool> {
    let mut found = false;
    for (_, unit) in program.accelerators() {
        match backends::attached(&unit.backend, &unit.name) {
            None => {}
            Some(Ok(_)) => found = true,
            Some(Err(_)) if info => return Ok(false),
            Some(Err(e)) => return Err(e),
        }
    }
    Ok(found)
}

/// Executor of a unit of this machine.
fn local_executor(unit: &UnitRef) -> Option<Executor> {
    backends::attached(&unit.backend, &unit.name)?.ok()
}

/// Runs with static graphs on the vendor's emulator of their unit.
fn run_on_library(
    args: &Args,
    (bundle, files): (&Bundle, &BundleReader),
    emulator: Emulator,
    words: impl Iterator<Item = OsString>,
    name: &str,
    progress: &Progress,
) -> Result<ExitCode> {
    let device = bundle.device()?;
    let units = Units::of(&device).filter(|_| !bundle.plan.graphs.is_empty());
    let units = units.ok_or_else(|| {
        Error::usage("`--emulate=library` and `--emulate=device` run static graphs, and the bundle has none")
            .hint("use `--emulate`, which emulates all other missing hardware")
    })?;
    let cache = tools::cache();
    let library = || {
        let tools = tools::beside(&cache);
        if emulator == Emulator::Device {
            units.graphs.device(tools, units.npu)
        } else {
            units.graphs.library(tools, units.npu)
        }
    };
    // A missing library is reported before weights are packed.
    drop(library()?);
    let host_build = host_build(args, bundle, progress)?;
    let executor = |unit: &UnitRef| {
        if unit.name == units.npu.name { library().ok().map(Executor::Graphs) } else { host(unit) }
    };
    let emulation = Emulation { weights: host_build.folder(), executor: &executor };
    Ok(front(name, Some(emulation), files).run(host_build.program(), &bundle.folder, words).into())
}

fn host(unit: &UnitRef) -> Option<Executor> {
    backends::host(&unit.backend, &unit.name)
}
