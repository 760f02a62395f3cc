//! `cargo xtask qnn`: QNN, Qualcomm's library for the Hexagon tensor processor, with its emulator.
//!
//! It is a package of PyPI that may not be redistributed, so it is installed into a virtual environment in
//! moec's cache folder, for the user who runs this. onnxruntime, which executes the written ONNX models, goes
//! there, too. moec links neither.

use crate::apt;
use crate::shell::{self, Failed, cache_dir, output, program, stage};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Stdio;

/// The package, its version, and its files for Python 3.11 to 3.14 on x86-64, as PyPI has them.
const PACKAGE: &str = "onnxruntime-qnn==2.7.0";
const HASHES: [&str; 4] = [
    "c56c01562b8534fe8980cfea4601408d950c065f8251fb862ce82101c52c9849",
    "6feb735e2910127febd9c24c1be0f541bcaf688a90028b7efe55d12aca214c13",
    "1cdbc216f3cd9c24036ab376aef5367bafc88c041305c661967ccc9a96f7400e",
    "bed42d6af493d371b866b2478dc6f8fa7d2f5c9b5cef4aa1752ec1943afd01e2",
];
/// Package that executes ONNX.
const ONNXRUNTIME: &str = "onnxruntime==1.32.0";

const MISSING: &str = "no Python of 3.11 to 3.14 with virtual environments";
/// Debian's package of virtual environments.
const PACKAGES: [&str; 1] = ["python3-venv"];

/// Succeeds in a Python that the package supports, and prints its version.
const FITS: &str = "
import ensurepip, platform, sys
assert (3, 11) <= sys.version_info[:2] <= (3, 14)
print('%d.%d' % sys.version_info[:2])
";

/// Succeeds where both packages of its arguments are there and can be loaded, and says where.
const CHECK: &str = "
import ctypes, importlib.metadata, importlib.util, os, sys
for name, version in (package.split('==') for package in sys.argv[1:]):
    found = importlib.metadata.version(name)
    if found != version:
        sys.exit('%s is of version %s, not %s' % (name, found, version))
folder = os.path.dirname(importlib.util.find_spec('onnxruntime_qnn').origin)
for name in ('Htp', 'Ir', 'System'):
    ctypes.CDLL(os.path.join(folder, 'libQnn%s.so' % name))
import onnxruntime
print(*sys.argv[1:], folder)
";

/// Installs both, and loads them.
pub(crate) fn run() -> Result<(), Failed> {
    if !cfg!(all(target_os = "linux", target_arch = "x86_64")) {
        return Err(Failed::new("QNN's emulator is for Linux on x86-64")
            .hint("networks are written as ONNX without it; build what is for a phone on such a machine"));
    }
    let venv = cache_dir()?.join("qnn");
    let mut found = check(&venv);
    if found.as_ref().is_err_and(|why| !why.contains(ATOMIC)) {
        install(&venv).inspect_err(|_| {
            // Half of it would be taken for all.
            let _ = fs::remove_dir_all(&venv);
        })?;
        found = check(&venv);
    }
    if found.as_ref().is_err_and(|why| why.contains(ATOMIC)) {
        atomic()?;
        found = check(&venv);
    }
    let description = found.map_err(|why| {
        Failed::new(format!("QNN is installed and cannot be used: {why}"))
            .hint(format!("it is in `{}`; remove that folder to install it again", venv.display()))
    })?;
    stage("Installed", &description);
    Ok(())
}

fn python(venv: &Path) -> PathBuf {
    venv.join("bin/python")
}

/// Paths of all parts, or the fault.
fn check(venv: &Path) -> Result<String, String> {
    let mut command = program(python(venv));
    command.args(["-c", CHECK, PACKAGE, ONNXRUNTIME]).stdin(Stdio::null());
    let out = command.output().map_err(|e| e.to_string())?;
    // The library and Python print lines, too; the relevant one is last.
    let last =
        |text: &[u8]| String::from_utf8_lossy(text).trim().lines().last().unwrap_or_default().to_owned();
    if out.status.success() { Ok(last(&out.stdout)) } else { Err(last(&out.stderr)) }
}

fn install(venv: &Path) -> Result<(), Failed> {
    let names = ["python3", "/usr/bin/python3", "python3.14", "python3.13", "python3.12", "python3.11"];
    let find = || names.into_iter().find_map(|name| Some((name, output(program(name).args(["-c", FITS]))?)));
    if find().is_none() {
        apt::install(MISSING, &PACKAGES)?;
    }
    let (name, version) = find().ok_or_else(|| Failed::new(MISSING).hint(apt::as_root(&PACKAGES)))?;
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
    let offline = |e: Failed| {
        e.hint(
            "pip says above why; it queries pypi.org, or what its own settings name. \
             Where the library is already here, name its folder in `MOEC_QNN_LIB`",
        )
    };
    stage("Installing", ONNXRUNTIME);
    shell::run(pip().arg(ONNXRUNTIME)).map_err(offline)?;
    stage("Installing", &format!("{PACKAGE}, some 100 MB"));
    // Its own dependencies are for Python; the library has none of them.
    let mut library = pip();
    library.args(["--no-deps", "--require-hashes", "--only-binary=:all:", "-r"]).arg(&list);
    shell::run(&mut library).map_err(offline)
}

/// The packages that pip installs.
fn requirements() -> String {
    let hashes: Vec<String> = HASHES.iter().map(|hash| format!(" --hash=sha256:{hash}")).collect();
    format!("{PACKAGE}{}\n", hashes.concat())
}

/// Library that the loader names if it is missing.
const ATOMIC: &str = "libatomic";

/// The one library of the operating system's that is not on every machine.
fn atomic() -> Result<(), Failed> {
    apt::install("QNN's library requires libatomic, which is not installed", &["libatomic1"])
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The crate that looks for the library must name the same package and version.
    #[test]
    fn installed_package_matches_the_searched_version() {
        let find = shell::root().join("targets/qnn/sys/src/find.rs");
        let text = fs::read_to_string(find).expect("the crate is there");
        let (name, version) = PACKAGE.split_once("==").expect("a version");
        assert!(text.contains(&format!("PACKAGE: &str = \"{name}\"")));
        assert!(text.contains(&format!("PACKAGE_VERSION: &str = \"{version}\"")));
    }

    #[test]
    fn missing_environment_fails_the_check() {
        let nowhere = std::env::temp_dir().join("no such environment");
        assert!(check(&nowhere).is_err_and(|why| !why.is_empty()));
    }

    #[test]
    fn pip_requirements_list_every_hash() {
        let text = requirements();
        assert!(text.starts_with(PACKAGE) && text.matches(" --hash=sha256:").count() == HASHES.len());
        let hash = |h: &str| h.len() == 64 && h.bytes().all(|b| b.is_ascii_hexdigit());
        assert!(HASHES.iter().all(|h| hash(h)), "hashes are SHA-256");
    }
}
