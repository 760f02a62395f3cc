//! `cargo xtask gguf`: what writes the GGUF files of tests.
//!
//! The `gguf` package is llama.cpp's own, and Python. It goes into a virtual environment in moec's cache folder. moec itself
//! reads GGUF without it.

use crate::apt;
use crate::shell::{self, Failed, cache_dir, output, program, stage};
use std::fs;
use std::path::Path;

/// What is installed, at which versions.
const PACKAGES: [&str; 3] = ["gguf==0.19.0", "safetensors==0.8.0", "numpy"];
/// Succeeds where all of it is there, and says which version.
const CHECK: &str = "import gguf, numpy, safetensors, importlib.metadata as m; print(m.version('gguf'))";
/// Succeeds in a Python that has virtual environments.
const FITS: &str = "import ensurepip, sys; assert sys.version_info >= (3, 10)";

/// Installs it, and imports it.
pub(crate) fn run() -> Result<(), Failed> {
    let venv = cache_dir()?.join("gguf");
    if check(&venv).is_none() {
        install(&venv).inspect_err(|_| {
            // Half of it would be taken for all.
            let _ = fs::remove_dir_all(&venv);
        })?;
    }
    let version = check(&venv).ok_or_else(|| {
        Failed::new("the gguf package is installed and cannot be used")
            .hint(format!("it lies in `{}`; remove that folder to install it anew", venv.display()))
    })?;
    stage("Installed", &format!("gguf {version} in {}", venv.display()));
    Ok(())
}

fn check(venv: &Path) -> Option<String> {
    output(program(venv.join("bin/python")).args(["-c", CHECK]))
}

fn install(venv: &Path) -> Result<(), Failed> {
    let names = ["python3", "/usr/bin/python3", "python3.13", "python3.12", "python3.11"];
    let python = names.into_iter().find(|name| output(program(name).args(["-c", FITS])).is_some());
    let python = python.ok_or_else(|| {
        Failed::new("no Python of 3.10 or later with virtual environments")
            .hint(apt::as_root(&["python3-venv"]))
    })?;
    stage("Installing", &format!("{} in {}", PACKAGES.join(", "), venv.display()));
    shell::run(program(python).args(["-m", "venv", "--clear"]).arg(venv))?;
    let mut pip = program(venv.join("bin/python"));
    pip.args(["-m", "pip", "install", "--quiet", "--disable-pip-version-check"]).args(PACKAGES);
    shell::run(&mut pip)
        .map_err(|e| e.hint("pip says above why; it asks pypi.org, or what its own settings name"))
}
