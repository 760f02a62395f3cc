//! Builds `run` by cargo from the generated crate, for other kinds of machines or on request.
//!
//! The crate is built in the cache folder, where everything but the generated part stays compiled between
//! bundles. Paths are remapped, so the binary does not depend on where it was built.

use super::runner::{lock_of, remove_others, write, write_sources};
use super::toolchain::{CrossTarget, Toolchain, cargo};
use moec_backend::Runner;
use moec_base::cache_dir;
use moec_base::error::{Error, Result, io_error};
use moec_base::hashing::{hex, sha256};
use moec_base::interrupt;
use moec_base::paths::{KERNELS, PLAN};
use moec_base::progress::Progress;
use moec_cpu::SourceFile;
use std::collections::VecDeque;
use std::ffi::OsString;
use std::fs::{self, File};
use std::io::{self, BufReader, Read};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// Number of the last lines of cargo's output that an error shows.
const MAX_LAST_LINES: usize = 20;

/// The cache folder, which must be writable where cargo builds. Requested before a model is compiled in vain.
///
/// # Errors
/// The folder cannot be used.
pub fn cache_folder() -> Result<PathBuf> {
    cache_dir::writable_for(
        "building `run` with cargo",
        Some("build without `run` (`--no-run`) and use `moec run`"),
    )
}

/// Builds `run` for a bundle whose plan and kernels are in `bundle`, and puts it there: generated sources,
/// and what it has besides the runtime.
///
/// # Errors
/// A build that fails, with the end of cargo's output.
pub fn build(
    bundle: &Path,
    (generated, more): (&[SourceFile], Option<&'static Runner>),
    tools: &Toolchain,
    progress: &Progress,
) -> Result<()> {
    // One folder per compiler and set of dependencies. Only the generated crate and moec's own two differ
    // from build to build; cargo compiles them again if they were rewritten. The lock permits one build at a
    // time.
    let mut key = tools.version.clone().into_bytes();
    key.extend(lock_of(more).bytes());
    if let Some(cross) = tools.cross {
        key.extend(cross.triple.bytes());
    }
    let build_folder = cache_folder()?.join(format!("runner-{}", &hex(&sha256(&key))[..16]));
    fs::create_dir_all(&build_folder).map_err(|e| io_error("create", &build_folder, &e))?;
    let build_folder = fs::canonicalize(&build_folder).map_err(|e| io_error("find", &build_folder, &e))?;
    let lock_path = build_folder.join("lock");
    let lock = File::create(&lock_path).map_err(|e| io_error("create", &lock_path, &e))?;
    lock.lock().map_err(|e| io_error("lock", &lock_path, &e))?;

    let runner = build_folder.join("runner");
    write_sources(&runner, generated, more, true)?;
    remove_others(&runner, generated, more)?;
    for name in [PLAN, KERNELS] {
        let path = bundle.join(name);
        let bytes = fs::read(&path).map_err(|e| io_error("read", &path, &e))?;
        write(&build_folder.join(name), &bytes)?;
    }
    let mut command = Command::new(cargo());
    command
        .current_dir(&runner)
        .args(["build", "--release", "--locked", "--target-dir"])
        .arg(build_folder.join("target"))
        .env("CARGO_ENCODED_RUSTFLAGS", rustflags(&build_folder, tools.cross, more.is_none()))
        .env("CARGO_TERM_COLOR", "never")
        .env("CARGO_TERM_QUIET", "false")
        .env("CARGO_TERM_PROGRESS_WHEN", if progress.draws() { "always" } else { "never" })
        .env("CARGO_TERM_PROGRESS_WIDTH", "80")
        .env_remove("RUSTFLAGS")
        .env_remove("CARGO_BUILD_TARGET")
        .env_remove("RUSTC_WRAPPER");
    if let Some(more) = more {
        command.args(["--features", more.feature]);
    }
    let mut built = build_folder.join("target");
    if let Some(cross) = tools.cross {
        // With `--target`, flags and linker are the target's alone; build scripts and macros stay the host's.
        command.args(["--target", cross.triple]).env("RUSTC", &tools.rustc);
        built.push(cross.triple);
    }
    built.push("release/moec-runner");
    if !built.exists() {
        let target = tools.cross.map_or("this machine's own kind", |c| c.triple);
        progress.stage(
            "Once",
            &format!(
                "the runtime is compiled for {target}, which takes one to six minutes; later bundles take seconds \
                 (`--no-run` skips it)"
            ),
        );
    }
    watch(&mut command, progress)?;
    let to = bundle.join("run");
    fs::copy(&built, &to).map_err(|e| io_error("write", &to, &e))?;
    Ok(())
}

/// Runs cargo, and reports its progress.
fn watch(cargo: &mut Command, progress: &Progress) -> Result<()> {
    let failed = |e: io::Error| Error::environment("cannot start cargo").because(e);
    let mut child =
        cargo.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped()).spawn().map_err(failed)?;
    let _passing = interrupt::pass_to(&child);
    let bar = progress.draws().then(|| progress.items("Linking", 0, "crates"));
    let mut last: VecDeque<String> = VecDeque::new();
    let mut on_line = |line: &str| match (&bar, parse_progress(line), line.trim_start().split_once(' ')) {
        (Some(bar), Some((done, of, what)), _) => {
            bar.place(done, of);
            bar.label(what);
        }
        (_, Some(_), _) => {}
        // The generated crate and moec's own two are not reported.
        (_, None, Some((verb @ ("Compiling" | "Downloading" | "Downloaded"), what))) => {
            if bar.is_none() && !what.starts_with("moec-") {
                progress.stage(verb, what.split(" (").next().unwrap_or(what));
            }
        }
        _ => {
            last.push_back(line.to_owned());
            if last.len() > MAX_LAST_LINES {
                last.pop_front();
            }
        }
    };
    if let Some(stderr) = child.stderr.take() {
        let mut line = Vec::new();
        // Its own bar is drawn again after a carriage return.
        for byte in BufReader::new(stderr).bytes().map_while(io::Result::ok) {
            if byte != b'\n' && byte != b'\r' {
                line.push(byte);
                continue;
            }
            let text = String::from_utf8_lossy(&line);
            if !text.trim().is_empty() {
                on_line(&text);
            }
            line.clear();
        }
    }
    let status = child.wait().map_err(failed)?;
    if status.success() {
        return Ok(());
    }
    let end = last.into_iter().collect::<Vec<_>>().join("\n");
    Err(Error::environment("cargo could not build the runner").because(end).hint(
        "the first build downloads the runtime's dependencies: check the network, \
         or build with `--no-run` and use `moec run`",
    ))
}

/// Progress in cargo's bar: `    Building [=====>      ] 12/80: tokenizers, clap`.
fn parse_progress(line: &str) -> Option<(u64, u64, &str)> {
    let (_, rest) = line.split_once("Building [")?.1.split_once("] ")?;
    let (figures, what) = rest.split_once(':')?;
    let (done, of) = figures.trim().split_once('/')?;
    Some((done.parse().ok()?, of.parse().ok()?, what.trim()))
}

/// Flags that keep the binary independent of this machine's folders, and those of another target. What loads
/// libraries while it runs is not `alone`: it is linked with the operating system's.
fn rustflags(build_folder: &Path, cross: Option<&CrossTarget>, alone: bool) -> OsString {
    let cargo_home = std::env::var_os("CARGO_HOME")
        .map(PathBuf::from)
        .or_else(|| std::env::var_os("HOME").map(|h| PathBuf::from(h).join(".cargo")));
    let mut flags = OsString::new();
    for (from, to) in [(Some(build_folder.to_owned()), "/moec"), (cargo_home, "/cargo")] {
        if let Some(from) = from {
            if !flags.is_empty() {
                flags.push("\u{1f}");
            }
            flags.push("--remap-path-prefix=");
            flags.push(from);
            flags.push(format!("={to}"));
        }
    }
    if let Some(cross) = cross {
        flags.push(format!("\u{1f}-Clinker={}", cross.linker));
        cross.flags.iter().filter(|_| alone).for_each(|f| flags.push(format!("\u{1f}{f}")));
    }
    flags
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn progress_bar_of_cargo_is_parsed() {
        let line = "    Building [=======>                   ] 12/80: tokenizers, clap_builder";
        assert_eq!(parse_progress(line), Some((12, 80, "tokenizers, clap_builder")));
        for other in [
            "   Compiling tokenizers v0.22.2",
            "    Building [=> ] x/80: y",
            "    Building",
            "error: [E] 1/2: x",
        ] {
            assert_eq!(parse_progress(other), None, "{other}");
        }
    }

    #[test]
    fn cargo_failure_quotes_the_last_lines_of_its_output() {
        let mut command = Command::new("sh");
        command.args(["-c", "for i in $(seq 30); do echo \"error: $i\" >&2; done; exit 3"]);
        let error = watch(&mut command, &Progress::silent()).unwrap_err();
        let shown = error.to_string();
        assert!(shown.contains("error: 30") && shown.contains("error: 11"), "{shown}");
        assert!(!shown.contains("error: 10\n") && error.hint.is_some(), "{error:?}");
    }
}
