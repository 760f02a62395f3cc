//! Errors of traces.

use thiserror::Error;

/// Reason that a trace was refused. Lines count from 1.
#[derive(Debug, Error)]
pub enum TraceError {
    /// The file could not be read.
    #[error("line {line}: the trace cannot be read: {source}")]
    Read {
        /// The line before which reading failed.
        line: u64,
        /// Error of the operating system.
        source: std::io::Error,
    },
    /// A line is longer than any request.
    #[error(
        "line {line}: longer than {most} bytes; a request is `R|W channel rank bankgroup bank row column`"
    )]
    Long {
        /// The line.
        line: u64,
        /// Largest allowed value.
        most: usize,
    },
    /// A line is not seven words.
    #[error("line {line}: {words} words; a request is seven: `R|W channel rank bankgroup bank row column`")]
    Words {
        /// The line.
        line: u64,
        /// The words that it has.
        words: usize,
    },
    /// The first word is neither R nor W.
    #[error("line {line}: `{word}` is not a kind of request; write R or W")]
    Kind {
        /// The line.
        line: u64,
        /// The word.
        word: String,
    },
    /// A number is malformed, or names a place outside of the memory.
    #[error("line {line}: {field} `{word}`; allowed are 0 to {}", limit - 1)]
    Number {
        /// The line.
        line: u64,
        /// Name of the field.
        field: &'static str,
        /// The word.
        word: String,
        /// Number that the memory has.
        limit: u32,
    },
}
