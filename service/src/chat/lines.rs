//! Sources of lines: a terminal with history, or standard input.

use crate::error::{Error, Result};
use moec_runtime::Error as Failed;
use moec_runtime::cli::Io;
use rustyline::DefaultEditor;
use rustyline::error::ReadlineError;
use std::path::PathBuf;

/// Maximum number of bytes of a line from standard input.
const LONGEST: usize = 16 << 20;

/// One line.
pub(super) enum Line {
    /// The text.
    Text(String),
    /// An empty line, or an interrupt while it was written.
    Nothing,
    /// A line that is not valid text.
    Invalid(Failed),
    /// The end of the lines.
    End,
}

/// A source of lines.
pub(super) enum Lines {
    /// A terminal, with the path of its history.
    Terminal(Box<DefaultEditor>, Option<PathBuf>),
    /// Standard input, with the bytes that were read and not yet used.
    Piped(Vec<u8>),
}

impl Lines {
    /// Opens the lines of a terminal if standard input is one, else of standard input.
    pub(super) fn open(io: &Io<'_>) -> Result<Self> {
        if io.input.is_some() {
            return Ok(Self::Piped(Vec::new()));
        }
        let mut editor =
            DefaultEditor::new().map_err(|e| Error::new(format!("cannot use the terminal: {e}")))?;
        let path = history();
        if let Some(path) = &path {
            // If there is no history yet, or it cannot be read, a new one begins.
            let _ = editor.load_history(path);
        }
        Ok(Self::Terminal(Box::new(editor), path))
    }

    /// Whether the lines come from a terminal.
    pub(super) fn is_terminal(&self) -> bool {
        matches!(self, Self::Terminal(..))
    }

    /// Whether an error ends the conversation, not only one line: an output that cannot be written, or an
    /// interrupt without a terminal, where no prompt follows.
    pub(super) fn ends_with(&self, error: &Failed) -> bool {
        matches!(error, Failed::Output(_)) || matches!(error, Failed::Interrupted) && !self.is_terminal()
    }

    /// The next line.
    pub(super) fn next(&mut self, io: &mut Io<'_>) -> Result<Line> {
        match self {
            Self::Terminal(editor, path) => match editor.readline("> ") {
                Ok(line) if line.trim().is_empty() => Ok(Line::Nothing),
                Ok(line) => {
                    let _ = editor.add_history_entry(&line);
                    if let Some(path) = path {
                        // A history that cannot be kept is no reason to stop.
                        let _ = path.parent().map_or(Ok(()), std::fs::create_dir_all);
                        let _ = editor.save_history(path);
                    }
                    Ok(Line::Text(line))
                }
                Err(ReadlineError::Interrupted) => Ok(Line::Nothing),
                Err(ReadlineError::Eof) => Ok(Line::End),
                Err(e) => Err(Error::new(format!("cannot read from the terminal: {e}"))),
            },
            Self::Piped(read) => piped(read, io),
        }
    }
}

/// The next line of standard input.
fn piped(read: &mut Vec<u8>, io: &mut Io<'_>) -> Result<Line> {
    let mut piece = [0; 4096];
    let line = loop {
        if let Some(end) = read.iter().position(|&b| b == b'\n') {
            break read.drain(..=end).collect::<Vec<_>>();
        }
        if read.len() > LONGEST {
            return Err(Error::new(format!("a line has more than {LONGEST} bytes")));
        }
        let n = io.input.as_mut().map_or(Ok(0), |i| i.read(&mut piece)).map_err(Failed::input)?;
        if n == 0 {
            break std::mem::take(read);
        }
        read.extend_from_slice(&piece[..n]);
    };
    if line.is_empty() {
        return Ok(Line::End);
    }
    let Ok(text) = String::from_utf8(line) else { return Ok(Line::Invalid(Failed::not_utf8())) };
    let text = text.trim_end_matches(['\r', '\n']);
    Ok(if text.trim().is_empty() { Line::Nothing } else { Line::Text(text.to_owned()) })
}

/// Path of the history: in the user's state folder (XDG).
fn history() -> Option<PathBuf> {
    let absolute = |name: &str| std::env::var_os(name).map(PathBuf::from).filter(|p| p.is_absolute());
    let state = absolute("XDG_STATE_HOME").or_else(|| Some(absolute("HOME")?.join(".local/state")))?;
    Some(state.join("moec").join("chat_history"))
}
