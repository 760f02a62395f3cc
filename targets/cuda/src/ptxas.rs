//! NVIDIA's assembler, where somebody has installed it: asked whether it takes what a bundle holds.

use moec_family::error::{Error, Result};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// Where it is looked for besides the cache folder.
const VARIABLE: &str = "MOEC_PTXAS";

/// The assembler: what `MOEC_PTXAS` names, or what `cargo xtask cuda` has installed below `cache`.
pub(crate) fn find(cache: &Path) -> Option<PathBuf> {
    let given = std::env::var_os(VARIABLE).filter(|v| !v.is_empty()).map(PathBuf::from);
    given.or_else(|| Some(cache.join("cuda/ptxas"))).filter(|path| path.is_file())
}

/// Has it assemble a file for a generation, and keeps nothing.
///
/// # Errors
/// What it says of the file; that it does not start.
pub(crate) fn check(ptxas: &Path, generation: &str, file: &Path) -> Result<()> {
    let mut assemble = Command::new(ptxas);
    assemble.arg(format!("-arch={generation}")).args(["-o", "/dev/null"]).arg(file).stdin(Stdio::null());
    let done = assemble.output().map_err(|e| {
        Error::environment(format!("`{}` does not start", ptxas.display()))
            .because(e)
            .hint(format!("correct `{VARIABLE}`, or install it anew with `cargo xtask cuda`"))
    })?;
    if done.status.success() {
        return Ok(());
    }
    let said = String::from_utf8_lossy(&done.stderr);
    let first = said.lines().find(|l| !l.trim().is_empty()).unwrap_or("it says nothing").to_owned();
    Err(Error::input(format!("`{}` is not taken by NVIDIA's assembler", file.display()))
        .because(first)
        .hint("build the bundle again; if that does not help, this is a bug of moec"))
}
