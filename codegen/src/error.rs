//! Errors of kernel generation, and their origin.

/// An error of this crate.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// This build of LLVM, or this host, cannot serve the machine requested.
    #[error("target limit: {what}\nhint: {hint}")]
    Target {
        /// Feature that the target lacks.
        what: String,
        /// Remedy.
        hint: String,
    },
    /// A kernel's parameters contradict each other.
    #[error("kernel `{symbol}` cannot be built: {what} (a bug in moec)")]
    Spec {
        /// Symbol of the kernel.
        symbol: String,
        /// The contradiction.
        what: String,
    },
    /// The generator emitted code that LLVM refuses.
    #[error("kernel generation failed: {0} (a bug in moec)")]
    Bug(String),
    /// The generated Rust source is not Rust.
    #[error("the source of `run` cannot be written: {0} (a bug in moec)")]
    Source(String),
    /// An object could not be loaded into this process.
    #[error(
        "the object code does not load: {0}\nhint: it must be compiled for this host (`--target native`)"
    )]
    Load(String),
}

impl Error {
    pub(crate) fn bug(what: impl ToString) -> Self {
        Self::Bug(what.to_string())
    }
}

/// Result of this crate.
pub type Result<T> = std::result::Result<T, Error>;
