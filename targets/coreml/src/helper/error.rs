//! Reasons that no package is written, and remedies.

use super::{INSTALL, PROGRAM_VAR, PYTHON_VAR};
use std::path::{Path, PathBuf};
use std::process::ExitStatus;
use thiserror::Error;

/// A helper that is missing, does not work, or refuses.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum HelperError {
    /// The program is not there.
    #[error("`{}`, which writes Core ML packages, is not there", path.display())]
    NoProgram {
        /// Path that was looked at.
        path: PathBuf,
    },
    /// The virtual environment is not there.
    #[error("the Python packages that write Core ML packages are not in `{}`", path.display())]
    NoPython {
        /// Path that was looked at.
        path: PathBuf,
    },
    /// coremltools cannot be imported, or is of another version.
    #[error("{what}")]
    Coremltools {
        /// Message of the helper.
        what: String,
        /// The virtual environment.
        venv: PathBuf,
    },
    /// The program does not start.
    #[error("`{}` cannot be started: {what}", path.display())]
    Start {
        /// The program.
        path: PathBuf,
        /// Message of the operating system.
        what: String,
    },
    /// The program starts, but ends without a reply.
    #[error("`{}` failed ({status}){}", path.display(), stderr_suffix(stderr))]
    Died {
        /// The program.
        path: PathBuf,
        /// Exit status.
        status: String,
        /// The end of its output on stderr.
        stderr: String,
    },
    /// The program is of another version of moec.
    #[error("`{}` speaks version {found} of the protocol, this moec {}", path.display(), super::PROTOCOL)]
    Protocol {
        /// The program.
        path: PathBuf,
        /// Its version.
        found: u32,
    },
    /// The program's output makes no sense.
    #[error("`{}` is not understood: {what}", path.display())]
    Talk {
        /// The program.
        path: PathBuf,
        /// The fault.
        what: String,
    },
    /// A package cannot be written.
    #[error("{what}")]
    Package {
        /// Message of the helper.
        what: String,
        /// Its remedy.
        hint: Option<String>,
    },
}

impl HelperError {
    /// Remedy.
    pub fn hint(&self) -> String {
        match self {
            Self::NoProgram { .. } => format!("`{INSTALL}` builds it; or set `{PROGRAM_VAR}` to it"),
            Self::NoPython { .. } => {
                format!(
                    "`{INSTALL}` installs them; or set `{PYTHON_VAR}` to a virtual environment with coremltools"
                )
            }
            Self::Coremltools { venv, .. } => {
                format!(
                    "`{INSTALL}` installs it again; or: {}/bin/pip install coremltools==9.0",
                    venv.display()
                )
            }
            Self::Died { stderr, .. } if stderr.contains("libpython") => {
                format!("the Python that it was built with is gone: `{INSTALL}` builds it again")
            }
            Self::Start { .. } | Self::Died { .. } | Self::Protocol { .. } | Self::Talk { .. } => {
                format!("`{INSTALL}` builds it again")
            }
            Self::Package { hint, .. } => {
                hint.clone().unwrap_or_else(|| "this is a fault of moec: please report it".to_owned())
            }
        }
    }
}

fn stderr_suffix(stderr: &str) -> String {
    if stderr.is_empty() { String::new() } else { format!(":\n{stderr}") }
}

/// The error that the helper reports.
pub(super) fn refused(kind: &str, what: String, hint: Option<String>, venv: &Path) -> HelperError {
    match kind {
        "missing" | "version" => HelperError::Coremltools { what, venv: venv.to_owned() },
        _ => HelperError::Package { what, hint },
    }
}

/// Error of a helper that ended without reporting one.
pub(super) fn died(path: &Path, status: ExitStatus, stderr: String) -> HelperError {
    HelperError::Died { path: path.to_owned(), status: status.to_string(), stderr }
}
