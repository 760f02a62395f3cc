//! Reasons that a program is refused.

use thiserror::Error;

/// A program that is malformed, or that the unit does not run.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error("program `{program}`, function `{function}`: {place}{what}")]
pub struct ProgramError {
    /// The program; empty while a function is being built.
    pub program: String,
    /// The function.
    pub function: String,
    /// `op 3 (conv): ` where it is an operator's fault, else empty.
    pub place: String,
    /// The fault.
    pub what: String,
}

impl ProgramError {
    /// An error in a function as a whole.
    pub(crate) fn function(function: &str, what: impl Into<String>) -> Self {
        Self {
            program: String::new(),
            function: function.to_owned(),
            place: String::new(),
            what: what.into(),
        }
    }

    /// An error of an operator.
    pub(crate) fn op(function: &str, index: usize, name: &str, what: impl Into<String>) -> Self {
        Self { place: format!("op {index} ({name}): "), ..Self::function(function, what) }
    }

    /// The same in a named program.
    pub(crate) fn within(self, program: &str) -> Self {
        Self { program: program.to_owned(), ..self }
    }
}
