//! Commands that are run on damaged files.

use super::case::CaseFolders;
use super::rng::Rng;
use std::ffi::OsString;
use std::path::PathBuf;

/// A subcommand and its arguments. `HF` is the checkpoint's folder, `IN` the bundle's.
#[derive(Debug)]
pub(crate) struct Subcommand {
    pub(crate) name: &'static str,
    args: &'static [&'static str],
    /// Path that may exist afterwards if the subcommand succeeds.
    pub(crate) makes: Option<&'static str>,
}

const fn subcommand(name: &'static str, args: &'static [&'static str]) -> Subcommand {
    Subcommand { name, args, makes: None }
}

const fn making(name: &'static str, args: &'static [&'static str], makes: &'static str) -> Subcommand {
    Subcommand { name, args, makes: Some(makes) }
}

/// Name of the bundle that `build` creates.
pub(crate) const BUILT: &str = "out.moec";

/// Subcommands for checkpoints. `build` is listed more than once, since it reads the most.
pub(crate) const OF_CHECKPOINTS: [Subcommand; 9] = [
    making("init", &["init", "HF", "-o", "out.toml"], "out.toml"),
    subcommand("inspect", &["inspect", "HF"]),
    subcommand("inspect model.toml", &["inspect", "model.toml"]),
    making("build", &["build", "model.toml", "--no-run", "-o", BUILT], BUILT),
    making("build", &["build", "model.toml", "--no-run", "-o", BUILT, "--target", "native", "--json"], BUILT),
    making(
        "build for x86-64-v3",
        &["build", "model.toml", "--no-run", "-o", BUILT, "--target", "x86-64-v3"],
        BUILT,
    ),
    making(
        "build for m2-max",
        &["build", "model.toml", "-o", BUILT, "--target", "m2-max", "--stop-after", "memory"],
        BUILT,
    ),
    making(
        "calibrate",
        &[
            "calibrate",
            "model.toml",
            "--text",
            "text.txt",
            "--tokens",
            "64",
            "--window",
            "16",
            "-o",
            "out.trace",
        ],
        "out.trace",
    ),
    subcommand("verify --source", &["verify", "BASE", "--source", "HF"]),
];

/// Subcommands for bundles that do not execute their code.
pub(crate) const READING: [Subcommand; 6] = [
    subcommand("inspect", &["inspect", "IN"]),
    subcommand("inspect --json", &["inspect", "IN", "--json"]),
    subcommand("explain", &["explain", "IN"]),
    subcommand("explain --layer", &["explain", "IN", "--layer", "0", "--expert", "1", "--json"]),
    subcommand("run info", &["run", "IN", "info"]),
    subcommand("simulate", &["simulate", "IN", "--prompt", "32", "--decode", "2"]),
];

/// Subcommands for bundles that execute their code.
pub(crate) const EXECUTING: [Subcommand; 6] = [
    subcommand("verify", &["verify", "IN"]),
    subcommand("generate", &["run", "IN", "generate", "--ids", "1,2,3", "-n", "4"]),
    subcommand("generate from text", &["run", "IN", "generate", "--prompt", "The borrow checker", "-n", "4"]),
    making(
        "logits",
        &["run", "IN", "logits", "--ids", "1,2,3", "--out", "out.safetensors"],
        "out.safetensors",
    ),
    subcommand("eval", &["eval", "IN", "--text", "text.txt", "--window", "16", "--windows", "2"]),
    subcommand("steps", &["steps", "IN", "--repeat", "1"]),
];

impl Subcommand {
    /// A random subcommand of a list.
    pub(crate) fn draw(rng: &mut Rng, of: &[&'static [Subcommand]]) -> &'static Subcommand {
        let all: Vec<&Subcommand> = of.iter().flat_map(|list| list.iter()).collect();
        all[rng.below(all.len())]
    }

    /// Whether it needs a bundle of the undamaged checkpoint.
    pub(crate) fn takes_base(&self) -> bool {
        self.args.contains(&"BASE")
    }

    /// The arguments for a case's folders.
    pub(crate) fn arguments(&self, place: &CaseFolders, base: Option<PathBuf>) -> Vec<OsString> {
        let word = |word: &&str| match *word {
            "HF" | "IN" => place.subject.clone().into_os_string(),
            "BASE" => base.clone().unwrap_or_default().into_os_string(),
            other => other.into(),
        };
        self.args.iter().map(word).collect()
    }
}
