//! Errors of device descriptions.

use std::io;
use std::path::PathBuf;

/// Reason that a device file is invalid.
#[derive(Debug, thiserror::Error)]
pub enum DeviceError {
    /// No built-in device has that name.
    #[error("no target is named `{name}`")]
    Unknown {
        /// Requested name.
        name: String,
        /// Known names that come near, nearest first.
        nearest: Vec<&'static str>,
    },
    /// The file cannot be read.
    #[error("device file `{}` cannot be read", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// Cause.
        source: io::Error,
    },
    /// The file is not TOML, or a key is unknown, missing or of another type.
    #[error("device file `{}`, line {line}, column {column}: {message}", path.display())]
    Parse {
        /// The file.
        path: PathBuf,
        /// Line, from 1.
        line: usize,
        /// Column, from 1.
        column: usize,
        /// The fault.
        message: String,
    },
    /// This machine cannot be divided into the NUMA nodes of a target.
    #[error("target `{name}`: {message}")]
    Nodes {
        /// Requested name.
        name: String,
        /// The fault.
        message: String,
    },
    /// A value makes no sense.
    #[error("device file `{}`: `{key}`: {message}", path.display())]
    Invalid {
        /// The file.
        path: PathBuf,
        /// The key, with its section.
        key: String,
        /// The fault.
        message: String,
    },
}

impl DeviceError {
    /// Remedy.
    pub fn hint(&self) -> String {
        match self {
            Self::Unknown { nearest, .. } => match nearest.first() {
                Some(name) => format!("did you mean `{name}`? `moec targets` lists them all"),
                None => {
                    "`moec targets` lists the names; a path of your own device file ends in `.toml`".into()
                }
            },
            Self::Read { .. } => "`--target` takes a name that `moec targets` lists, or a device file".into(),
            Self::Nodes { .. } => {
                "`--target native` is all of this machine; `native-x2` is two processes of it, by MPI".into()
            }
            Self::Invalid { key, .. } if key == crate::nodes::KEY => {
                "`moec targets native-numa2` prints the nodes of this machine".into()
            }
            Self::Parse { .. } | Self::Invalid { .. } => {
                "`moec targets x86-64-v3` prints a valid device file".into()
            }
        }
    }
}
