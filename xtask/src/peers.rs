//! `cargo xtask bench-peers`, `bench-disk`, `bench-neurons` and `bench-serve`: moec compared with other
//! engines on this machine. `bench-hosts`: one model on several hosts. `bench-needle`: retrieval from long contexts.
//!
//! The comparisons themselves are Python (folders of `bench`), as the peers are; nothing of it is needed to build or
//! to run a model.

use crate::setup;
use crate::shell::{self, Failed, cargo, output, program, stage, target_dir};

/// Oldest Python that the scripts run on.
const PYTHON: (u32, u32) = (3, 10);
/// Models that fit into memory.
pub(crate) const PEERS: &str = "bench/peers/main.py";
/// A model that does not.
pub(crate) const DISK: &str = "bench/disk/main.py";
/// One that does not, whose gates have zeros.
pub(crate) const NEURONS: &str = "bench/disk/neurons.py";
/// One model on two hosts and on one.
pub(crate) const HOSTS: &str = "bench/hosts/main.py";
/// Retrieval from long contexts, by the form of the KV cache.
pub(crate) const NEEDLE: &str = "bench/needle/main.py";
/// A comparison with several clients.
pub(crate) const SERVE: &str = "bench/serve/main.py";

/// Builds moec, then hands over to a script with the arguments of this command.
pub(crate) fn run(script: &str, args: &[String]) -> Result<(), Failed> {
    let python = python()?;
    if args.iter().any(|a| a == "--help" || a == "-h") {
        return shell::run(program(&python).args([script, "--moec", "moec", "--cache", "cache", "--help"]));
    }
    let llvm = setup::run()?;
    stage("Building", "moec");
    shell::run(cargo("build", Some(&llvm)).args(["--release", "--locked", "--package", "moec"]))?;
    let target = target_dir();
    let mut command = program(&python);
    command.arg(script).arg("--moec").arg(target.join("release/moec"));
    if !args.iter().any(|a| a == "--cache" || a.starts_with("--cache=")) {
        command.arg("--cache").arg(target.join("bench-peers"));
    }
    shell::run(command.args(args))
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

#[cfg(test)]
mod tests {
    use super::python;
    use crate::shell::{program, root};

    /// Tests of the scripts' own code. They require no engine, no network and no moec.
    #[test]
    fn the_scripts_own_tests_pass() {
        let Some(python) = moec_testing::PYTHON.ok_or_skip(python()) else { return };
        for tests in [
            "bench/peers/tests.py",
            "bench/disk/tests.py",
            "bench/disk/neuron_tests.py",
            "bench/serve/tests.py",
            "bench/hosts/tests.py",
            "bench/needle/tests.py",
        ] {
            let out = program(&python).current_dir(root()).arg(tests).output().expect("Python starts");
            assert!(out.status.success(), "{tests}:\n{}", String::from_utf8_lossy(&out.stderr));
        }
    }
}
