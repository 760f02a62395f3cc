//! The subcommands of a bundle: `generate`, `logits`, `bench` and `info`. A crate above this one may add
//! subcommands ([`AddedSubcommand`]) and options ([`ConstraintOptions`]).
//!
//! Data goes to standard output, everything else to standard error. Exit status 0; 1 if it failed; 2 if the
//! arguments are wrong ([`Error::is_bad_use`]); 130 after an interrupt. If the reader of the output closes it
//! early, that is not an error.

pub mod args;
mod assigned;
mod bench;
mod generate;
mod hosts;
mod info;
pub mod interrupt;
pub mod limits;
mod logits;
mod operations;
mod paging;

use crate::bundle::BundleReader;
use crate::bundle::abi::KernelFn;
use crate::bundle::manifest;
use crate::bundle::program::Program;
use crate::error::{Error, Result};
use crate::exec::accelerators::Executor;
use crate::exec::engine::{Engine, Options};
use crate::offload::paging::Paging;
use crate::platform::memory::{self, size};
use crate::serving::sampler::Constraint;
use crate::weights::Demand;
use crate::weights::store::CheckLevel;
use args::{Cli, Commands, Common};
use clap::{ArgMatches, CommandFactory, FromArgMatches};
use moec_ir::plan::UnitRef;
use std::ffi::OsString;
use std::io::{self, ErrorKind, IsTerminal, Read, Write};
use std::path::Path;

/// The subcommand that [`ConstraintOptions`] are for.
const GENERATE: &str = "generate";
/// Exit status for bad use.
const BAD_USE: u8 = 2;
/// Exit status after an interrupt: 128 + SIGINT.
const INTERRUPTED: u8 = 130;

/// Input and output of a subcommand.
pub struct Io<'a> {
    /// Standard input; `None` if it is a terminal.
    pub input: Option<&'a mut dyn Read>,
    /// Data.
    pub out: &'a mut dyn Write,
    /// Everything else.
    pub err: &'a mut dyn Write,
}

impl Io<'_> {
    /// Writes data and flushes it.
    ///
    /// # Errors
    /// [`Error::Output`].
    pub fn say(&mut self, text: &str) -> Result<()> {
        self.out.write_all(text.as_bytes()).and_then(|()| self.out.flush()).map_err(Error::Output)
    }

    /// Writes an error and its remedy. A closed stderr is not an error.
    pub fn error(&mut self, what: &str, hint: Option<&str>) {
        self.note(&format!("error: {what}"));
        if let Some(hint) = hint {
            self.note(&format!("hint: {hint}"));
        }
    }

    /// Writes a note. A closed stderr is not an error.
    pub fn note(&mut self, text: &str) {
        let _ = writeln!(self.err, "{text}");
    }
}

/// Context of a subcommand.
pub struct Context<'a> {
    /// Program that runs.
    pub program: &'a Program,
    /// The bundle. Its files are read by [`Context::files`].
    pub bundle: &'a Path,
    /// Name by which the user calls this.
    pub name: &'a str,
    emulation: Option<Emulation<'a>>,
    native: &'a [Native<'a>],
    files: Option<&'a BundleReader>,
}

/// A subcommand that a crate above this one adds.
#[derive(Clone, Copy)]
pub struct AddedSubcommand {
    /// Its name, help and options, including those of [`Common`].
    pub command: fn() -> clap::Command,
    /// Function of the subcommand.
    pub run: for<'a, 'p> fn(&'a Context<'p>, &ArgMatches, &mut Io<'_>) -> Result<(), Failure>,
}

/// Constructor of the constraint for one answer.
pub type MakeConstraint = dyn Fn() -> Result<Box<dyn Constraint>>;

/// Reader of such options, before weights are opened; `None` if none is given.
pub type ReadConstraint = for<'a, 'p> fn(
    &'a Context<'p>,
    &BundleReader,
    &ArgMatches,
) -> Result<Option<Box<MakeConstraint>>, Failure>;

/// Options of `generate` that a crate above this one adds: formats that constrain answers.
#[derive(Clone, Copy)]
pub struct ConstraintOptions {
    /// Adds them to the subcommand.
    pub options: fn(clap::Command) -> clap::Command,
    /// Reads them.
    pub read: ReadConstraint,
}

/// Context of the subcommands: parameters of [`Front::run`] other than a program and its bundle.
#[derive(Clone, Copy)]
pub struct Front<'a> {
    /// Name by which the user calls this (`moec run BUNDLE`).
    pub name: &'a str,
    /// Subcommands in addition to this crate's own.
    pub added_subcommands: &'a [AddedSubcommand],
    /// Options in addition to this crate's own.
    pub constraint_options: Option<ConstraintOptions>,
    /// Emulation, if the program does not run on its target.
    pub emulation: Option<Emulation<'a>>,
    /// Executors of accelerators on their own machine.
    pub native: &'a [Native<'a>],
    /// Files of the bundle, if the caller knows all of them. Otherwise those that the plan names, and with
    /// `--check` those of the manifest.
    pub files: Option<&'a BundleReader>,
}

impl Default for Front<'_> {
    fn default() -> Self {
        Self {
            name: "run",
            added_subcommands: &[],
            constraint_options: None,
            emulation: None,
            native: &[],
            files: None,
        }
    }
}

/// Emulation of a program that does not run on its target.
#[derive(Clone, Copy)]
pub struct Emulation<'a> {
    /// Folder of the weights.
    pub weights: &'a Path,
    /// Returns the executor of an accelerator.
    pub executor: &'a dyn Fn(&UnitRef) -> Option<Executor>,
}

/// Executor of a backend's units on their own machine.
#[derive(Clone, Copy)]
pub struct Native<'a> {
    /// The backend.
    pub backend: &'a str,
    /// Returns the executor of a unit, or the reason that this machine has none. `None`: no machine of this
    /// operating system has one.
    pub executor: &'a dyn Fn(&UnitRef) -> Option<Result<Executor>>,
}

impl<'a> Context<'a> {
    /// Executor of a unit on this machine, or the reason that it has none; `None` if no backend has such
    /// units.
    fn native_executor(&self, unit: &UnitRef) -> Option<Result<Executor>> {
        let native = self.native.iter().find(|native| native.backend == unit.backend)?;
        (native.executor)(unit)
    }

    /// Reader of the bundle's files. With `--check`, all files are compared with the manifest first, and the
    /// user is notified. Weights are checked when they are opened, so that the checked bytes are those that
    /// are used.
    ///
    /// # Errors
    /// A file that differs from the build.
    pub fn files(&self, common: &Common, notes: bool, io: &mut Io<'_>) -> Result<BundleReader, Failure> {
        if !common.check {
            let of_plan = || BundleReader::of_plan(self.bundle, self.program, CheckLevel::Small);
            return Ok(self.files.cloned().unwrap_or_else(of_plan));
        }
        let listed = match self.files.and_then(BundleReader::listed) {
            Some(listed) => listed.cloned().collect(),
            None => manifest::files(self.bundle)?,
        };
        let files = BundleReader::of_manifest(self.bundle, &listed, CheckLevel::All);
        // An emulated program has its weights in another folder.
        let own = self.emulation.is_none().then_some(self.program);
        let done = manifest::check(&files, own)?;
        if notes {
            let (count, bytes, left) = (done.files, size(done.bytes), size(done.left));
            let still = format!(" so far; {left} of weights are hashed before they are used");
            let still = if done.left > 0 { still } else { String::new() };
            io.note(&format!("checked {count} files, {bytes}: all as they were built{still}"));
            if done.run_unlisted {
                io.note("note: `run` was built after the manifest, which does not list it");
            }
        }
        Ok(files)
    }

    /// Opens the program with these options, for the sequences of `demand`. It stops between calls once
    /// [`interrupt::flag`] is true.
    ///
    /// # Errors
    /// As [`Engine::open`]; options that do not apply to the plan.
    pub fn open(&self, common: &Common, files: &BundleReader, demand: Demand) -> Result<Engine<'a>> {
        if self.program.paging.is_none() {
            let given = [
                ("--budget", common.budget.is_some()),
                ("--no-verify-reads", common.no_verify_reads),
                ("--prefetch", common.prefetch.is_some() && self.program.experts.policy.cached().is_none()),
            ];
            if let Some((option, _)) = given.iter().find(|(_, given)| *given) {
                let what = format!(
                    "`{option}` applies to experts on disk, and the bundle was built without a memory budget"
                );
                return Err(Error::usage(what)
                    .with_hint("set `budget` under `[memory]` in `model.toml` and build again"));
            }
        }
        if common.mlock {
            memory::lock().map_err(|e| {
                Error::usage(format!("`--mlock`: memory cannot be locked: {e}"))
                    .with_hint("raise the limit (`ulimit -l unlimited`), or leave the option out")
            })?;
        }
        let stop = Some(interrupt::flag());
        let mut paging = Paging::from_env()?;
        paging.disk.verify_reads = !common.no_verify_reads;
        paging.budget = common.budget;
        paging.preload = !common.no_preload;
        paging.ahead = common.prefetch.unwrap_or(paging.ahead);
        let options = Options {
            threads: common.threads,
            pin: common.pin,
            demand: Some(demand),
            check: files.level(),
            resident: common.no_budget,
            weights: common.weights,
            lazy: common.no_preload,
            fixed_costs: common.fixed_costs,
            ahead: common.prefetch,
            paging: Some(paging),
            stop,
            warn: Some(warn),
        };
        if let Some(Emulation { weights, executor }) = self.emulation {
            return Engine::with_units(self.program, weights, &mut |unit| executor(unit), files, options);
        }
        let mut missing = None;
        let mut executor = |unit: &UnitRef| match self.native_executor(unit)? {
            Ok(executor) => Some(executor),
            Err(why) => {
                missing.get_or_insert(why);
                None
            }
        };
        let engine = Engine::with_units(self.program, self.bundle, &mut executor, files, options);
        // The reason that a unit is missing is the better message.
        missing.map_or(engine, Err)
    }
}

/// Warns the user; the run continues.
fn warn(text: &str) {
    // This thread may hold the stream's lock already: engines run on the thread of the subcommands.
    let _ = writeln!(io::stderr(), "warning: {text}");
}

/// Failure of a subcommand.
#[derive(Debug)]
pub enum Failure {
    /// An error of this crate.
    Error(Error),
    /// A subcommand of a crate above failed.
    Other {
        /// The fault.
        what: String,
        /// Remedy, if there is one.
        hint: Option<String>,
    },
    /// Bad use: a request that makes no sense.
    Use {
        /// The request, and the reason for the refusal.
        what: String,
        /// Remedy.
        hint: String,
    },
}

impl From<Error> for Failure {
    fn from(e: Error) -> Self {
        Self::Error(e)
    }
}

impl Front<'_> {
    /// All subcommands with their options: this crate's and those that were added. Arguments begin with the
    /// subcommand.
    pub fn command(&self) -> clap::Command {
        let added = self.added_subcommands.iter().map(|more| (more.command)());
        let command = Cli::command().bin_name(self.name).subcommands(added);
        match self.constraint_options {
            Some(forms) => command.mut_subcommand(GENERATE, |generate| {
                // `augment_args` also sets the description, so the subcommand's own is restored.
                let about = generate.get_about().cloned().unwrap_or_default();
                (forms.options)(generate).about(about)
            }),
            None => command,
        }
    }

    /// Main function of a `run`: the bundle is the folder of the executable. `plan` is encoded, and the
    /// kernels are in its order: see [`Program::linked`]. Returns the exit status, for a `main` that may be
    /// in C.
    pub fn main(&self, plan: &[u8], kernels: &[KernelFn]) -> u8 {
        let program = match Program::linked(plan, kernels) {
            Ok(program) => program,
            Err(e) => {
                let io = &mut Io { input: None, out: &mut io::stdout(), err: &mut io::stderr() };
                io.error(&e.to_string(), e.hint().as_deref());
                return 1;
            }
        };
        let exe = std::env::current_exe().and_then(std::fs::canonicalize);
        let bundle = exe.as_ref().ok().and_then(|e| e.parent()).unwrap_or(Path::new("."));
        self.run(&program, bundle, std::env::args_os().skip(1))
    }

    /// Runs a subcommand of the bundle in the folder `bundle` on the standard streams. `args` begins with the
    /// subcommand. Returns the exit status.
    pub fn run(&self, program: &Program, bundle: &Path, args: impl Iterator<Item = OsString>) -> u8 {
        let stdin = io::stdin();
        let terminal = stdin.is_terminal();
        let mut stdin = stdin.lock();
        let io = Io {
            input: if terminal { None } else { Some(&mut stdin) },
            out: &mut io::stdout().lock(),
            err: &mut io::stderr().lock(),
        };
        self.run_with(program, bundle, args, io)
    }

    /// As [`Front::run`], on any streams.
    pub fn run_with(
        &self,
        program: &Program,
        bundle: &Path,
        args: impl Iterator<Item = OsString>,
        mut io: Io<'_>,
    ) -> u8 {
        let &Self { name, added_subcommands: more, constraint_options: forms, emulation, native, files } =
            self;
        let matches = match self.command().try_get_matches_from(args) {
            Ok(matches) => matches,
            Err(e) => return refuse(&e, name, &mut io),
        };
        let context = Context { program, bundle, name, emulation, native, files };
        let added = matches.subcommand().and_then(|(subcommand, matches)| {
            Some((more.iter().find(|more| (more.command)().get_name() == subcommand)?, matches))
        });
        let done = match added {
            Some((more, matches)) => (more.run)(&context, matches, &mut io),
            None => match Cli::from_arg_matches(&matches) {
                Ok(cli) => {
                    own(&context, cli.command, forms.zip(matches.subcommand_matches(GENERATE)), &mut io)
                }
                Err(e) => return refuse(&e, name, &mut io),
            },
        };
        match done {
            Ok(()) => 0,
            Err(Failure::Use { what, hint }) => {
                io.note(&format!("error: {what}\nhint: {hint}"));
                BAD_USE
            }
            Err(Failure::Other { what, hint }) => {
                io.error(&what, hint.as_deref());
                1
            }
            Err(Failure::Error(Error::Output(e))) if e.kind() == ErrorKind::BrokenPipe => 0,
            Err(Failure::Error(Error::Interrupted)) => INTERRUPTED,
            Err(Failure::Error(e)) => {
                io.error(&e.to_string(), e.hint().as_deref());
                if e.is_bad_use() { BAD_USE } else { 1 }
            }
        }
    }
}

/// Runs a subcommand of this crate. `forms`: added options of [`GENERATE`], and their values.
fn own(
    context: &Context<'_>,
    command: Commands,
    forms: Option<(ConstraintOptions, &ArgMatches)>,
    io: &mut Io<'_>,
) -> Result<(), Failure> {
    match command {
        Commands::Generate(args) => {
            let files = context.files(&args.common, !args.quiet, io)?;
            let read =
                |(forms, given): (ConstraintOptions, &ArgMatches)| (forms.read)(context, &files, given);
            let make_constraint = forms.map_or(Ok(None), read)?;
            generate::run(context, &files, &args, make_constraint.as_deref(), io)
        }
        Commands::Logits(args) => logits::run(context, &context.files(&args.common, true, io)?, &args, io),
        Commands::Bench(args) => bench::run(context, &context.files(&args.common, true, io)?, &args, io),
        Commands::Info(args) => info::run(context, &args, io),
    }
}

/// Prints clap's message: help and version are data, the rest is an error.
fn refuse(e: &clap::Error, name: &str, io: &mut Io<'_>) -> u8 {
    let text = e.render().to_string();
    if !e.use_stderr() {
        let _ = io.say(&text);
        return 0;
    }
    if text.starts_with("error: ") {
        let (hints, rest): (Vec<_>, Vec<_>) = text
            .lines()
            .filter(|l| !l.is_empty() && !l.starts_with("For more information"))
            .partition(|l| l.starts_with("  tip: "));
        io.note(&rest.join("\n"));
        for hint in hints {
            io.note(&hint.replacen("  tip: ", "hint: ", 1));
        }
        io.note(&format!(
            "hint: `{name} help` lists the subcommands, `{name} help SUBCOMMAND` the options of one"
        ));
    } else {
        io.note(text.trim_end());
    }
    BAD_USE
}
