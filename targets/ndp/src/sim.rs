//! `moec ndp-sim`: a trace of requests, through the model of the memory.

use clap::builder::PossibleValuesParser;
use clap::{ArgMatches, CommandFactory, FromArgMatches};
use moec_backend::Subcommand;
use moec_backend::error::{Error, Result, io_error};
use moec_dram::trace::{Setup, simulate};
use moec_dram::{Options, TIMINGS, Timing};
use moec_runtime::platform::regular;
use std::io::BufReader;
use std::path::PathBuf;

/// The subcommand, for the backend's row.
pub(crate) const SUBCOMMAND: Subcommand = Subcommand { command: Args::command, run };

/// Simulate a trace of requests on the model of DDR5 memory
///
/// Each line of the trace is one request for 64 bytes: `R|W channel rank bankgroup bank row column`. The
/// report says at which clocks of the memory bus reads and writes were issued (docs/ndp-dram.md).
#[derive(Clone, Debug, clap::Parser)]
#[command(name = "ndp-sim")]
struct Args {
    /// Trace of requests
    #[arg(long, value_name = "FILE")]
    dram_trace: PathBuf,
    /// Timing of the chips
    #[arg(long, value_name = "NAME", default_value = TIMINGS[0].0, value_parser = PossibleValuesParser::new(TIMINGS.map(|(n, _)| n)))]
    timing: String,
    /// Requests that each of a channel's two queues holds
    #[arg(long, value_name = "N", default_value_t = 32, value_parser = clap::value_parser!(u32).range(1..=65536))]
    queue: u32,
    /// Leave out refresh
    #[arg(long)]
    no_refresh: bool,
    /// Print one JSON object to stdout
    #[arg(long)]
    json: bool,
}

/// Runs the simulation and returns the report.
///
/// # Errors
/// Fails if the trace cannot be read, or has addresses outside of the memory.
fn run(options: &ArgMatches) -> Result<String> {
    let args = Args::from_arg_matches(options).map_err(|e| Error::usage(e.to_string()))?;
    let unknown = || Error::usage(format!("`{}` is not a timing", args.timing));
    let timing = Timing::named(&args.timing).ok_or_else(unknown)?;
    let options = Options { queue: args.queue as usize, refresh: !args.no_refresh };
    let file = regular::open(&args.dram_trace).map_err(|e| io_error("read", &args.dram_trace, &e))?;
    let report = simulate(BufReader::new(file), &Setup::new(timing, options))
        .map_err(|e| Error::input(format!("{}: {e}", args.dram_trace.display())))?;
    if args.json {
        return Ok(format!("{:#}", serde_json::json!(report)));
    }
    let last = report.cycles.last().unwrap_or(0);
    let steady =
        report.steady_cycles_per_line.map_or_else(String::new, |n| format!(", {n:.2} clocks a line"));
    Ok(format!(
        "{} reads and writes in {last} clocks ({:.1} µs){steady}; {} activates, {} precharges, {} refreshes\n",
        report.column_commands,
        timing.microseconds(last),
        report.act,
        report.pre,
        report.r#ref
    ))
}
