//! Faults of a module.

use crate::module::Instruction;
use crate::text;

/// Fault of a module, and its place.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{at}: {message}\n  help: {hint}")]
pub struct Fault {
    /// Line, from 1.
    pub line: u32,
    /// Place: a function or variable, its line, and the instruction.
    pub at: String,
    /// The fault.
    pub message: String,
    /// Valid form.
    pub hint: String,
}

/// Fault without its place.
#[derive(Debug)]
pub(crate) struct Wrong {
    pub(crate) message: String,
    pub(crate) hint: String,
}

/// Result of a resolution.
pub(crate) type Resolved<T> = Result<T, Wrong>;

pub(crate) fn wrong<T>(message: impl Into<String>, hint: impl Into<String>) -> Result<T, Wrong> {
    Err(Wrong { message: message.into(), hint: hint.into() })
}

impl Wrong {
    /// At a declaration.
    pub(crate) fn declared(self, function: &str, line: u32) -> Fault {
        let at = format!("`{function}`, line {line}");
        Fault { line, at, message: self.message, hint: self.hint }
    }

    /// At an instruction.
    pub(crate) fn at(self, function: &str, instruction: &Instruction) -> Fault {
        let line = instruction.line.0;
        let at = format!("`{function}`, line {line}, `{}`", text::instruction(instruction));
        Fault { line, at, message: self.message, hint: self.hint }
    }
}
