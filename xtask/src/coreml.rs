//! `cargo xtask coreml`: installs the tools that write Core ML packages.
//!
//! coremltools is Python, and runs on Linux as well as on a Mac. It is installed into a virtual environment
//! in moec's cache folder, with the helper that embeds it (`targets/coreml/helper`). moec itself links
//! neither.

use crate::apt;
use crate::shell::{self, Failed, cache_dir, cargo, output, program, shown, stage, target_dir};
use std::fs;
use std::path::{Path, PathBuf};

/// The version that the helper is written for.
const COREMLTOOLS: &str = "9.0";
/// Debian's packages of Python as a library, and of virtual environments.
const PACKAGES: [&str; 2] = ["python3-dev", "python3-venv"];
const MANIFEST: &str = "targets/coreml/helper/Cargo.toml";
const HELPER: &str = "moec-coreml";

/// Gives the version, whether coremltools has wheels for it and `venv` works, and the folder of its shared
/// library, if that can be linked.
const PROBE: &str = "
import ensurepip, os, sys, sysconfig
folder, name = sysconfig.get_config_var('LIBDIR'), sysconfig.get_config_var('LDLIBRARY')
shared = sysconfig.get_config_var('Py_ENABLE_SHARED') and os.path.exists(os.path.join(folder, name))
print('%d.%d' % sys.version_info[:2], (3, 10) <= sys.version_info[:2] <= (3, 13), folder if shared else '')
";

/// A Python that can be embedded.
struct Python {
    program: String,
    version: String,
    /// Folder of its shared library.
    library: String,
}

/// Installs both, and checks that the helper works.
pub(crate) fn run() -> Result<(), Failed> {
    let home = cache_dir()?.join("coreml");
    if Python::find().is_none() {
        apt::install("no Python that can be embedded", &PACKAGES)?;
    }
    let python = Python::find().ok_or_else(|| {
        Failed::new("no Python of 3.10 to 3.13 with a shared library").hint(apt::as_root(&PACKAGES))
    })?;
    stage("Found", &format!("Python {} ({})", python.version, python.program));
    let venv = home.join("venv");
    environment(&python, &venv)?;
    let helper = build(&python, &home)?;
    let mut check = program(&helper);
    check.arg("--venv").arg(&venv).arg("versions");
    match output(&mut check) {
        Some(report) if report.contains("\"versions\"") => {
            stage("Installed", &helper.display().to_string());
            Ok(())
        }
        _ => {
            Err(Failed::new("the helper does not work").hint(format!("see what it says: {}", shown(&check))))
        }
    }
}

impl Python {
    /// The operating system's own comes first: its library is where the loader looks.
    fn find() -> Option<Self> {
        let names = ["/usr/bin/python3", "python3", "python3.13", "python3.12", "python3.11", "python3.10"];
        names.iter().find_map(|name| {
            let line = output(program(name).args(["-c", PROBE]))?;
            let mut words = line.splitn(3, ' ');
            let (version, fits, library) = (words.next()?, words.next()?, words.next()?);
            let known = fits == "True" && !library.is_empty();
            known.then(|| Self {
                program: (*name).to_owned(),
                version: version.to_owned(),
                library: library.to_owned(),
            })
        })
    }
}

/// Makes the virtual environment, unless it is there and right.
fn environment(python: &Python, venv: &Path) -> Result<(), Failed> {
    let pip = venv.join("bin/pip");
    let right = || {
        let packages = venv.join(format!("lib/python{}/site-packages", python.version));
        packages.join(format!("coremltools-{COREMLTOOLS}.dist-info")).is_dir()
            && packages.join("numpy").is_dir()
    };
    if right() {
        stage("Found", &format!("coremltools {COREMLTOOLS} in {}", venv.display()));
        return Ok(());
    }
    stage("Installing", &format!("coremltools {COREMLTOOLS} in {}", venv.display()));
    shell::run(program(&python.program).args(["-m", "venv", "--clear"]).arg(venv))?;
    let what = format!("coremltools=={COREMLTOOLS}");
    shell::run(program(pip).args(["install", "--quiet", "--disable-pip-version-check", &what, "numpy"]))?;
    if right() { Ok(()) } else { Err(Failed::new("pip did not install coremltools")) }
}

/// Builds the helper and puts it next to the environment.
fn build(python: &Python, home: &Path) -> Result<PathBuf, Failed> {
    stage("Building", HELPER);
    // A folder of its own: it is not part of the workspace.
    let target = target_dir().join(HELPER);
    let mut command = cargo("build", None);
    command.args(["--release", "--locked", "--quiet", "--manifest-path", MANIFEST]);
    command.env("CARGO_TARGET_DIR", &target).env("PYO3_PYTHON", &python.program);
    command.env("RUSTFLAGS", format!("-C link-arg=-Wl,-rpath,{}", python.library));
    shell::run(&mut command)?;
    let (from, to) = (target.join("release").join(HELPER), home.join("bin").join(HELPER));
    let failed = |e: std::io::Error| Failed::new(format!("`{}` cannot be written: {e}", to.display()));
    fs::create_dir_all(home.join("bin")).map_err(failed)?;
    // A program that is running cannot be written to, but another can take its name.
    let new = to.with_extension("new");
    fs::copy(&from, &new).map_err(failed)?;
    fs::rename(&new, &to).map_err(failed)?;
    Ok(to)
}
