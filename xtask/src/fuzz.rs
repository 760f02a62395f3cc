//! `cargo xtask fuzz`: the targets of `fuzz/`, with the compiler that builds everything else. Coverage is
//! LLVM's own pass, which a stable rustc accepts; the sanitizers, which it does not, would find wrong uses of
//! memory alone.

use crate::shell::{self, Failed, root, stage, target_dir};
use crate::{llvm::Llvm, setup};
use std::fs;
use std::path::Path;
use std::process::Command;

/// Options, and what they do.
const OPTIONS: [(&str, &str); 3] = [
    ("NAME…", "targets [default: all that need no LLVM; `profile` does]"),
    ("--seconds", "N: how long each of them runs [default: 60]"),
    ("--jobs", "N: how many run side by side [default: 1]"),
];

/// The target that needs LLVM, and the feature that it has.
const PROFILE: &str = "profile";

/// Flags that cargo-fuzz passes without a sanitizer.
const FLAGS: &str = "-Cpasses=sancov-module -Cllvm-args=-sanitizer-coverage-level=4 \
     -Cllvm-args=-sanitizer-coverage-inline-8bit-counters -Cllvm-args=-sanitizer-coverage-pc-table \
     -Cllvm-args=-sanitizer-coverage-trace-compares -Cllvm-args=-simplifycfg-branch-fold-threshold=0 \
     -Ccodegen-units=1 -Cdebug-assertions --cfg fuzzing";

/// Longest input, in bytes; longest time of one, in seconds; most memory, in MiB.
const LIMITS: [&str; 3] = ["-max_len=65536", "-timeout=60", "-rss_limit_mb=4096"];

/// Targets to run.
#[derive(Debug, PartialEq, Eq)]
struct Selection {
    names: Vec<String>,
    seconds: u64,
    jobs: usize,
}

impl Selection {
    fn read(words: &[String]) -> Result<Self, Failed> {
        let mut selection = Self { names: Vec::new(), seconds: 60, jobs: 1 };
        let mut words = words.iter();
        while let Some(word) = words.next() {
            let mut number = || {
                let n = words.next().and_then(|n| n.parse::<u64>().ok()).filter(|n| *n > 0);
                n.ok_or_else(|| Failed::new(format!("`{word}` needs a number")))
            };
            match word.as_str() {
                "--seconds" => selection.seconds = number()?,
                "--jobs" => selection.jobs = number()? as usize,
                option if option.starts_with('-') => {
                    return Err(Failed::new(format!("there is no option `{option}`"))
                        .hint("`cargo xtask fuzz --help` lists them"));
                }
                name => selection.names.push(name.to_owned()),
            }
        }
        let known = targets()?;
        if let Some(unknown) = selection.names.iter().find(|n| !known.contains(*n)) {
            return Err(Failed::new(format!("there is no target `{unknown}`"))
                .hint(format!("the targets are {}", known.join(", "))));
        }
        if selection.names.is_empty() {
            selection.names = known.into_iter().filter(|n| n != PROFILE).collect();
        }
        Ok(selection)
    }
}

/// Names of the targets.
fn targets() -> Result<Vec<String>, Failed> {
    let folder = root().join("fuzz/fuzz_targets");
    let failed = |e: std::io::Error| Failed::new(format!("`{}` cannot be read: {e}", folder.display()));
    let mut names = Vec::new();
    for entry in fs::read_dir(&folder).map_err(failed)? {
        let path = entry.map_err(failed)?.path();
        names.extend(path.file_stem().map(|name| name.to_string_lossy().into_owned()));
    }
    names.sort();
    Ok(names)
}

/// Builds the targets that the arguments name, and runs each from its seeds and what earlier runs found.
pub(crate) fn run(args: &[String]) -> Result<(), Failed> {
    if args.iter().any(|a| a == "--help" || a == "-h") {
        stage("Usage", "cargo xtask fuzz [OPTIONS] [NAME…]");
        for (name, what) in OPTIONS {
            stage(name, what);
        }
        return Ok(());
    }
    let selection = Selection::read(args)?;
    let profile = selection.names.iter().any(|n| n == PROFILE);
    let llvm = if profile { Some(setup::run()?) } else { None };
    let programs = target_dir().join("fuzz");
    let triple = host()?;
    build(&selection.names, llvm.as_ref(), &programs, &triple)?;
    let programs = programs.join(&triple).join("release");
    let mut failed = Vec::new();
    for names in selection.names.chunks(selection.jobs) {
        stage("Fuzzing", &format!("{}, for {} s", names.join(", "), selection.seconds));
        let mut running = Vec::new();
        for name in names {
            let log = programs.join(format!("{name}.log"));
            let mut command = target(name, &programs, &log, selection.seconds)?;
            let child = command.spawn();
            running.push((
                name,
                log,
                child.map_err(|e| {
                    Failed::new(format!("`{}` cannot be started: {e}", shell::shown(&command)))
                })?,
            ));
        }
        for (name, log, mut child) in running {
            let status = child.wait().map_err(|e| Failed::new(format!("`{name}` was lost: {e}")))?;
            let bytes = fs::read(&log).unwrap_or_default();
            let text = String::from_utf8_lossy(&bytes);
            let last =
                text.lines().rev().find(|l| l.starts_with("Done ")).unwrap_or("it did not end by itself");
            stage(name, last);
            if !status.success() {
                let tail: Vec<&str> = text.lines().rev().take(30).collect();
                tail.iter().rev().for_each(|line| eprintln!("    {line}"));
                failed.push(name.as_str());
            }
        }
    }
    if failed.is_empty() {
        return Ok(());
    }
    Err(Failed::new(format!("inputs were found that break {}", failed.join(", "))).hint(
        "they are under fuzz/artifacts; fix the cause, and keep the input as a test of the faulty code",
    ))
}

/// The triple of this host: with one, build scripts and macros are compiled without the flags.
fn host() -> Result<String, Failed> {
    let text = shell::output(Command::new("rustc").arg("-vV")).unwrap_or_default();
    let triple = text.lines().find_map(|l| l.strip_prefix("host: "));
    triple.map(str::to_owned).ok_or_else(|| Failed::new("`rustc -vV` names no host"))
}

fn build(names: &[String], llvm: Option<&Llvm>, folder: &Path, triple: &str) -> Result<(), Failed> {
    let mut command = shell::cargo("build", llvm);
    command.args(["--locked", "--release", "--manifest-path", "fuzz/Cargo.toml", "--target", triple]);
    command.arg("--target-dir").arg(folder);
    if llvm.is_some() {
        command.args(["--features", PROFILE]);
    }
    for name in names {
        command.args(["--bin", name]);
    }
    command.env("RUSTFLAGS", FLAGS).env("CARGO_INCREMENTAL", "0");
    stage("Building", &format!("{} with coverage", names.join(", ")));
    shell::run(&mut command)
}

/// A target with its corpus; its output goes to a file.
fn target(name: &str, programs: &Path, log: &Path, seconds: u64) -> Result<Command, Failed> {
    let fuzz = root().join("fuzz");
    let (corpus, artifacts) = (fuzz.join("corpus").join(name), fuzz.join("artifacts").join(name));
    let failed = |e: std::io::Error| Failed::new(format!("`{}` cannot be written: {e}", fuzz.display()));
    fs::create_dir_all(&corpus).map_err(failed)?;
    fs::create_dir_all(&artifacts).map_err(failed)?;
    let file = fs::File::create(log).map_err(failed)?;
    let mut command = shell::program(programs.join(name));
    command.args([&corpus, &fuzz.join("seeds").join(name)]);
    command
        .arg(format!("-max_total_time={seconds}"))
        .arg(format!("-artifact_prefix={}/", artifacts.display()));
    command.args(LIMITS);
    command.stdout(file.try_clone().map_err(failed)?).stderr(file);
    Ok(command)
}

#[cfg(test)]
mod tests {
    use super::Selection;

    #[test]
    fn targets_and_limits_are_read() {
        let of = |words: &[&str]| Selection::read(&words.iter().map(|w| (*w).to_owned()).collect::<Vec<_>>());
        let some = of(&["schema", "--seconds", "9", "--jobs", "2"]).ok();
        assert_eq!(some, Some(Selection { names: vec!["schema".into()], seconds: 9, jobs: 2 }));
        let all = of(&[]).map(|s| s.names).unwrap_or_default();
        assert!(all.contains(&"tokenizer".into()) && !all.contains(&"profile".into()), "{all:?}");
        for wrong in [&["--second", "7"][..], &["--seconds"], &["--jobs", "0"], &["nothing"]] {
            assert!(of(wrong).is_err(), "{wrong:?}");
        }
    }
}
