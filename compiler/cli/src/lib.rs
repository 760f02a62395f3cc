//! The command line: arguments, and one file per subcommand.
//!
//! Data goes to stdout, everything else to stderr. Exit code 0, 1 (failed), 2 (the command line is wrong), or
//! 130 after Ctrl-C (143 after SIGTERM).

pub mod backend_command;
pub mod build;
mod bundle;
pub mod caches;
pub mod calibrate;
pub mod compare;
pub mod completions;
mod decided;
mod divided;
pub mod docs;
pub mod doctor;
pub mod eval;
pub mod explain;
pub mod facts;
pub mod fit;
mod heat;
pub mod init;
pub mod inspect;
mod loads;
mod neurons;
pub mod output;
mod packages;
mod paging;
pub mod pass;
pub mod passes;
mod phone;
mod placement;
pub mod profile_device;
pub mod report;
pub mod run;
pub mod self_test;
pub mod sign;
pub mod simulate;
pub mod steps;
pub mod synth;
pub mod targets;
mod trace;
mod trust;
pub mod verify;
pub mod worker;

use clap::{ColorChoice, Parser, Subcommand};
use moec_base::progress::Progress;
use moec_base::{Error, Result, interrupt, tools};
use std::process::ExitCode;

const AFTER: &str = "\
A first model:
  moec init path/to/checkpoint       writes model.toml with the keys that users often change
  moec build model.toml -o out.moec  compiles it for this machine
  out.moec/run generate --prompt \"Once upon a time\"

Environment:
  MOEC_CACHE        cache folder for later builds (default: ~/.cache/moec)
  MOEC_NO_PROGRESS  disables progress bars and the lines that replace them
  NO_COLOR          disables colours";

/// Ahead-of-time compiler for Mixture-of-Experts language models
#[derive(Debug, Parser)]
#[command(name = "moec", version, after_help = AFTER, max_term_width = 100, disable_help_subcommand = true)]
pub struct Cli {
    #[command(flatten)]
    global: Global,
    #[command(subcommand)]
    command: Commands,
}

/// Options of every subcommand.
#[derive(Debug, clap::Args)]
#[command(next_help_heading = "Global options")]
struct Global {
    /// Print only errors, warnings and results
    #[arg(long, short, global = true)]
    quiet: bool,
    /// Verbose output: show each pass and each timed kernel
    #[arg(long, short, global = true, conflicts_with = "quiet")]
    verbose: bool,
    /// Use of colours
    #[arg(long, global = true, value_name = "WHEN", default_value = "auto")]
    color: ColorChoice,
}

/// The subcommands.
#[derive(Debug, Subcommand)]
enum Commands {
    Init(init::Args),
    Calibrate(calibrate::Args),
    Fit(fit::Args),
    Build(build::Args),
    Inspect(inspect::Args),
    Explain(explain::Args),
    Report(report::Args),
    Compare(compare::Args),
    Verify(verify::Args),
    Sign(sign::Args),
    Run(run::Args),
    Eval(eval::Args),
    Steps(steps::Args),
    Simulate(simulate::Args),
    ProfileDevice(profile_device::Args),
    #[command(flatten)]
    Backend(backend_command::BackendCommand),
    Targets(targets::Args),
    Passes(passes::Args),
    Doctor(doctor::Args),
    SelfTest(self_test::Args),
    Completions(completions::Args),
    #[command(hide = true)]
    Synth(synth::Args),
    #[command(hide = true)]
    Pass(pass::Args),
    #[command(hide = true)]
    Docs(docs::Args),
    #[command(hide = true)]
    Worker(worker::Args),
    /// Constrain answers of `moec run BUNDLE serve` by grammars, until stdin ends
    #[command(hide = true, name = "bounded_worker")]
    BoundedWorker,
}

/// Runs the command line of this process.
pub fn main() -> ExitCode {
    tools::this_is_moec();
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(e) => {
            output::usage(&e);
            return ExitCode::from(u8::try_from(e.exit_code()).unwrap_or(2));
        }
    };
    // A worker ends with the process that started it.
    if !matches!(cli.command, Commands::Worker(_) | Commands::BoundedWorker) {
        interrupt::install();
    }
    match cli.global.color {
        ColorChoice::Auto => {}
        ColorChoice::Always => anstream::ColorChoice::Always.write_global(),
        ColorChoice::Never => anstream::ColorChoice::Never.write_global(),
    }
    let progress = Progress::new(cli.global.quiet, cli.global.verbose);
    match cli.command.run(&progress) {
        Ok(code) => code,
        Err(error) => {
            // A failure after a signal is a consequence of the signal.
            let interrupted = interrupt::exit_code();
            let error = interrupt::check().err().unwrap_or(error);
            output::error(&error);
            ExitCode::from(interrupted.unwrap_or(error.exit_code()))
        }
    }
}

impl Commands {
    fn run(&self, progress: &Progress) -> Result<ExitCode> {
        match self {
            Self::Init(args) => init::run(args, progress),
            Self::Calibrate(args) => calibrate::run(args, progress),
            Self::Fit(args) => fit::run(args, progress),
            Self::Build(args) => build::run(args, progress),
            Self::Inspect(args) => inspect::run(args),
            Self::Explain(args) => explain::run(args),
            Self::Report(args) => report::run(args, progress),
            Self::Compare(args) => compare::run(args),
            Self::Verify(args) => verify::run(args, progress),
            Self::Sign(args) => sign::run(args),
            Self::Run(args) => return run::run(args, progress),
            Self::Eval(args) => eval::run(args, progress),
            Self::Steps(args) => steps::run(args, progress),
            Self::Simulate(args) => simulate::run(args),
            Self::ProfileDevice(args) => profile_device::run(args, progress),
            Self::Backend(command) => command.run(),
            Self::Targets(args) => targets::run(args),
            Self::Passes(args) => passes::run(args),
            Self::Doctor(args) => return doctor::run(args),
            Self::SelfTest(args) => return self_test::run(args, progress),
            Self::Completions(args) => completions::run(args),
            Self::Synth(args) => synth::run(args, progress),
            Self::Pass(args) => pass::run(args),
            Self::Docs(args) => docs::run(args),
            Self::Worker(args) => return worker::run(args),
            Self::BoundedWorker => moec_service::worker::run().map_err(|e| Error::environment(e.what)),
        }
        .map(|()| ExitCode::SUCCESS)
    }
}
