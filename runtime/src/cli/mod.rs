//! The verbs of a bundle: `generate`, `logits`, `bench`, `info`.
//!
//! Data goes to standard output, everything else to standard error. Exit status 0; 1 if it failed; 2 for
//! bad use; 130 after an interrupt. A reader that closes the output early has had enough: that is no error.

mod args;
mod assigned;
mod bench;
mod generate;
mod info;
mod interrupt;
mod logits;
mod paging;

use crate::abi::KernelFn;
use crate::beside::Executor;
use crate::engine::{Engine, Options};
use crate::error::{Error, Result};
use crate::manifest;
use crate::memory::size;
use crate::paging::Paging;
use crate::program::Program;
use crate::store::CheckLevel;
use args::{Cli, Common, Verb};
use clap::{CommandFactory, FromArgMatches};
use moec_ir::plan::UnitRef;
use std::ffi::OsString;
use std::io::{self, ErrorKind, IsTerminal, Read, Write};
use std::path::Path;
use std::process::ExitCode;

/// Exit status for bad use.
const BAD_USE: u8 = 2;
/// Exit status after an interrupt: 128 + SIGINT.
const INTERRUPTED: u8 = 130;

/// Where a verb reads and writes.
pub struct Io<'a> {
    /// Standard input; none if it is a terminal.
    pub input: Option<&'a mut dyn Read>,
    /// Data.
    pub out: &'a mut dyn Write,
    /// Everything else.
    pub err: &'a mut dyn Write,
}

impl Io<'_> {
    /// Writes data and passes it on at once.
    fn say(&mut self, text: &str) -> Result<()> {
        self.out.write_all(text.as_bytes()).and_then(|()| self.out.flush()).map_err(Error::Output)
    }

    /// Writes a note. That nobody can read it is no reason to stop.
    fn note(&mut self, text: &str) {
        let _ = writeln!(self.err, "{text}");
    }
}

/// What every verb gets.
struct Context<'a> {
    program: &'a Program,
    /// Where tokenizer and packages lie.
    bundle: &'a Path,
    beside: Option<Beside<'a>>,
    native: Option<Native<'a>>,
    name: &'a str,
}

/// What a program needs beside its bundle where it does not run on its target.
#[derive(Clone, Copy)]
pub struct Beside<'a> {
    /// Folder of the weights.
    pub weights: &'a Path,
    /// Brings what executes a unit beside the processor.
    pub executor: &'a dyn Fn(&UnitRef) -> Option<Executor>,
}

/// What executes the units of a family on their own machine, where the runtime by itself does not.
#[derive(Clone, Copy)]
pub struct Native<'a> {
    /// The family.
    pub family: &'a str,
    /// Brings what executes a unit of it, or says why this machine has none.
    pub executor: &'a dyn Fn(&UnitRef) -> Option<Result<Executor>>,
}

impl Native<'_> {
    /// What executes a unit, if it is of the family.
    fn bring(&self, unit: &UnitRef) -> Option<Result<Executor>> {
        if unit.family == self.family { (self.executor)(unit) } else { None }
    }
}

impl<'a> Context<'a> {
    fn open(&self, common: &Common) -> Result<Engine<'a>> {
        self.open_recording(common, false)
    }

    /// As [`Context::open`]; `record`: routing is written down where experts are on flash.
    fn open_recording(&self, common: &Common, record: bool) -> Result<Engine<'a>> {
        if self.program.paging.is_none() {
            let given = [
                ("--budget", common.budget.is_some()),
                ("--no-verify-reads", common.no_verify_reads),
                ("--prefetch", common.prefetch.is_some()),
            ];
            if let Some((option, _)) = given.iter().find(|(_, given)| *given) {
                return Err(Error::NoPaging(option));
            }
        }
        let check = match (common.check, self.beside) {
            // All is checked by now, and hashing large files twice would take twice as long.
            (true, None) => CheckLevel::Sizes,
            (true, Some(_)) => CheckLevel::All,
            (false, _) => CheckLevel::Small,
        };
        let stop = Some(interrupt::flag());
        let mut paging = Paging::from_env()?;
        paging.flash.verify_reads = !common.no_verify_reads;
        paging.budget = common.budget;
        paging.record = record;
        paging.preload = !common.no_preload;
        paging.ahead = common.prefetch.unwrap_or(paging.ahead);
        let options = Options {
            threads: common.threads,
            check,
            resident: common.no_budget,
            weights: common.weights,
            lazy: common.no_preload,
            paging: Some(paging),
            stop,
        };
        match (self.beside, self.native) {
            (None, None) => Engine::open(self.program, self.bundle, options),
            (None, Some(native)) => {
                let mut missing = None;
                let mut executor = |unit: &UnitRef| match native.bring(unit)? {
                    Ok(executor) => Some(executor),
                    Err(why) => {
                        missing.get_or_insert(why);
                        None
                    }
                };
                let engine =
                    Engine::with_units(self.program, self.bundle, &mut executor, self.bundle, options);
                // Why a unit is missing says more than that it is.
                missing.map_or(engine, Err)
            }
            (Some(Beside { weights, executor }), _) => {
                Engine::with_units(self.program, weights, &mut |unit| executor(unit), self.bundle, options)
            }
        }
    }
}

/// Holds all files of the bundle against its manifest, if that is asked for, and says so.
fn check(context: &Context<'_>, verb: &Verb, io: &mut Io<'_>) -> Result<(), Failure> {
    let Some((_, notes)) = verb.common().filter(|(common, _)| common.check) else { return Ok(()) };
    // The weights of a program beside its bundle lie elsewhere.
    let own = context.beside.is_none().then_some(context.program);
    let done = manifest::check(context.bundle, own)?;
    if notes {
        io.note(&format!("checked {} files, {}: all as they were built", done.files, size(done.bytes)));
        if done.run_unlisted {
            io.note("note: `run` was built after the manifest, which does not list it");
        }
    }
    Ok(())
}

/// How a verb can end without success.
enum Failure {
    /// It failed.
    Error(Error),
    /// It was asked for something that makes no sense.
    Use { what: String, hint: String },
}

impl From<Error> for Failure {
    fn from(e: Error) -> Self {
        Self::Error(e)
    }
}

/// The whole of a `run`: the bundle is the folder that the executable lies in. `plan` is encoded, and its kernels come in
/// its order: see [`Program::linked`].
pub fn main(plan: &[u8], kernels: &[KernelFn]) -> ExitCode {
    ExitCode::from(main_of(plan, kernels, None))
}

/// As [`main`], with what executes the units of a family beside the processor.
pub fn main_with(plan: &[u8], kernels: &[KernelFn], native: Native<'_>) -> ExitCode {
    ExitCode::from(main_of(plan, kernels, Some(native)))
}

/// As [`main_with`]. Returns the exit status, for a `main` that is C's.
pub fn main_status_with(plan: &[u8], kernels: &[KernelFn], native: Native<'_>) -> u8 {
    main_of(plan, kernels, Some(native))
}

fn main_of(plan: &[u8], kernels: &[KernelFn], native: Option<Native<'_>>) -> u8 {
    let program = match Program::linked(plan, kernels) {
        Ok(program) => program,
        Err(e) => {
            complain(&e, &mut io::stderr().lock());
            return 1;
        }
    };
    let exe = std::env::current_exe().and_then(std::fs::canonicalize);
    let bundle = exe.as_ref().ok().and_then(|e| e.parent()).unwrap_or(Path::new("."));
    status(&program, bundle, (None, native), std::env::args_os().skip(1), "run")
}

/// Runs a verb of the bundle in the folder `bundle` on the standard streams. `args` begins with the verb;
/// `name` is how the user calls this (`moec run BUNDLE`).
pub fn run(
    program: &Program,
    bundle: &Path,
    beside: Option<Beside<'_>>,
    args: impl Iterator<Item = OsString>,
    name: &str,
) -> ExitCode {
    ExitCode::from(status(program, bundle, (beside, None), args, name))
}

fn status(
    program: &Program,
    bundle: &Path,
    executors: (Option<Beside<'_>>, Option<Native<'_>>),
    args: impl Iterator<Item = OsString>,
    name: &str,
) -> u8 {
    let stdin = io::stdin();
    let terminal = stdin.is_terminal();
    let mut stdin = stdin.lock();
    let io = Io {
        input: if terminal { None } else { Some(&mut stdin) },
        out: &mut io::stdout().lock(),
        err: &mut io::stderr().lock(),
    };
    run_of(program, bundle, executors, args, name, io)
}

/// As [`run`], on any streams. Returns the exit status.
pub fn run_with(
    program: &Program,
    bundle: &Path,
    beside: Option<Beside<'_>>,
    args: impl Iterator<Item = OsString>,
    name: &str,
    io: Io<'_>,
) -> u8 {
    run_of(program, bundle, (beside, None), args, name, io)
}

fn run_of(
    program: &Program,
    bundle: &Path,
    (beside, native): (Option<Beside<'_>>, Option<Native<'_>>),
    args: impl Iterator<Item = OsString>,
    name: &str,
    mut io: Io<'_>,
) -> u8 {
    let command = Cli::command().bin_name(name);
    let parsed = command.try_get_matches_from(args).and_then(|m| Cli::from_arg_matches(&m));
    let verb = match parsed {
        Ok(cli) => cli.verb,
        Err(e) => return refuse(&e, name, &mut io),
    };
    let context = Context { program, bundle, beside, native, name };
    let done = check(&context, &verb, &mut io).and_then(|()| match verb {
        Verb::Generate(args) => generate::run(&context, &args, &mut io),
        Verb::Logits(args) => logits::run(&context, &args, &mut io),
        Verb::Bench(args) => bench::run(&context, &args, &mut io),
        Verb::Info(args) => info::run(&context, &args, &mut io),
    });
    match done {
        Ok(()) => 0,
        Err(Failure::Use { what, hint }) => {
            io.note(&format!("error: {what}\nhint: {hint}"));
            BAD_USE
        }
        Err(Failure::Error(Error::Output(e))) if e.kind() == ErrorKind::BrokenPipe => 0,
        Err(Failure::Error(Error::Interrupted)) => INTERRUPTED,
        Err(Failure::Error(e)) => {
            complain(&e, io.err);
            if matches!(e, Error::Range { .. }) { BAD_USE } else { 1 }
        }
    }
}

/// Writes an error and what to do about it. That nobody can read it is no reason to stop.
fn complain(e: &Error, err: &mut dyn Write) {
    let _ = writeln!(err, "error: {e}");
    if let Some(hint) = e.hint() {
        let _ = writeln!(err, "hint: {hint}");
    }
}

/// Prints what clap has to say: help and version are data, the rest is an error.
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
        io.note(&format!("hint: `{name} help` lists the verbs, `{name} help VERB` the options of one"));
    } else {
        io.note(text.trim_end());
    }
    BAD_USE
}
