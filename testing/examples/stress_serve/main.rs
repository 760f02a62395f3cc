//! Clients that come and go at random query `BUNDLE/run serve`, and its guarantees are checked: `cargo xtask
//! stress-serve` builds a bundle and runs this.
//!
//! Half of the time the server runs with `--exact`, half of it without. Every answer that a client waits for
//! is compared with that of a separate process, `run generate` or `run chat` ([`known`]). Memory is watched
//! all the while ([`memory`]). At the end every slot is free, and after a signal the server finishes an
//! answer.
#![allow(clippy::cast_possible_truncation, reason = "numbers of tests are small")]
#![expect(clippy::print_stdout, clippy::print_stderr, reason = "a program for people")]

#[path = "../../clients/mod.rs"]
mod clients;
mod known;
mod memory;

use clients::{COMPLETIONS, Clients, Model as _};
use known::Known;
use memory::Watch;
use moec_testing::http::{get, post};
use moec_testing::server::Server;
use serde_json::json;
use std::path::PathBuf;
use std::process::{Command, ExitCode};
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

/// Clients at once.
const CLIENTS: u32 = 64;
/// Bytes that a body may have.
const BODY: usize = 64 << 10;
/// Time limit for an immediate answer of the server, while 64 others send requests.
const PATIENCE: Duration = Duration::from_mins(1);

/// Arguments of the command line.
struct Args {
    /// The `run` of a bundle.
    run: PathBuf,
    /// A chat template for it.
    template: PathBuf,
    /// A text whose parts are continued.
    text: PathBuf,
    /// Duration, both halves together.
    time: Duration,
}

impl Args {
    fn read() -> Option<Self> {
        let mut words = std::env::args().skip(1);
        let [run, template, text, seconds] = [words.next()?, words.next()?, words.next()?, words.next()?];
        let time = Duration::from_secs(seconds.parse().ok()?);
        Some(Self { run: run.into(), template: template.into(), text: text.into(), time })
    }

    /// A subcommand of the bundle, with as many threads as the server has.
    fn subcommand(&self, subcommand: &str) -> Command {
        let mut command = Command::new(&self.run);
        command.args([subcommand, "--threads", "2"]);
        command
    }

    /// The server.
    fn serve(&self, exact: bool) -> Result<Server, String> {
        let mut command = self.subcommand("serve");
        command.args(["--port", "0", "--max-body", &BODY.to_string(), "--template"]).arg(&self.template);
        command.args(exact.then_some("--exact"));
        Server::start(&mut command).map_err(|e| format!("the server does not start: {e}"))
    }
}

fn main() -> ExitCode {
    let Some(args) = Args::read() else {
        eprintln!("usage: stress_serve BUNDLE/run TEMPLATE TEXT SECONDS");
        return ExitCode::from(2);
    };
    match all(&args) {
        Ok(()) => ExitCode::SUCCESS,
        Err(why) => {
            eprintln!("error: {why}");
            ExitCode::FAILURE
        }
    }
}

fn all(args: &Args) -> Result<(), String> {
    let known = Known::of(args)?;
    println!("{} requests, each with the answer of a process of its own", known.len());
    half(args, &known.exact(true))?;
    half(args, &known.exact(false))
}

/// One server for half of the time.
fn half(args: &Args, known: &Known) -> Result<(), String> {
    let mut server = args.serve(known.exact)?;
    let at = server.address().to_owned();
    // The KV cache gets its memory as it fills: all of it, before memory is looked at.
    let full = post(&at, COMPLETIONS, known.long()).call().map_err(|e| e.to_string())?;
    full.events().ok_or_else(|| format!("the slots cannot be filled: {}", full.body))?;
    let watch = Watch::start(server.id());
    let clients = Clients::new(&at, known, CLIENTS, args.time / 2);
    let done = clients.run();
    let seen = watch.stop();
    println!("\n{} clients for {} s, {}", CLIENTS, (args.time / 2).as_secs(), known.name());
    let acts: Vec<String> = done.acts.iter().map(|(act, n)| format!("{n} {act}")).collect();
    println!("  requests   {}; {} sent away", acts.join(", "), clients.sent_away.load(Ordering::Relaxed));
    if let [first, ..] = &*done.failures {
        return Err(format!("{} clients failed; the first: {first}", done.failures.len()));
    }
    if let Some((act, _)) = done.acts.iter().find(|(_, n)| *n == 0) {
        return Err(format!("nothing was {act}: more seconds are needed"));
    }
    println!("  answers    {}", known.summary());
    println!("  slots      {}", slots(&at, known)?);
    println!("  memory     {}", memory::hold(&seen, memory::promised(args)?)?);
    println!("  signal     {}", signal(&mut server, known)?);
    Ok(())
}

/// Whether every slot is free again: the metrics report it, and a request for all of them is answered.
fn slots(at: &str, known: &Known) -> Result<String, String> {
    let start = Instant::now();
    while metric(at, "moec_sequences_running")? + metric(at, "moec_sequences_waiting")? > 0.0 {
        if start.elapsed() > PATIENCE {
            return Err("sequences run that no client waits for".to_owned());
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    let settled = start.elapsed();
    let mut all = known.long();
    all["max_tokens"] = json!(2);
    let reply = post(at, COMPLETIONS, &all).call().map_err(|e| e.to_string())?;
    reply.events().ok_or_else(|| format!("not all slots can be had: {}", reply.body))?;
    let rows = metric(at, "moec_decode_rows_total")? / metric(at, "moec_decode_steps_total")?.max(1.0);
    let shared = metric(at, "moec_shared_tokens_total")?;
    let prompts = metric(at, "moec_prompt_tokens_total")? + shared;
    Ok(format!(
        "all {} free and the queue empty {} ms after the last client; {rows:.2} rows in a step, {:.0} % of the tokens of prompts shared",
        metric(at, "moec_slots")?,
        settled.as_millis(),
        100.0 * shared / prompts.max(1.0),
    ))
}

/// Ends the server by SIGTERM in the middle of an answer, which still comes to its end.
fn signal(server: &mut Server, known: &Known) -> Result<String, String> {
    let failed = |e: std::io::Error| e.to_string();
    let mut incoming = post(server.address(), COMPLETIONS, known.long()).send().map_err(failed)?;
    incoming.event().map_err(failed)?.ok_or("a stream without events")?;
    let start = Instant::now();
    server.signal("-TERM").map_err(failed)?;
    let mut events = 1_u64;
    while incoming.event().map_err(failed)?.is_some() {
        events += 1;
    }
    let status = server.ended(PATIENCE).map_err(|e| format!("SIGTERM does not end it: {e}"))?;
    if !status.success() {
        return Err(format!("SIGTERM ends it with {status}"));
    }
    Ok(format!(
        "SIGTERM: {events} events of an answer, and the end, {} ms later",
        start.elapsed().as_millis()
    ))
}

/// A figure of the server's.
fn metric(at: &str, name: &str) -> Result<f64, String> {
    let text = get(at, "/metrics").call().map_err(|e| e.to_string())?.body;
    let value = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' ')?.parse().ok());
    value.ok_or_else(|| format!("no figure `{name}`"))
}
