//! `cargo xtask cuda`: NVIDIA's assembler of PTX. It writes machine code next to the PTX of bundles, and
//! tests check with it that moec's kernels assemble.
//!
//! It is a package of PyPI that may not be redistributed, so it is installed into the cache folder of the
//! user who runs this. Bundles are complete without it: drivers assemble PTX themselves.

use crate::shell::{self, Failed, cache_dir, output, program, stage};
use std::fs;
use std::path::{Path, PathBuf};

/// The package, its version, and its file for Linux on x86-64, as PyPI has it.
const PACKAGE: &str = "nvidia-cuda-nvcc-cu12==12.9.86";
const HASH: &str = "5d6a0d32fdc7ea39917c20065614ae93add6f577d840233237ff08e9a38f58f0";
/// Path of the assembler in the package.
const PTXAS: &str = "nvidia/cuda_nvcc/bin/ptxas";

/// Installs it, and prints its version.
pub(crate) fn run() -> Result<(), Failed> {
    if !cfg!(all(target_os = "linux", target_arch = "x86_64")) {
        return Err(Failed::new("this package of NVIDIA's assembler is for Linux on x86-64")
            .hint("where a CUDA toolkit is installed, name its ptxas in `MOEC_PTXAS`"));
    }
    let home = cache_dir()?.join("cuda");
    let ptxas = home.join("ptxas");
    if version(&ptxas).is_none() {
        install(&home, &ptxas)?;
    }
    let release = version(&ptxas).ok_or_else(|| {
        Failed::new(format!("`{}` cannot be started", ptxas.display()))
            .hint(format!("remove `{}` to install it anew", home.display()))
    })?;
    stage("Installed", &format!("ptxas {release}, {}", ptxas.display()));
    Ok(())
}

/// Its version, if it starts.
fn version(ptxas: &Path) -> Option<String> {
    let text = output(program(ptxas).arg("--version"))?;
    let release = text.lines().find_map(|line| line.split_once("release "))?.1;
    Some(release.split(',').next()?.to_owned())
}

fn install(home: &Path, ptxas: &Path) -> Result<(), Failed> {
    let venv = home.join("venv");
    stage("Creating", &venv.display().to_string());
    shell::run(program("python3").args(["-m", "venv", "--clear"]).arg(&venv))
        .map_err(|e| e.hint("on Debian and Ubuntu, as root: apt-get install python3-venv"))?;
    let failed = |path: &Path, e: std::io::Error| Failed::new(format!("`{}`: {e}", path.display()));
    let list = venv.join("requirements.txt");
    fs::write(&list, format!("{PACKAGE} --hash=sha256:{HASH}\n")).map_err(|e| failed(&list, e))?;
    stage("Installing", &format!("{PACKAGE}, some 40 MB"));
    let mut pip = program(venv.join("bin/python"));
    pip.args(["-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]);
    pip.args(["--require-hashes", "--only-binary=:all:", "-r"]).arg(&list);
    shell::run(&mut pip).map_err(|e| e.hint("pip says above why; it queries pypi.org"))?;
    let from = find(&venv).ok_or_else(|| Failed::new(format!("{PACKAGE} has no {PTXAS}")))?;
    fs::copy(&from, ptxas).map_err(|e| failed(&from, e))?;
    executable(ptxas).map_err(|e| failed(ptxas, e))?;
    // The rest of the package is a compiler that is not needed.
    fs::remove_dir_all(&venv).map_err(|e| failed(&venv, e))
}

/// The assembler in the packages of an environment.
fn find(venv: &Path) -> Option<PathBuf> {
    let versions = fs::read_dir(venv.join("lib")).ok()?;
    versions.flatten().map(|v| v.path().join("site-packages").join(PTXAS)).find(|p| p.is_file())
}

#[cfg(unix)]
fn executable(path: &Path) -> std::io::Result<()> {
    use std::os::unix::fs::PermissionsExt as _;
    fs::set_permissions(path, fs::Permissions::from_mode(0o755))
}

#[cfg(not(unix))]
fn executable(_: &Path) -> std::io::Result<()> {
    Ok(())
}
