//! The text form: what LLVM writes, read into a [`Module`], and printed back.

mod function;
mod lex;
mod operand;
mod parse;
mod print;
mod variable;

use crate::module::{Instruction, Module};

/// Reason that a text is not a module, and the place.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{line}:{column}: {message}\n  | {text}\n  help: {hint}")]
pub struct SyntaxError {
    /// Line, from 1.
    pub line: u32,
    /// Column in characters, from 1.
    pub column: u32,
    /// Expected and found text.
    pub message: String,
    /// The unchanged line, without indentation.
    pub text: String,
    /// Valid text for that place.
    pub hint: String,
}

type Parsed<T> = Result<T, SyntaxError>;

/// Reads PTX (ISA 6 to 9). It checks syntax, names of instructions and limits; [`crate::verify`] checks the
/// rest.
///
/// # Errors
/// Malformed text, an unknown directive or an unknown instruction, with its place and its line.
pub fn parse(text: &str) -> Result<Module, SyntaxError> {
    parse::module(text)
}

/// The text form: what [`parse`] reads back as the same module.
pub fn print(module: &Module) -> String {
    module.to_string()
}

/// One instruction as its line of the text form, without indentation.
pub(crate) fn instruction(instruction: &Instruction) -> String {
    instruction.to_string()
}
