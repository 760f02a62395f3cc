//! Errors of the runtime: fault, place, origin and remedy.
//!
//! Callers distinguish kinds: by exit codes, HTTP statuses, or other reactions. Everything else is in the
//! message. It is written where the error occurs, or by a constructor here if several places report the same.

use crate::offload::disk::ReadError;
use std::borrow::Cow;
use std::fmt::{self, Display};
use std::io;
use std::path::{Path, PathBuf};

/// Result of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Remedy of an error, for people, if there is one.
pub type Hint = Option<Cow<'static, str>>;

/// Origin of an error.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// The request: an argument out of range, a prompt too long.
    Request,
    /// The bundle: a file missing, short or changed.
    Bundle,
    /// This machine: a CPU feature missing, memory refused, a failing disk.
    Host,
    /// moec itself, or a kernel that it generated.
    Moec,
}

/// A limit of the bundle or of this run that a request exceeds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Limit {
    /// Tokens of a sequence.
    Context,
    /// Sequences at a time.
    Sequences,
    /// Sequences that wait for a slot.
    Queue,
    /// Sequences whose KV cache fits into free memory.
    Memory,
}

/// An error of the runtime.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The operating system refused an operation on a file, a stream, a thread or memory.
    #[error("cannot {what}{}: {source}", of(.path.as_deref()))]
    Io {
        /// Operation (`read`, `start a worker thread`).
        what: Cow<'static, str>,
        /// File, if it is about one.
        path: Option<PathBuf>,
        /// Reason.
        source: io::Error,
        /// Remedy.
        hint: Hint,
    },
    /// The output cannot be written.
    #[error("cannot write the output: {0}")]
    Output(io::Error),
    /// A file of the bundle does not exist.
    #[error("`{}` is missing from the bundle", .0.display())]
    MissingFile(PathBuf),
    /// A file does not have the expected content: it is damaged, changed, or of another build.
    #[error("`{}` {what}", .path.display())]
    BadFile {
        /// File.
        path: PathBuf,
        /// Fault of the file: a verb phrase.
        what: String,
        /// Remedy.
        hint: Hint,
    },
    /// An extent of the weights cannot be read from the disk.
    #[error(transparent)]
    Read(Box<ReadError>),
    /// The plan or the object code of the bundle cannot run.
    #[error("{0}")]
    Bundle(String),
    /// This machine lacks a requirement of the bundle, or a device of it fails.
    #[error("{what}")]
    Machine {
        /// Part that is missing or failed, and its place.
        what: String,
        /// Remedy.
        hint: Hint,
    },
    /// Arguments that this bundle does not accept. Reported before any work.
    #[error("{what}")]
    Usage {
        /// Argument, and its requirement.
        what: String,
        /// Remedy.
        hint: Hint,
    },
    /// A request that cannot be answered, for a reason that is found during the work.
    #[error("{what}")]
    Request {
        /// The reason.
        what: String,
        /// Remedy.
        hint: Hint,
    },
    /// A request exceeds a limit.
    #[error("{what}")]
    Limit {
        /// Limit that was passed.
        limit: Limit,
        /// Its value.
        most: usize,
        /// Requested and available amounts.
        what: String,
        /// Remedy.
        hint: Hint,
    },
    /// A sequence cannot continue, be copied or be saved at a position, because a state lacks the data.
    /// Computing the sequence again from its beginning is possible.
    #[error("{what}")]
    State {
        /// State, and the operation that it cannot do.
        what: String,
        /// Remedy.
        hint: Hint,
    },
    /// The model computed NaN, or chose an expert that does not exist.
    #[error("{what}")]
    Model {
        /// Fault, and its layer or step.
        what: String,
        /// Remedy.
        hint: Hint,
    },
    /// A bug of moec.
    #[error("{0}")]
    Internal(String),
    /// A stop was requested (an interrupt from the keyboard).
    #[error("interrupted")]
    Interrupted,
}

/// Remedy if files of the bundle are damaged.
pub(crate) const DAMAGED: &str =
    "the bundle is damaged or incomplete; copy it again, or rebuild it with `moec build`";
/// Remedy if steps cannot run on this machine.
const ELSEWHERE: &str =
    "run the bundle on its target, or emulate the unit with `moec run BUNDLE --emulate …`";
/// Remedy if a kernel or a graph fails.
const VERIFY: &str = "check the bundle with `moec verify`; if it passes, this is a bug of moec";

impl Error {
    /// The operating system refused an operation on a file.
    pub fn io(what: impl Into<Cow<'static, str>>, path: impl Into<PathBuf>, source: io::Error) -> Self {
        Self::Io { what: what.into(), path: Some(path.into()), source, hint: None }
    }

    /// The operating system refused an operation that is not about a file.
    pub fn system(what: impl Into<Cow<'static, str>>, source: io::Error) -> Self {
        Self::Io { what: what.into(), path: None, source, hint: None }
    }

    /// The standard input cannot be read.
    pub fn input(source: io::Error) -> Self {
        Self::system("read the standard input", source)
    }

    /// A thread could not be started.
    pub fn thread(source: io::Error) -> Self {
        Self::system("start a worker thread", source).with_hint("give fewer with `--threads`")
    }

    /// Memory was refused.
    pub fn memory(what: &str, bytes: u64, source: io::Error) -> Self {
        Self::system(format!("get {bytes} bytes of memory for the {what}"), source)
            .with_hint("build with a smaller `max_context` or fewer `decode_batch` slots")
    }

    /// A file does not have the expected content; `what` is a verb phrase.
    pub fn file(path: impl Into<PathBuf>, what: impl Into<String>) -> Self {
        Self::BadFile { path: path.into(), what: what.into(), hint: None }
    }

    /// A file of the bundle has another size than the plan names.
    pub fn wrong_size(path: impl Into<PathBuf>, expected: u64, found: u64) -> Self {
        Self::file(path, format!("has {found} bytes, but the build wrote {expected}")).with_hint(DAMAGED)
    }

    /// A file of the bundle has another SHA-256 than the plan names.
    pub fn changed(path: impl Into<PathBuf>, expected: &[u8; 32], found: &[u8; 32]) -> Self {
        let what = format!("was changed after the build: {}", other_hash(expected, found));
        Self::file(path, what).with_hint(DAMAGED)
    }

    /// A file of the bundle is not in its manifest, and all files were to be checked.
    pub fn unlisted(path: impl Into<PathBuf>) -> Self {
        Self::file(path, "is not in the bundle's manifest: it was added after the build")
            .with_hint("delete the file, or rebuild the bundle with `moec build`")
    }

    /// A file of the bundle is not the one that was opened and checked.
    pub fn replaced(path: impl Into<PathBuf>) -> Self {
        Self::file(path, "was replaced by another file after it was checked")
            .with_hint("run it again when no other program writes to the bundle")
    }

    /// The plan cannot run.
    pub fn plan(why: impl Display) -> Self {
        Self::Bundle(format!("the plan is not valid: {why}"))
    }

    /// The program has no entry point of this kind.
    pub(crate) fn no_entry(kind: &str) -> Self {
        Self::Bundle(format!("the bundle has no {kind} entry point"))
    }

    /// This machine lacks something, or a device of it fails.
    pub fn machine(what: impl Into<String>) -> Self {
        Self::Machine { what: what.into(), hint: None }
    }

    /// The program has steps of a unit that this process does not execute.
    pub(crate) fn no_unit(name: &str) -> Self {
        Self::machine(format!(
            "steps of the bundle run on the unit `{name}`, which this machine does not have"
        ))
        .with_hint(ELSEWHERE)
    }

    /// A unit does not execute a step.
    pub(crate) fn unknown_step(unit: &str, step: usize, builtin: impl Display) -> Self {
        Self::machine(format!("`{unit}` does not execute step {step}, `{builtin}`")).with_hint(ELSEWHERE)
    }

    /// A static graph does not load or run.
    pub fn graph(graph: impl Display, why: impl Display) -> Self {
        Self::machine(format!("graph `{graph}`: {why}")).with_hint(VERIFY)
    }

    /// A kernel does not load or run on an accelerator.
    pub fn kernel(unit: impl Display, kernel: impl Display, why: impl Display) -> Self {
        Self::machine(format!("kernel `{kernel}` on `{unit}`: {why}")).with_hint(VERIFY)
    }

    /// An accelerator cannot be used on this machine.
    pub fn unit(unit: impl Display, why: impl Display) -> Self {
        Self::machine(format!("the unit `{unit}` cannot be used: {why}"))
    }

    /// Arguments that this bundle does not take.
    pub fn usage(what: impl Into<String>) -> Self {
        Self::Usage { what: what.into(), hint: None }
    }

    /// A value out of its range.
    pub fn range(what: &str, range: &str, found: impl Display) -> Self {
        Self::usage(format!("{what} must be {range}, not {found}"))
    }

    /// A token id outside of the vocabulary.
    pub fn bad_id(id: u32, vocab: u32) -> Self {
        Self::usage(format!("token id {id} is outside of the vocabulary of {vocab} tokens"))
            .with_hint(format!("ids are 0 to {}", vocab.saturating_sub(1)))
    }

    /// A prompt without tokens.
    pub(crate) fn empty_prompt() -> Self {
        Self::usage("the prompt is empty").with_hint("give text with `--prompt` or token ids with `--ids`")
    }

    /// Big-little decoding was requested, and the bundle has no little entry points.
    pub fn no_little() -> Self {
        Self::usage("the bundle was built without big-little decoding")
            .with_hint("set `big_little = true` under `[decode]` in `model.toml` and build again")
    }

    /// A request that cannot be answered.
    pub fn request(what: impl Into<String>) -> Self {
        Self::Request { what: what.into(), hint: None }
    }

    /// The prompt is not text.
    pub fn not_utf8() -> Self {
        Self::request("the prompt is not UTF-8")
    }

    /// A KV-cache slot that does not exist.
    pub(crate) fn bad_slot(slot: u32, slots: u32) -> Self {
        Self::request(format!("slot {slot} does not exist: the KV cache holds {slots} sequences"))
    }

    /// A batch names a slot twice.
    pub(crate) fn slot_twice(slot: u32) -> Self {
        Self::request(format!("slot {slot} occurs twice in one batch"))
    }

    /// An answer cannot be constrained to its grammar.
    pub fn constraint(why: impl Display) -> Self {
        Self::request(format!("the answer cannot be constrained to its grammar: {why}"))
            .with_hint("give a smaller grammar, or one with fewer choices at a time")
    }

    /// A request exceeds a limit.
    pub fn limit(limit: Limit, most: usize, what: impl Into<String>) -> Self {
        Self::Limit { limit, most, what: what.into(), hint: None }
    }

    /// A sequence is longer than the KV cache. `what`: subject and verb (`the prompt has`).
    pub(crate) fn context(what: &str, needed: usize, max: usize) -> Self {
        Self::limit(Limit::Context, max, format!("{what} {needed} tokens, but the context holds {max}"))
            .with_hint(
                "shorten the prompt, request fewer tokens with `-n`, or build with a larger `max_context`",
            )
    }

    /// More sequences than the KV cache holds.
    pub(crate) fn few_slots(needed: usize, slots: u32) -> Self {
        let what = format!("{needed} sequences were requested, but the KV cache holds {slots}");
        Self::limit(Limit::Sequences, slots as usize, what).with_hint(format!(
            "name {needed} in `decode_batch` under `[shapes]` in `model.toml`, as in `decode_batch = {}`, and build again",
            batches(needed)
        ))
    }

    /// A sequence would have a hole before `pos`.
    pub(crate) fn gap(slot: u32, pos: usize, len: usize) -> Self {
        let what = format!("position {pos} leaves a hole: slot {slot} holds {len} tokens");
        Self::State { what, hint: None }
    }

    /// The tokenizer failed on a text or on ids.
    pub(crate) fn tokenizer(why: impl Display) -> Self {
        Self::internal(format!("the tokenizer failed: {why}"))
    }

    /// The model computed an invalid result.
    pub(crate) fn model(what: impl Into<String>) -> Self {
        Self::Model { what: what.into(), hint: Some(VERIFY.into()) }
    }

    /// Logits that are not finite.
    pub(crate) fn not_finite() -> Self {
        Self::model("the model computed logits that are NaN or infinite")
    }

    /// A bug of moec.
    pub fn internal(what: impl Into<String>) -> Self {
        Self::Internal(what.into())
    }

    /// The same error with a remedy. Kinds without a remedy stay as they are.
    #[must_use]
    pub fn with_hint(mut self, text: impl Into<Cow<'static, str>>) -> Self {
        if let Some(hint) = self.own_hint_mut() {
            *hint = Some(text.into());
        }
        self
    }

    fn own_hint_mut(&mut self) -> Option<&mut Hint> {
        match self {
            Self::Io { hint, .. }
            | Self::BadFile { hint, .. }
            | Self::Machine { hint, .. }
            | Self::Usage { hint, .. }
            | Self::Request { hint, .. }
            | Self::Limit { hint, .. }
            | Self::State { hint, .. }
            | Self::Model { hint, .. } => Some(hint),
            Self::Output(_)
            | Self::MissingFile(_)
            | Self::Read(_)
            | Self::Bundle(_)
            | Self::Internal(_)
            | Self::Interrupted => None,
        }
    }

    /// Origin of the error.
    pub fn fault(&self) -> Fault {
        match self {
            Self::Output(_)
            | Self::Usage { .. }
            | Self::Request { .. }
            | Self::Limit { limit: Limit::Context | Limit::Sequences | Limit::Queue, .. }
            | Self::State { .. }
            | Self::Interrupted => Fault::Request,
            Self::Read(e) if e.fault.is_of_the_file() => Fault::Bundle,
            Self::MissingFile(_) | Self::BadFile { .. } | Self::Bundle(_) => Fault::Bundle,
            Self::Io { .. }
            | Self::Read(_)
            | Self::Machine { .. }
            | Self::Limit { limit: Limit::Memory, .. } => Fault::Host,
            Self::Model { .. } | Self::Internal(_) => Fault::Moec,
        }
    }

    /// Whether the arguments of a command are wrong: an option or value that this bundle does not accept.
    pub fn is_bad_use(&self) -> bool {
        matches!(self, Self::Usage { .. } | Self::Limit { limit: Limit::Context | Limit::Sequences, .. })
    }

    /// Remedy, if there is one.
    pub fn hint(&self) -> Option<String> {
        match self {
            Self::Io { hint: None, source, .. } => {
                crate::platform::regular::refused(source).map(|why| why.hint().to_owned())
            }
            Self::Io { hint, .. }
            | Self::BadFile { hint, .. }
            | Self::Machine { hint, .. }
            | Self::Usage { hint, .. }
            | Self::Request { hint, .. }
            | Self::Limit { hint, .. }
            | Self::State { hint, .. }
            | Self::Model { hint, .. } => hint.as_deref().map(str::to_owned),
            Self::MissingFile(_) => Some(DAMAGED.to_owned()),
            Self::Read(e) => Some(e.fault.hint().to_owned()),
            Self::Bundle(_) => Some("rebuild the bundle with `moec build`".to_owned()),
            Self::Output(_) | Self::Internal(_) | Self::Interrupted => None,
        }
    }
}

/// File of an operation, in the form that messages append to the operation.
fn of(path: Option<&Path>) -> String {
    path.map_or_else(String::new, |path| format!(" `{}`", path.display()))
}

/// Message about a SHA-256 that is not the expected one.
pub(crate) fn other_hash(expected: &[u8; 32], found: &[u8; 32]) -> String {
    format!("its SHA-256 starts with {}, not with {}", Hex(found), Hex(expected))
}

/// Sizes of `decode_batch` up to `most`: the powers of two, and `most` itself.
fn batches(most: usize) -> String {
    let powers = std::iter::successors(Some(1_usize), |n| n.checked_mul(2)).take_while(|&n| n < most);
    let sizes: Vec<String> = powers.chain([most]).map(|n| n.to_string()).collect();
    format!("[{}]", sizes.join(", "))
}

/// A size as `--budget` accepts it, in MiB with one digit; `up`: rounded up.
pub(crate) fn mib(bytes: u64, up: bool) -> String {
    const TENTH: f64 = (1 << 20) as f64 / 10.0;
    let tenths = bytes as f64 / TENTH;
    let tenths = if up { tenths.ceil() } else { tenths.floor() };
    if tenths < 1.0 { format!("{bytes} bytes") } else { format!("{:.1} MiB", tenths / 10.0) }
}

/// The first eight bytes of a hash, in hexadecimal.
pub(crate) struct Hex<'a>(pub(crate) &'a [u8; 32]);

impl Display for Hex<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().take(8).try_for_each(|b| write!(f, "{b:02x}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A size that is rounded up for a message is at least the size.
    #[test]
    fn suggested_budget_is_sufficient() {
        for least in [1_u64 << 20, (1 << 20) + 1, 27_623_404, (40 << 30) + 12_345] {
            let text = mib(least, true);
            let bytes = text.strip_suffix(" MiB").unwrap().parse::<f64>().unwrap() * f64::from(1 << 20);
            assert!(bytes >= least as f64 && bytes < least as f64 + 2e5, "{text}");
        }
        assert_eq!((mib(3 << 20, false), mib(7, false)), ("3.0 MiB".to_owned(), "7 bytes".to_owned()));
    }
}
