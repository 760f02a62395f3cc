//! Requests, files and clients that are meant to harm a server, and the requirements meanwhile: every request
//! has an answer in time, the server's memory stays bounded, another client gets the right answer, and two
//! signals end the server.
//!
//! It is a module, not part of the crate: the example `hostile_serve` plays all cases, a test of the package
//! `moec` the quickest.

mod attack;
mod cases;
mod other;

pub(crate) use cases::CASES;

use attack::Attack;
use moec_testing::server::Server;
use other::Other;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

/// Kilobytes of address space that a server may take, so that a case that goes wrong does not take the
/// machine.
const ADDRESS_SPACE: &str = "6291456";
/// Time that a server may finish what has begun, before the second signal.
const FIRST_SIGNAL: Duration = Duration::from_secs(2);
/// Time that it may live after the second.
const SECOND_SIGNAL: Duration = Duration::from_secs(10);

/// One row of the table.
pub(crate) struct Case {
    pub(crate) name: &'static str,
    /// Whether it is among those of the test.
    pub(crate) in_test: bool,
    /// Options of the server.
    options: &'static [&'static str],
    attack: Attack,
    /// MiB that the server may take at most, in addition to its memory when idle.
    memory: u64,
}

/// The bundle that is served, and how.
pub(crate) struct Bundle {
    /// The compiler, which also serves it.
    pub(crate) moec: PathBuf,
    pub(crate) folder: PathBuf,
    /// The model, with a `model.toml`.
    pub(crate) source: PathBuf,
    /// A chat template for it.
    pub(crate) template: PathBuf,
    /// A folder for what cases write.
    pub(crate) scratch: PathBuf,
}

/// Outcome of a case.
#[derive(Default)]
pub(crate) struct Outcome {
    /// Statuses of answers, or what took their place.
    pub(crate) answers: String,
    /// MiB by which the server's memory grew.
    pub(crate) memory: u64,
    /// The slowest answer of the other client.
    pub(crate) other: Duration,
    pub(crate) took: Duration,
}

impl Bundle {
    /// The compiler, in bounds.
    fn moec(&self) -> Command {
        let mut command = Command::new("sh");
        command.args(["-c", "ulimit -v \"$0\" && exec \"$@\"", ADDRESS_SPACE]).arg(&self.moec);
        command
    }

    /// A server of a bundle, or why it ended at once.
    fn start(&self, folder: &Path, options: &[&str]) -> Result<Result<Server, String>, String> {
        let stderr = self.scratch.join("stderr");
        let mut command = self.moec();
        command.stderr(fs::File::create(&stderr).map_err(|e| e.to_string())?);
        // With `--exact`, the other client's answers are the same whatever other clients request.
        command
            .arg("run")
            .arg(folder)
            .args(["serve", "--port", "0", "--threads", "1", "--exact"])
            .args(options);
        match Server::start(&mut command) {
            Ok(server) => Ok(Ok(server)),
            Err(e) => {
                let stderr_text = fs::read_to_string(stderr).unwrap_or_default();
                Ok(Err(format!("{e}; {stderr_text}")))
            }
        }
    }
}

/// Plays a case.
///
/// # Errors
/// Fails if a requirement is not met.
pub(crate) fn play(case: &Case, bundle: &Bundle) -> Result<Outcome, String> {
    let start = Instant::now();
    let template = bundle.template.to_string_lossy().into_owned();
    let own;
    let mut options: Vec<&str> = case.options.to_vec();
    let mut folder = bundle.folder.clone();
    match &case.attack {
        Attack::Template { source, .. } => {
            let file = bundle.scratch.join("template.jinja");
            fs::write(&file, source()).map_err(|e| e.to_string())?;
            own = file.to_string_lossy().into_owned();
            options.extend(["--template", &own]);
        }
        Attack::Tokenizer(change) => {
            match attack::built(bundle, *change)? {
                Ok(built) => folder = built,
                Err(output) => {
                    let answers = refused(&case.attack, &output)?;
                    return Ok(Outcome { answers, took: start.elapsed(), ..Outcome::default() });
                }
            }
            options.extend(["--template", &template]);
        }
        Attack::Requests { .. } | Attack::Connections { .. } => options.extend(["--template", &template]),
    }
    let mut outcome = Outcome::default();
    let mut server = match bundle.start(&folder, &options)? {
        Ok(server) => server,
        Err(output) => {
            outcome.answers = refused(&case.attack, &output)?;
            outcome.took = start.elapsed();
            return Ok(outcome);
        }
    };
    let memory = |e: std::io::Error| format!("the server's memory: {e}; {}", ended(bundle));
    let before = server.resident().map_err(memory)?;
    // A tokenizer that is refused leaves no text to answer with.
    let mut other = match case.attack {
        Attack::Tokenizer(_) => None,
        _ => Some(Other::new(server.address())?),
    };
    let attacked = case.attack.run(server.address(), other.as_mut());
    outcome.answers = attacked.map_err(|why| format!("{why}; {}", ended(bundle)))?;
    if let Some(other) = &mut other {
        other.check()?;
        outcome.other = other.slowest;
    }
    outcome.memory = server.peak().map_err(memory)?.saturating_sub(before) >> 20;
    if outcome.memory > case.memory {
        return Err(format!("it took {} MiB more, and may take {}", outcome.memory, case.memory));
    }
    end(&mut server)?;
    outcome.took = start.elapsed();
    Ok(outcome)
}

/// Output of a build or a server that ended at once: correct if it refuses the file of the case.
fn refused(attack: &Attack, output: &str) -> Result<String, String> {
    let file = match attack {
        Attack::Template { .. } => "template",
        Attack::Tokenizer(_) => "tokenizer",
        Attack::Requests { .. } | Attack::Connections { .. } => "",
    };
    let named = output.contains("exit status: 1") && output.contains("error:");
    if !file.is_empty() && named && output.contains(file) {
        return Ok("refused by name".to_owned());
    }
    Err(output.chars().take(400).collect())
}

/// Standard error of a server at its end.
fn ended(bundle: &Bundle) -> String {
    let stderr = fs::read_to_string(bundle.scratch.join("stderr")).unwrap_or_default();
    let from = stderr.len().saturating_sub(400);
    format!("it says: {}", stderr.get(from..).unwrap_or(&stderr).trim())
}

/// Ends a server by a signal, and by a second one if it still has answers to finish.
fn end(server: &mut Server) -> Result<(), String> {
    let gone = |e: std::io::Error| format!("the server is gone: {e}");
    server.signal("-TERM").map_err(gone)?;
    if server.ended(FIRST_SIGNAL).is_ok() {
        return Ok(());
    }
    server.signal("-TERM").map_err(gone)?;
    let ended = server.ended(SECOND_SIGNAL);
    ended.map(drop).map_err(|_| format!("two signals do not end it within {} s", SECOND_SIGNAL.as_secs()))
}
