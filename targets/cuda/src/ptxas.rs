//! NVIDIA's assembler, where it is installed: machine code of kernels, beside their text.

use moec_backend::Assembled;
use moec_backend::error::{Error, Result};
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

/// Variable with the assembler's path, besides the cache folder.
const VARIABLE: &str = "MOEC_PTXAS";

/// The command that installs the assembler.
pub(crate) const INSTALL: &str = "cargo xtask cuda";

/// The assembler: what `MOEC_PTXAS` names, or what [`INSTALL`] has installed below `cache`.
pub(crate) fn find(cache: &Path) -> Option<PathBuf> {
    let given = std::env::var_os(VARIABLE).filter(|v| !v.is_empty()).map(PathBuf::from);
    given.or_else(|| Some(cache.join("cuda/ptxas"))).filter(|path| path.is_file())
}

fn output(ptxas: &Path, command: &mut Command) -> Result<Output> {
    command.stdin(Stdio::null()).output().map_err(|e| {
        Error::environment(format!("`{}` cannot be started", ptxas.display()))
            .because(e)
            .hint(format!("correct `{VARIABLE}`, or install it anew with `{INSTALL}`"))
    })
}

/// Its name and release: `ptxas 12.9.86`.
fn release(ptxas: &Path) -> Result<String> {
    let run_output = output(ptxas, Command::new(ptxas).arg("--version"))?;
    let stdout = String::from_utf8_lossy(&run_output.stdout);
    // `Cuda compilation tools, release 12.9, V12.9.86`
    let found = stdout.lines().find_map(|line| line.split_once("release ")?.1.split_once(", V"));
    let release = found.map_or("of an unknown release", |(_, full)| full.trim());
    Ok(format!("ptxas {release}"))
}

/// Assembles a text for a generation. The same release gives the same bytes for the same text, wherever the
/// file is.
///
/// # Errors
/// Fails if the assembler does not start, or refuses the text.
pub(crate) fn assemble(ptxas: &Path, generation: &str, text: &Path) -> Result<Assembled> {
    let folder = tempfile::tempdir()
        .map_err(|e| Error::environment("there is no folder for the assembled code").because(e))?;
    let to = folder.path().join("code");
    let mut assemble = Command::new(ptxas);
    assemble.arg(format!("-arch={generation}")).arg("-o").arg(&to).arg(text);
    let done = output(ptxas, &mut assemble)?;
    if !done.status.success() {
        let stderr = String::from_utf8_lossy(&done.stderr);
        let first = stderr.lines().find(|l| !l.trim().is_empty()).unwrap_or("it printed nothing").to_owned();
        return Err(Error::input(format!("NVIDIA's assembler does not accept `{}`", text.display()))
            .because(first)
            .hint("build the bundle again; if that does not help, this is a bug of moec"));
    }
    let code = std::fs::read(&to)
        .map_err(|e| Error::environment(format!("`{}` wrote nothing", ptxas.display())).because(e))?;
    Ok(Assembled { code, by: release(ptxas)? })
}
