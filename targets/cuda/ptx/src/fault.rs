//! What is wrong with a module.

use crate::module::Instruction;
use crate::text;

/// What is wrong with a module, and where.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{at}: {message}\n  help: {hint}")]
pub struct Fault {
    /// Line, from 1.
    pub line: u32,
    /// Where: a function or variable, its line, and the instruction.
    pub at: String,
    /// What is wrong there.
    pub message: String,
    /// What would be right.
    pub hint: String,
}

/// What is wrong, without its place.
#[derive(Debug)]
pub(crate) struct Wrong {
    pub(crate) message: String,
    pub(crate) hint: String,
}

/// What is found, or what is wrong.
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
