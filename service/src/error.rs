//! Errors of this crate, and their report by a subcommand.

use moec_runtime::cli::Failure;
use std::fmt;

/// Error, with its remedy.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Error {
    /// The fault, and its place.
    pub what: String,
    /// Remedy, if there is one.
    pub hint: Option<String>,
}

/// Result of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

impl Error {
    /// Creates an error.
    pub fn new(what: impl Into<String>) -> Self {
        Self { what: what.into(), hint: None }
    }

    /// Adds a remedy.
    #[must_use]
    pub fn hint(mut self, hint: impl Into<String>) -> Self {
        self.hint = Some(hint.into());
        self
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.what)
    }
}

impl std::error::Error for Error {}

impl From<moec_runtime::Error> for Error {
    fn from(e: moec_runtime::Error) -> Self {
        Self { what: e.to_string(), hint: e.hint() }
    }
}

impl From<Error> for Failure {
    fn from(Error { what, hint }: Error) -> Self {
        Self::Other { what, hint }
    }
}
