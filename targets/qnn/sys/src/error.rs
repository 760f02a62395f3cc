//! Errors, with the message of the library, and the remedy.

use bincode::{Decode, Encode};
use std::path::{Path, PathBuf};
use thiserror::Error;

/// Command that installs the library.
pub const INSTALL: &str = "cargo xtask qnn";

/// The variable that names the folder of the library.
pub const VARIABLE: &str = "MOEC_QNN_LIB";

/// Variable with the time limit in seconds of the worker process for one answer.
pub const LIMIT: &str = "MOEC_QNN_SECONDS";

/// Result of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Error of QNN.
#[derive(Clone, Debug, Error, PartialEq, Encode, Decode)]
#[non_exhaustive]
pub enum Error {
    /// The folder with the library is missing.
    #[error("QNN is not installed: there is no `{}`", path.display())]
    NotInstalled {
        /// Path that was looked at.
        path: PathBuf,
    },
    /// A folder lacks a part of it.
    #[error("`{}` has no `{name}`", folder.display())]
    NoLibrary {
        /// The folder.
        folder: PathBuf,
        /// The file.
        name: String,
    },
    /// The operating system cannot load a part.
    #[error("`{}` cannot be loaded: {why}", path.display())]
    Load {
        /// The file.
        path: PathBuf,
        /// Message of the loader.
        why: String,
    },
    /// A file exists, but is not the expected library.
    #[error("`{}` is not the library that moec supports: {what}", path.display())]
    Version {
        /// The file.
        path: PathBuf,
        /// The fault.
        what: String,
    },
    /// The library refused a call.
    #[error("QNN refused {what}: {reason}{}", lines(messages))]
    Call {
        /// The request.
        what: String,
        /// Its code, with the library's words for it.
        reason: String,
        /// Errors that it logged during the call.
        messages: Vec<String>,
    },
    /// A node that the backend cannot have.
    #[error("graph `{graph}`: QNN refused node `{node}` ({op}): {reason}{}", lines(messages))]
    Node {
        /// The graph.
        graph: String,
        /// The node.
        node: String,
        /// Its operator.
        op: String,
        /// The code, with the library's words for it.
        reason: String,
        /// Errors that it logged during the call.
        messages: Vec<String>,
    },
    /// A chip cannot be selected. Graphs compiled after this would be for another chip.
    #[error("QNN cannot compile for `{soc}` (model {model}): {reason}{}", lines(messages))]
    Device {
        /// Name of the chip.
        soc: String,
        /// Its number.
        model: u32,
        /// The code, with the library's words for it.
        reason: String,
        /// Errors that it logged during the call.
        messages: Vec<String>,
    },
    /// A graph is wrong in itself.
    #[error("graph `{graph}`: {what}")]
    Graph {
        /// The graph.
        graph: String,
        /// The fault.
        what: String,
    },
    /// More of something than the library's 32 bits count.
    #[error("`{of}` has {found} {what}, but QNN accepts at most {}", u32::MAX)]
    Count {
        /// The tensor, node or graph.
        of: String,
        /// Number of them.
        found: u64,
        /// Name of the counted things.
        what: String,
    },
    /// A graph was given inputs that are not its own.
    #[error("graph `{graph}` is given {what}")]
    Inputs {
        /// The graph.
        graph: String,
        /// The fault.
        what: String,
    },
    /// A context binary or a DLC is damaged, or of another kind.
    #[error("the {what} cannot be read: {why}")]
    Binary {
        /// Item that was read.
        what: String,
        /// Reason.
        why: String,
    },
    /// A context binary is for another chip.
    #[error("the context binary is for the chip of number {found}, not for `{soc}`, which is {expected}")]
    Soc {
        /// The chip's number in the binary.
        found: u32,
        /// Name of the chip that it should be for.
        soc: String,
        /// That chip's number.
        expected: u32,
    },
    /// A file cannot be read or written.
    #[error("`{}`: {why}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// Message of the operating system.
        why: String,
    },
    /// The process that QNN runs in could not be started.
    #[error("`{}` cannot be started: {why}", program.display())]
    Start {
        /// The program.
        program: PathBuf,
        /// Message of the operating system.
        why: String,
    },
    /// The process that QNN runs in cannot get a request: too many bytes, or a path that is not UTF-8.
    #[error("QNN's process cannot receive the request to {doing}: {why}")]
    Request {
        /// Request that was not sent.
        doing: String,
        /// Reason.
        why: String,
    },
    /// The process that QNN runs in has died.
    #[error("QNN's process died during the request to {doing}: {ending}{}", lines(messages))]
    Died {
        /// The request.
        doing: String,
        /// Exit status.
        ending: String,
        /// The last lines of its stderr.
        messages: Vec<String>,
    },
    /// The process that QNN runs in took too long, and was ended.
    #[error("QNN's process did not {doing} within {seconds} s and was ended{}", lines(messages))]
    Late {
        /// The request.
        doing: String,
        /// Seconds of waiting.
        seconds: f64,
        /// The last lines of its stderr.
        messages: Vec<String>,
    },
    /// The process that QNN runs in returned an invalid reply.
    #[error("QNN's process returned an invalid reply to the request to {doing}: {why}")]
    Protocol {
        /// The request.
        doing: String,
        /// The fault.
        why: String,
    },
}

/// Lines after a message.
fn lines(messages: &[String]) -> String {
    messages.iter().flat_map(|m| ["\n  ", m]).collect()
}

impl Error {
    pub(crate) fn io(path: &Path, why: impl std::fmt::Display) -> Self {
        Self::Io { path: path.to_owned(), why: why.to_string() }
    }

    /// Remedy, if there is one.
    pub fn hint(&self) -> Option<String> {
        let install = || Some(format!("install it with `{INSTALL}`, or name its folder in `{VARIABLE}`"));
        match self {
            Self::Load { why, .. } if why.contains("libatomic") => {
                Some("on Debian and Ubuntu, as root: apt-get install libatomic1".into())
            }
            Self::NotInstalled { .. } | Self::NoLibrary { .. } | Self::Version { .. } | Self::Load { .. } => {
                install()
            }
            Self::Late { .. } => Some(format!("raise the limit of seconds in `{LIMIT}`")),
            Self::Soc { .. } => Some("build it again for this chip".into()),
            Self::Binary { .. } => Some("build it again".into()),
            Self::Count { .. } => Some("split it into several parts".into()),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Message of the dynamic loader if the system lacks this library, which the wheel does not include.
    #[test]
    fn a_missing_libatomic_is_named() {
        let why = "libatomic.so.1: cannot open shared object file: No such file or directory".into();
        let missing = Error::Load { path: "libQnnSystem.so".into(), why };
        assert!(missing.hint().is_some_and(|hint| hint.contains("apt-get install libatomic1")));
        let other = Error::Load { path: "libQnnSystem.so".into(), why: "file too short".into() };
        assert!(other.hint().is_some_and(|hint| hint.contains(INSTALL) && hint.contains(VARIABLE)));
    }

    #[test]
    fn library_log_is_appended_to_the_error() {
        let refused = Error::Call {
            what: "a context".into(),
            reason: "no".into(),
            messages: vec!["one".into(), "two".into()],
        };
        assert_eq!(refused.to_string(), "QNN refused a context: no\n  one\n  two");
    }
}
