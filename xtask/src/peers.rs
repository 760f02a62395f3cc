//! `cargo xtask bench-peers`: moec beside other engines on this machine.
//!
//! The comparison itself is Python (`bench/peers`), as the peers are; nothing of it is needed to build or to
//! run a model.

use crate::setup;
use crate::shell::{self, Failed, cargo, output, program, stage, target_dir};

/// Oldest Python that the scripts run on.
const PYTHON: (u32, u32) = (3, 10);
const SCRIPT: &str = "bench/peers/main.py";

/// Builds moec, then hands over to the script with the arguments of this command.
pub(crate) fn run(args: &[String]) -> Result<(), Failed> {
    let python = python()?;
    if args.iter().any(|a| a == "--help" || a == "-h") {
        return shell::run(program(&python).args([SCRIPT, "--moec", "moec", "--cache", "cache", "--help"]));
    }
    let llvm = setup::run()?;
    stage("Building", "moec");
    shell::run(cargo("build", Some(&llvm)).args(["--release", "--locked", "--package", "moec"]))?;
    let target = target_dir();
    let mut script = program(&python);
    script.arg(SCRIPT).arg("--moec").arg(target.join("release/moec"));
    if !args.iter().any(|a| a == "--cache" || a.starts_with("--cache=")) {
        script.arg("--cache").arg(target.join("bench-peers"));
    }
    shell::run(script.args(args))
}

/// A Python that is new enough.
fn python() -> Result<String, Failed> {
    let version = |name: &str| {
        let out = output(program(name).args(["-c", "import sys; print(*sys.version_info[:2])"]))?;
        let (major, minor) = out.split_once(' ')?;
        Some((major.parse::<u32>().ok()?, minor.parse::<u32>().ok()?))
    };
    let found = ["python3", "python3.12", "python3.11", "python3.10"];
    let found = found.iter().find(|name| version(name).is_some_and(|v| v >= PYTHON));
    found.map(|name| (*name).to_owned()).ok_or_else(|| {
        Failed::new("no Python of 3.10 or later")
            .hint("the other engines come from PyPI; install python3 with its venv module")
    })
}
