//! Reasons that a network does not run.

use thiserror::Error;

/// A run that cannot be.
#[derive(Debug, Error)]
pub enum ExecError {
    /// Static numbers that cannot be read.
    #[error("static tensor `{tensor}`: {source}")]
    File {
        /// The tensor.
        tensor: String,
        /// Cause.
        source: Box<moec_runtime::Error>,
    },
    /// A file of static numbers is too short.
    #[error("static tensor `{tensor}`: `{file}` is cut off: it ends before byte {end}")]
    Short {
        /// The tensor.
        tensor: String,
        /// The file.
        file: String,
        /// End of the numbers in the file.
        end: u64,
    },
    /// Static numbers are in a file of unknown path.
    #[error("static tensor `{tensor}` is in the file `{file}`, but no folder is given")]
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
        /// The fault.
        what: String,
    },
}
