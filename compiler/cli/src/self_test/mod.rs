//! `moec self-test`: builds and runs a small model on this machine, and checks its results.
//!
//! The model, `golden/models/ferris`, is part of the program: 12.4 MB for its checkpoint and tokenizer, and 9
//! KB for the results of the reference implementation. The test runs the commands of a user: `moec build` and
//! `BUNDLE/run`, in separate processes.

mod report;
mod trial;

use super::output;
use moec_base::Result;
use moec_base::error::io_error;
use moec_base::progress::Progress;
use serde_json::{Value, json};
use std::fs;
use std::path::PathBuf;
use std::process::ExitCode;
use trial::{TrialResult, Trials};

/// Build and run a small model to check this installation
///
/// Takes about ten seconds. The last line has version, CPU, verdict and speed: include it in bug reports.
#[derive(Clone, Debug, clap::Args)]
pub struct Args {
    /// Test and time every unit of this machine, and write a report for moec's developers to this file: JSON,
    /// without names of users, hosts or folders. Takes one or two minutes
    #[arg(long, value_name = "FILE")]
    pub report: Option<PathBuf>,
    /// Print one JSON object to stdout
    #[arg(long)]
    pub json: bool,
}

/// Runs the test. The exit code is 1 if results are wrong.
///
/// # Errors
/// Fails if a step fails, with its output, or the report cannot be written.
pub fn run(args: &Args, progress: &Progress) -> Result<ExitCode> {
    // A path that cannot be written is reported before the test, which takes minutes.
    if let Some(path) = &args.report {
        fs::write(path, "").map_err(|e| io_error("write", path, &e))?;
    }
    let trials = Trials::new()?;
    let tried = trials.cpu(progress);
    let mut right = true;
    if let Some(path) = &args.report {
        let report = report::write(&trials, tried.as_ref(), progress);
        moec_base::interrupt::check()?;
        moec_base::interrupt::check()?;
        right = report.is_right();
        fs::write(path, format!("{:#}\n", report.value)).map_err(|e| io_error("write", path, &e))?;
        progress.stage("Wrote", &format!("`{}`: read it before you send it", path.display()));
    }
    let found = tried.map_err(|e| {
        let hint = e.hint.clone().map_or_else(String::new, |h| format!("{h}; "));
        e.context("the self-test did not finish")
            .hint(format!("{hint}report all of this with the output of `moec doctor`, and `{}`", version()))
    })?;
    right &= found.is_right();
    let threads =
        moec_runtime::platform::cpu::threads(None).unwrap_or_else(|_| moec_runtime::platform::cpu::cores());
    if let Some(warning) = found.others.and_then(|others| others.warning(threads)) {
        progress.warn(&warning);
    }
    if args.json {
        output::json(&value(&found))?;
    } else {
        output::data(&line(&found))?;
    }
    if right {
        return Ok(ExitCode::SUCCESS);
    }
    progress.warn(if args.report.is_some() {
        "a part of this machine fails its test: see the report"
    } else {
        "this machine computed wrong results: report the line above with the output of `moec doctor`"
    });
    Ok(ExitCode::FAILURE)
}

fn version() -> String {
    format!("moec {} on {}-{}", env!("CARGO_PKG_VERSION"), std::env::consts::ARCH, std::env::consts::OS)
}

fn line(f: &TrialResult) -> String {
    let rate = f.tokens_per_s.map_or("no rate".to_owned(), |r| format!("{r:.0} tokens/s"));
    let (same, all) = f.tokens;
    format!(
        "{}, {} ({}): {}, {same} of {all} tokens as expected, logits within {:.1e}, {rate}, built in {:.1} s\n",
        version(),
        f.cpu,
        f.features.join(" "),
        f.verdict(),
        f.distance,
        f.build_s
    )
}

fn value(f: &TrialResult) -> Value {
    json!({
        "version": env!("CARGO_PKG_VERSION"),
        "machine": format!("{}-{}", std::env::consts::ARCH, std::env::consts::OS),
        "cpu": f.cpu,
        "features": f.features,
        "verdict": f.verdict(),
        "tokens": {"same": f.tokens.0, "of": f.tokens.1},
        "largest_distance_of_a_logit": f.distance,
        "decode_tokens_per_s": f.tokens_per_s,
        "cores": f.others.map(|others| others.cores),
        "cores_used_by_others": f.others.map(|others| others.used),
        "build_s": f.build_s,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn self_test_line_reports_a_wrong_result() {
        let wrong = TrialResult {
            cpu: "c".into(),
            features: vec![],
            build_s: 1.0,
            tokens: (63, 64),
            distance: 1e-4,
            near: 2e-3,
            tokens_per_s: None,
            others: None,
        };
        assert!(line(&wrong).contains("WRONG"));
    }
}
