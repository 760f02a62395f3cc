//! Running other programs, and saying so.

use crate::llvm::Llvm;
use crate::prebuilt;
use std::ffi::OsStr;
use std::fmt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Instant;

/// Failure of a command, with the remedy if known.
#[derive(Debug)]
pub(crate) struct Failed {
    message: String,
    hint: Option<String>,
}

impl Failed {
    pub(crate) fn new(message: impl Into<String>) -> Self {
        Self { message: message.into(), hint: None }
    }

    pub(crate) fn hint(mut self, hint: impl Into<String>) -> Self {
        self.hint = Some(hint.into());
        self
    }
}

impl fmt::Display for Failed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)?;
        self.hint.iter().try_for_each(|h| write!(f, "\n\nhint: {h}"))
    }
}

/// The root of the tree.
pub(crate) fn root() -> PathBuf {
    // `cargo run` gives the present folder of the package; the program may have been built elsewhere.
    let package = std::env::var_os("CARGO_MANIFEST_DIR").unwrap_or(env!("CARGO_MANIFEST_DIR").into());
    Path::new(&package).parent().unwrap_or(Path::new(".")).to_owned()
}

/// The folder where moec keeps what later builds can use.
pub(crate) fn cache_dir() -> Result<PathBuf, Failed> {
    let from = |var: &str| std::env::var_os(var).filter(|v| !v.is_empty()).map(PathBuf::from);
    from("MOEC_CACHE")
        .or_else(|| from("XDG_CACHE_HOME").map(|p| p.join("moec")))
        .or_else(|| from("HOME").map(|p| p.join(".cache/moec")))
        .ok_or_else(|| {
            Failed::new("there is no cache folder").hint("set `MOEC_CACHE` to a folder that you can write")
        })
}

/// Folder that cargo builds in.
pub(crate) fn target_dir() -> PathBuf {
    std::env::var_os("CARGO_TARGET_DIR").map_or_else(|| root().join("target"), PathBuf::from)
}

/// A line `    Building moec`.
pub(crate) fn stage(verb: &str, what: &str) {
    eprintln!("{verb:>12} {what}");
}

/// A cargo command in the root, for the LLVM that was found.
pub(crate) fn cargo(subcommand: &str, llvm: Option<&Llvm>) -> Command {
    let mut command = program(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    command.arg(subcommand);
    if let Some(llvm) = llvm {
        command.args(llvm.flags());
        command.envs(llvm.environment());
    }
    command.envs(prebuilt::environment());
    command
}

/// A program in the root.
pub(crate) fn program(name: impl AsRef<OsStr>) -> Command {
    let mut command = Command::new(name);
    command.current_dir(root());
    command
}

/// Command line of a command, as one would type it.
pub(crate) fn shown(command: &Command) -> String {
    let words = std::iter::once(command.get_program()).chain(command.get_args());
    let words: Vec<_> = words
        .map(|w| {
            let w = w.to_string_lossy();
            let w = w.strip_prefix(&*format!("{}/", root().display())).unwrap_or(&w);
            // Cargo is called by its whole path.
            let w = if w.ends_with("/bin/cargo") { "cargo" } else { w };
            if w.contains(' ') { format!("'{w}'") } else { w.to_owned() }
        })
        .collect();
    words.join(" ")
}

/// Runs a command; it must succeed. Says how long it took.
pub(crate) fn run(command: &mut Command) -> Result<(), Failed> {
    let start = Instant::now();
    let status =
        command.status().map_err(|e| Failed::new(format!("`{}` cannot be started: {e}", shown(command))))?;
    if !status.success() {
        return Err(Failed::new(format!("`{}` failed ({status})", shown(command))));
    }
    stage("Finished", &format!("in {:.1}s", start.elapsed().as_secs_f64()));
    Ok(())
}

/// Standard output of a command, if it can be run and succeeds.
pub(crate) fn output(command: &mut Command) -> Option<String> {
    let out = command.stderr(Stdio::null()).stdin(Stdio::null()).output().ok()?;
    out.status.success().then(|| String::from_utf8_lossy(&out.stdout).trim_end().to_owned())
}
