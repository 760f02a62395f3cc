//! The compiler's error: cause, place, party at fault, and remedy.

use std::path::Path;
use std::{fmt, io};

/// Origin of an error. It decides the exit code and the opening word.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// The command line, alone or with this bundle, model or target: exit 2.
    Usage,
    /// A file of the user's: exit 1.
    Input,
    /// A limit of the target, or something this version does not support: exit 1.
    Limit,
    /// The machine: a full disk, a missing tool, an interrupt: exit 1.
    Environment,
    /// Our bug: exit 1.
    Bug,
}

/// An error as the user reads it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Error {
    /// Origin.
    pub fault: Fault,
    /// The fault, naming file and key or tensor in backticks. No full stop, no capital.
    pub message: String,
    /// Causes, outermost first.
    pub causes: Vec<String>,
    /// Remedy.
    pub hint: Option<String>,
}

/// Result of the compiler.
pub type Result<T, E = Error> = std::result::Result<T, E>;

impl Error {
    fn new(fault: Fault, message: impl Into<String>) -> Self {
        Self { fault, message: message.into(), causes: Vec::new(), hint: None }
    }
    /// The command line is wrong.
    pub fn usage(message: impl Into<String>) -> Self {
        Self::new(Fault::Usage, message)
    }
    /// A file of the user's is wrong.
    pub fn input(message: impl Into<String>) -> Self {
        Self::new(Fault::Input, message)
    }
    /// The target or this version cannot.
    pub fn limit(message: impl Into<String>) -> Self {
        Self::new(Fault::Limit, message)
    }
    /// The machine failed us.
    pub fn environment(message: impl Into<String>) -> Self {
        Self::new(Fault::Environment, message)
    }
    /// We failed.
    pub fn bug(message: impl Into<String>) -> Self {
        Self::new(Fault::Bug, message)
    }
    /// Adds a remedy.
    pub fn hint(mut self, hint: impl Into<String>) -> Self {
        self.hint = Some(hint.into());
        self
    }
    /// Adds a cause.
    pub fn because(mut self, cause: impl fmt::Display) -> Self {
        self.causes.push(cause.to_string());
        self
    }
    /// Replaces the message by one with more context; the old message becomes the first cause.
    pub fn context(mut self, message: impl Into<String>) -> Self {
        let old = std::mem::replace(&mut self.message, message.into());
        self.causes.insert(0, old);
        self
    }
    /// Exit code of the process.
    pub fn exit_code(&self) -> u8 {
        if self.fault == Fault::Usage { 2 } else { 1 }
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)?;
        self.causes.iter().try_for_each(|c| write!(f, ": {c}"))
    }
}

impl std::error::Error for Error {}

impl From<moec_runtime::Error> for Error {
    fn from(e: moec_runtime::Error) -> Self {
        let fault = match e.fault() {
            moec_runtime::Fault::Request if e.is_bad_use() => Fault::Usage,
            moec_runtime::Fault::Request | moec_runtime::Fault::Bundle => Fault::Input,
            moec_runtime::Fault::Host => Fault::Environment,
            moec_runtime::Fault::Moec => Fault::Bug,
        };
        Self { hint: e.hint(), ..Self::new(fault, e.to_string()) }
    }
}

/// Codes for a process, and for a machine, that has no descriptor left for another open file.
#[cfg(unix)]
const TOO_MANY_FILES: [i32; 2] = [libc::EMFILE, libc::ENFILE];
#[cfg(not(unix))]
const TOO_MANY_FILES: [i32; 0] = [];

/// An I/O failure as the user reads it.
pub fn io_error(action: &str, path: &Path, e: &io::Error) -> Error {
    let error = Error::environment(format!("cannot {action} `{}`", path.display())).because(e);
    if let Some(why) = moec_runtime::platform::regular::refused(e) {
        return error.hint(why.hint());
    }
    match e.kind() {
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => {
            error.hint("the disk is full: free some space, or write elsewhere with `-o`")
        }
        io::ErrorKind::ReadOnlyFilesystem => {
            error.hint("nothing can be written to that file system: write elsewhere with `-o`")
        }
        io::ErrorKind::PermissionDenied => error.hint("check the write permissions there"),
        io::ErrorKind::FileTooLarge => error.hint(
            "raise the limit of file sizes (`ulimit -f`), or write with `-o` to a file system that takes larger files",
        ),
        _ if e.raw_os_error().is_some_and(|code| TOO_MANY_FILES.contains(&code)) => {
            error.hint("raise the limit of open files (`ulimit -n`), or close other programs")
        }
        _ => error,
    }
}
