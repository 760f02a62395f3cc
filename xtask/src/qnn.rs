//! `cargo xtask qnn`: QNN, Qualcomm's library for the Hexagon tensor processor, with its emulator.
//!
//! It comes in a package of PyPI and may not be given on, so that it goes into a virtual environment in moec's cache folder,
//! for whoever runs this. Beside it goes onnxruntime, which executes what is written as ONNX. moec links neither.

use crate::shell::{self, Failed, cache_dir, output, program, shown, stage};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// The package, its version, and its files for Python 3.11 to 3.14 on x86-64, as PyPI has them. The library in them is the same.
const PACKAGE: &str = "onnxruntime-qnn==2.7.0";
const HASHES: [&str; 4] = [
    "c56c01562b8534fe8980cfea4601408d950c065f8251fb862ce82101c52c9849",
    "6feb735e2910127febd9c24c1be0f541bcaf688a90028b7efe55d12aca214c13",
    "1cdbc216f3cd9c24036ab376aef5367bafc88c041305c661967ccc9a96f7400e",
    "bed42d6af493d371b866b2478dc6f8fa7d2f5c9b5cef4aa1752ec1943afd01e2",
];
/// What executes ONNX.
const ONNXRUNTIME: &str = "onnxruntime==1.32.0";

/// Succeeds in a Python that the package has a file for, and gives its version.
const FITS: &str = "
import ensurepip, platform, sys
assert (3, 11) <= sys.version_info[:2] <= (3, 14)
print('%d.%d' % sys.version_info[:2])
";

/// Succeeds where everything is there and can be loaded, and says what.
const CHECK: &str = "
import ctypes, importlib.metadata, importlib.util, os
folder = os.path.dirname(importlib.util.find_spec('onnxruntime_qnn').origin)
for name in ('Htp', 'Ir', 'System'):
    ctypes.CDLL(os.path.join(folder, 'libQnn%s.so' % name))
import onnxruntime
print(importlib.metadata.version('onnxruntime-qnn'), onnxruntime.__version__, folder)
";

/// Installs both, and loads them.
pub(crate) fn run() -> Result<(), Failed> {
    if !cfg!(all(target_os = "linux", target_arch = "x86_64")) {
        return Err(Failed::new("QNN's emulator is for Linux on x86-64")
            .hint("networks are written as ONNX without it; build what is for a phone on such a machine"));
    }
    let venv = cache_dir()?.join("qnn");
    if check(&venv).is_none() {
        install(&venv)?;
    }
    if check(&venv).is_none() {
        atomic()?;
    }
    let said = check(&venv).ok_or_else(|| {
        Failed::new("QNN is there and cannot be loaded")
            .hint(format!("see what it says: {}", shown(&checking(&venv))))
    })?;
    // The library says something of its own, too.
    stage("Installed", said.lines().last().unwrap_or_default());
    Ok(())
}

fn python(venv: &Path) -> PathBuf {
    venv.join("bin/python")
}

fn checking(venv: &Path) -> Command {
    let mut command = program(python(venv));
    command.args(["-c", CHECK]);
    command
}

fn check(venv: &Path) -> Option<String> {
    output(&mut checking(venv))
}

fn install(venv: &Path) -> Result<(), Failed> {
    let names = ["python3", "/usr/bin/python3", "python3.14", "python3.13", "python3.12", "python3.11"];
    let found = names.into_iter().find_map(|name| Some((name, output(program(name).args(["-c", FITS]))?)));
    let Some((name, version)) = found else {
        return Err(Failed::new("no Python of 3.11 to 3.14 with virtual environments")
            .hint("on Debian and Ubuntu, as root: apt-get install python3-venv"));
    };
    stage("Found", &format!("Python {} ({name})", version.trim()));
    stage("Creating", &venv.display().to_string());
    shell::run(program(name).args(["-m", "venv", "--clear"]).arg(venv))?;
    let list = venv.join("requirements.txt");
    let failed = |e: std::io::Error| Failed::new(format!("`{}` cannot be written: {e}", list.display()));
    fs::write(&list, requirements()).map_err(failed)?;
    let pip = || {
        let mut pip = program(python(venv));
        pip.args(["-m", "pip", "install", "--quiet", "--disable-pip-version-check"]);
        pip
    };
    stage("Installing", ONNXRUNTIME);
    shell::run(pip().arg(ONNXRUNTIME))?;
    stage("Installing", &format!("{PACKAGE}, some 100 MB"));
    // Its own dependencies are for Python; the library has none of them.
    let mut library = pip();
    library.args(["--no-deps", "--require-hashes", "--only-binary=:all:", "-r"]).arg(&list);
    shell::run(&mut library)
}

/// What pip is to install, and nothing else.
fn requirements() -> String {
    let hashes: Vec<String> = HASHES.iter().map(|hash| format!(" --hash=sha256:{hash}")).collect();
    format!("{PACKAGE}{}\n", hashes.concat())
}

/// The one library of the system's that is not on every machine.
fn atomic() -> Result<(), Failed> {
    let mut command = program("apt-get");
    command.env("DEBIAN_FRONTEND", "noninteractive");
    command.args(["install", "-y", "--no-install-recommends", "libatomic1"]);
    let root = output(program("id").arg("-u")).is_some_and(|id| id == "0");
    if !root || output(program("apt-get").arg("--version")).is_none() {
        return Err(Failed::new("QNN's library cannot be loaded")
            .hint(format!("it wants libatomic; on Debian and Ubuntu, as root: {}", shown(&command))));
    }
    stage("Installing", "libatomic1");
    shell::run(&mut command)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pip_is_told_every_hash() {
        let text = requirements();
        assert!(text.starts_with(PACKAGE) && text.matches(" --hash=sha256:").count() == HASHES.len());
        let hash = |h: &str| h.len() == 64 && h.bytes().all(|b| b.is_ascii_hexdigit());
        assert!(HASHES.iter().all(|h| hash(h)), "hashes are SHA-256");
    }
}
