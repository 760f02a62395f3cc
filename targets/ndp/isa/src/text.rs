//! The text form: printed for people, parsed back equal.
//!
//! One statement a line, `;` starts a comment. The header comes first, in its order, then regions, then
//! instructions.

mod lex;
mod parse;
mod print;

use crate::stream::{Instruction, Stream};

/// Reason that a text is not a stream, and the place.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{line}:{column}: {message}\n  help: {hint}")]
pub struct SyntaxError {
    /// Line, from 1.
    pub line: usize,
    /// Column in characters, from 1.
    pub column: usize,
    /// Expected and found text.
    pub message: String,
    /// Valid text for that place.
    pub hint: String,
}

type Parsed<T> = Result<T, SyntaxError>;

/// Reads the text form. It checks syntax, names and limits; [`crate::verify`] checks the rest.
///
/// # Errors
/// Malformed text or an unknown name, with its place.
pub fn parse(text: &str) -> Result<Stream, SyntaxError> {
    parse::stream(text)
}

/// The text form: what [`parse`] reads back as the same stream.
pub fn print(stream: &Stream) -> String {
    stream.to_string()
}

/// One instruction as its line of the text form, without indentation.
pub(crate) fn instruction(stream: &Stream, instruction: &Instruction) -> String {
    print::instruction(stream, instruction)
}
