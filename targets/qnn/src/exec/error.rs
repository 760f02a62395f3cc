//! Why a network does not run.

use std::path::PathBuf;
use thiserror::Error;

/// A run that cannot be.
#[derive(Debug, Error)]
pub enum ExecError {
    /// Static numbers that cannot be read.
    #[error("static tensor `{tensor}`: cannot read {}: {source}", path.display())]
    File {
        /// The tensor.
        tensor: String,
        /// The file.
        path: PathBuf,
        /// What the system says.
        source: std::io::Error,
    },
    /// Static numbers lie in a file, and nobody said where.
    #[error("static tensor `{tensor}` lies in the file `{file}`, and no folder is given")]
    NoFolder {
        /// The tensor.
        tensor: String,
        /// The file.
        file: String,
    },
    /// More or fewer inputs than the network has, or of another size.
    #[error("network `{network}`: {what}")]
    Input {
        /// The network.
        network: String,
        /// What is wrong.
        what: String,
    },
}
