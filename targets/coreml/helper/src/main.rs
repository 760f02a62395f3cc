//! `moec-coreml`: writes Core ML packages with coremltools, for moec.
//!
//! `moec-coreml [--venv FOLDER] versions | emit < JOBS.json`. The folder is a virtual environment with
//! coremltools; without the option it is `$MOEC_COREML_PYTHON`. Results and errors go to stdout, one JSON
//! object per line (see `helper/protocol.rs` of moec's Core ML backend); what Python prints goes to stderr.

use pyo3::prelude::*;
use pyo3::types::{PyDict, PyModule};
use std::ffi::{CString, OsString};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

/// All that is done in Python.
const SCRIPT: &str = include_str!("emit.py");

fn main() -> ExitCode {
    let mut args: Vec<OsString> = std::env::args_os().skip(1).collect();
    let venv = if args.first().is_some_and(|a| a == "--venv") && args.len() > 1 {
        args.remove(0);
        Some(PathBuf::from(args.remove(0)))
    } else {
        std::env::var_os("MOEC_COREML_PYTHON").map(PathBuf::from)
    };
    let args: Vec<String> = args.iter().map(|a| a.to_string_lossy().into_owned()).collect();
    match Python::attach(|py| run(py, venv.as_deref(), &args)) {
        Ok(code) => ExitCode::from(code),
        Err(e) => {
            eprintln!("{e}");
            ExitCode::FAILURE
        }
    }
}

/// Makes the packages of a virtual environment importable, and runs the script.
fn run(py: Python<'_>, venv: Option<&Path>, args: &[String]) -> PyResult<u8> {
    let sys = py.import("sys")?;
    // Whatever prints to stdout must not come between the lines that moec reads.
    let lines = sys.getattr("stdout")?;
    sys.setattr("stdout", sys.getattr("stderr")?)?;
    // Nothing is written beside the packages of others.
    sys.setattr("dont_write_bytecode", true)?;
    if let Some(venv) = venv {
        let version = sys.getattr("version_info")?;
        let (major, minor): (u32, u32) =
            (version.getattr("major")?.extract()?, version.getattr("minor")?.extract()?);
        let packages = venv.join(format!("lib/python{major}.{minor}/site-packages"));
        if !packages.is_dir() {
            let message = format!("`{}` is not a virtual environment of Python {major}.{minor}", venv.display());
            let event = PyDict::new(py);
            event.set_item("event", "error")?;
            event.set_item("kind", "missing")?;
            event.set_item("message", message)?;
            let line: String = py.import("json")?.call_method1("dumps", (event,))?.extract()?;
            lines.call_method1("write", (format!("{line}\n"),))?;
            lines.call_method0("flush")?;
            return Ok(1);
        }
        // Packages of the environment come before Python's own.
        let own: Vec<String> = sys.getattr("path")?.extract()?;
        py.import("site")?.call_method1("addsitedir", (packages,))?;
        let path: Vec<String> = sys.getattr("path")?.extract()?;
        let (before, added) = path.split_at(own.len().min(path.len()));
        sys.setattr("path", [added, before].concat())?;
    }
    let (code, file, name) = (CString::new(SCRIPT)?, c"emit.py", c"moec_coreml_emit");
    let script = PyModule::from_code(py, &code, file, name)?;
    script.getattr("main")?.call1((args.to_vec(), lines))?.extract()
}
