//! What can go wrong, whose fault it is and what to do about it.

use moec_ir::plan::{Builtin, StateKind};
use std::fmt;
use std::io;
use std::path::PathBuf;

/// Result of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Whose fault an error is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// The request: an argument out of range, a prompt too long.
    Request,
    /// The bundle: a file missing, short or changed.
    Bundle,
    /// This machine: a processor feature missing, memory refused, a failing disk.
    Host,
    /// moec itself, or a kernel that it generated.
    Moec,
}

/// An error of the runtime.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The operating system refused something.
    #[error("cannot {doing} `{}`: {source}", .path.display())]
    Io {
        /// What was attempted (`read`, `create`).
        doing: &'static str,
        /// On what.
        path: PathBuf,
        /// Why not.
        source: io::Error,
    },
    /// The output cannot be written.
    #[error("cannot write the output: {0}")]
    Output(io::Error),
    /// The standard input cannot be read.
    #[error("cannot read the standard input: {0}")]
    Input(io::Error),
    /// A file of the bundle does not exist.
    #[error("`{}` is missing from the bundle", .0.display())]
    MissingFile(PathBuf),
    /// A file is no saved prompt, or a damaged one.
    #[error("`{}` is no saved prompt that can be used: {why}", .path.display())]
    Saved {
        /// The file.
        path: PathBuf,
        /// Why not.
        why: String,
    },
    /// A prompt was saved with another bundle.
    #[error(
        "`{}` was saved with another bundle: of a plan whose SHA-256 starts with {}, not with {}",
        .path.display(), Hex(.found), Hex(.expected)
    )]
    SavedElsewhere {
        /// The file.
        path: PathBuf,
        /// Hash of this plan.
        expected: [u8; 32],
        /// Hash that the file names.
        found: [u8; 32],
    },
    /// A path of the plan leaves the bundle.
    #[error("the plan names `{0}`, which is not a path inside the bundle")]
    OutsideBundle(String),
    /// A file of the bundle has another size than the plan says.
    #[error("`{}` has {found} bytes, but the build wrote {expected}", .path.display())]
    WrongSize {
        /// The file.
        path: PathBuf,
        /// Size that the plan names.
        expected: u64,
        /// Size of the file.
        found: u64,
    },
    /// A file of the bundle has other content than the plan says.
    #[error("`{}` was changed after the build: its SHA-256 starts with {}, not with {}", .path.display(), Hex(.found), Hex(.expected))]
    Changed {
        /// The file.
        path: PathBuf,
        /// Hash that the plan names.
        expected: [u8; 32],
        /// Hash of the file.
        found: [u8; 32],
    },
    /// A file that the manifest does not list would be read, and all files were to be checked.
    #[error("`{}` is not in the bundle's manifest: it was added after the build", .0.display())]
    Unlisted(PathBuf),
    /// A file of the bundle is another one than the one that was opened and checked.
    #[error("`{}` was replaced by another file after it was checked", .0.display())]
    Replaced(PathBuf),
    /// The bundle's manifest cannot be used.
    #[error("`{}` is no manifest of this bundle: {why}", .path.display())]
    Manifest {
        /// The file.
        path: PathBuf,
        /// Why not.
        why: String,
    },
    /// Memory was refused.
    #[error("cannot get {bytes} bytes of memory for the {what}: {source}")]
    Memory {
        /// What for.
        what: &'static str,
        /// How many.
        bytes: u64,
        /// Why not.
        source: io::Error,
    },
    /// Weights were to lie in memory of our own, and there is too little.
    #[error(
        "a run with weights in memory of its own takes {}, and {} are free: {} are missing",
        mib(*.needed, true), mib(*.available, false), mib(.needed.saturating_sub(*.available), true)
    )]
    NoRoom {
        /// Bytes that the run would take.
        needed: u64,
        /// Bytes that are free.
        available: u64,
    },
    /// What a run may come to need is not free.
    #[error(
        "the KV cache of {sequences} sequences of {tokens} tokens takes {} and activations {}, but {} are free",
        mib(*.kv, true), mib(*.rest, true), mib(*.free, false)
    )]
    NoMemory {
        /// Bytes of the KV cache, and of other states.
        kv: u64,
        /// Bytes of activations and scratch.
        rest: u64,
        /// Bytes that are free.
        free: u64,
        /// Sequences.
        sequences: usize,
        /// Tokens of each at most.
        tokens: usize,
    },
    /// Weights were to lie in memory of our own, and the bundle leaves experts on flash.
    #[error("the bundle has a memory budget, which leaves experts on flash")]
    OwnUnderBudget,
    /// A thread could not be started.
    #[error("cannot start a worker thread: {0}")]
    Thread(io::Error),
    /// An extent of the weights cannot be read from flash.
    #[error(transparent)]
    Flash(Box<crate::offload::flash::ReadError>),
    /// The program has steps of a unit that nothing here executes.
    #[error("steps of the bundle run on the unit `{0}`, which this machine has not")]
    NoUnit(String),
    /// A static graph does not load or run.
    #[error("graph `{graph}`: {why}")]
    Graph {
        /// Package and function.
        graph: String,
        /// What the unit says.
        why: String,
    },
    /// A kernel that a unit beside the processor launches does not load or run.
    #[error("kernel `{kernel}` on `{unit}`: {why}")]
    Launch {
        /// Name of the unit.
        unit: String,
        /// Symbol of the kernel.
        kernel: String,
        /// What the unit says.
        why: String,
    },
    /// A unit beside the processor cannot be used on this machine.
    #[error("the unit `{unit}` cannot be used: {why}")]
    Unit {
        /// Name of the unit.
        unit: String,
        /// Why not.
        why: String,
        /// What to do.
        hint: String,
    },
    /// A library of the system does not do what a unit needs of it.
    #[error("the unit of the family `{family}`: {why}")]
    Library {
        /// Family of the unit.
        family: &'static str,
        /// What the library says, or what is said of it.
        why: String,
        /// What to do.
        hint: String,
    },
    /// io_uring was asked for and is not there.
    #[error("cannot use io_uring: {0}")]
    NoUring(io::Error),
    /// The processor lacks features that the object code uses.
    #[error("this processor lacks {}, which target `{target}` needs", list(.missing))]
    MissingFeatures {
        /// Features not there.
        missing: Vec<String>,
        /// Target of the program.
        target: String,
    },
    /// The program asks for features that the runtime has never heard of.
    #[error("target `{target}` needs {}, which this runtime cannot detect", list(.unknown))]
    UnknownFeatures {
        /// Features not in the table of [`crate::platform::cpu`].
        unknown: Vec<String>,
        /// Target of the program.
        target: String,
    },
    /// The object code is for another architecture or operating system.
    #[error("the bundle was built for `{triple}`, but this machine is {host}")]
    WrongArch {
        /// Triple of the program.
        triple: String,
        /// Architecture and system of this machine.
        host: String,
    },
    /// The plan is not one that can run.
    #[error("the plan is not valid: {0}")]
    Plan(String),
    /// A kernel of the plan is not in the object code.
    #[error("the object code has no kernel `{0}`")]
    NoKernel(String),
    /// What executes the steps does not know a builtin of the plan.
    #[error("`{unit}` does not execute step {step}, `{builtin}`")]
    UnknownStep {
        /// Name of the unit.
        unit: &'static str,
        /// Step in its entry point.
        step: usize,
        /// What it runs.
        builtin: Builtin,
    },
    /// The program has no entry point of the kind asked for.
    #[error("the bundle has no {0} entry point")]
    NoEntry(&'static str),
    /// Big-little decoding was asked for, and no little entry points were compiled.
    #[error("the bundle was built without big-little decoding")]
    NoLittle,
    /// More sequences than the KV cache holds.
    #[error("{needed} sequences were asked for, but the KV cache holds {slots}")]
    FewSlots {
        /// Sequences.
        needed: usize,
        /// Slots.
        slots: u32,
    },
    /// More sequences than may wait.
    #[error("{waiting} sequences wait already")]
    Busy {
        /// Sequences that wait.
        waiting: usize,
    },
    /// Answers that do not depend on what ran before were asked for.
    #[error(
        "experts are assigned to units while the plan runs, so answers depend in their last bits on what ran before"
    )]
    NotExact,
    /// Nothing to work on.
    #[error("the prompt is empty")]
    EmptyPrompt,
    /// A token id outside of the vocabulary.
    #[error("token id {id} is outside of the vocabulary of {vocab} tokens")]
    BadId {
        /// The id.
        id: u32,
        /// Vocabulary size.
        vocab: u32,
    },
    /// A KV-cache slot that is not there.
    #[error("slot {slot} does not exist: the KV cache holds {slots} sequences")]
    BadSlot {
        /// The slot.
        slot: u32,
        /// Slots.
        slots: u32,
    },
    /// A batch names a slot twice.
    #[error("slot {0} is twice in one batch")]
    SlotTwice(u32),
    /// A sequence would have a hole.
    #[error("position {pos} leaves a hole: slot {slot} holds {len} tokens")]
    Gap {
        /// The slot.
        slot: u32,
        /// First position asked for.
        pos: usize,
        /// Tokens in the slot.
        len: usize,
    },
    /// A state cannot do what was asked of it.
    #[error("state `{state}` ({}) cannot {cannot}", .kind.name())]
    State {
        /// Its name.
        state: String,
        /// Its kind.
        kind: StateKind,
        /// What it cannot do.
        cannot: Cannot,
    },
    /// The sequence would be longer than the KV cache.
    #[error("{what} {needed} tokens, but the context holds {max}")]
    Context {
        /// Subject and verb (`the prompt has`).
        what: &'static str,
        /// Tokens needed.
        needed: usize,
        /// Tokens that fit.
        max: usize,
    },
    /// A prompt and what is to follow it are longer than the KV cache.
    #[error("the prompt takes {prompt} tokens and {n} are to follow, but the context holds {max}")]
    Room {
        /// Tokens of the prompt.
        prompt: usize,
        /// Tokens to generate.
        n: usize,
        /// Tokens that fit.
        max: usize,
    },
    /// A router kernel chose an expert that does not exist.
    #[error("a router chose expert {expert} of {experts} (step {step})")]
    BadExpert {
        /// The choice.
        expert: i32,
        /// Experts.
        experts: u32,
        /// Dispatch step.
        step: usize,
    },
    /// A router had too few scores that are numbers.
    #[error("{} cannot choose experts: its scores are not numbers (NaN)", router(*.layer))]
    RouterNan {
        /// Its layer in the model; `None` where the plan does not name it.
        layer: Option<u32>,
    },
    /// Logits without a largest one.
    #[error("the model returned logits that are not numbers")]
    NotFinite,
    /// Every token is forbidden: by biases, or by what an answer must be like.
    #[error("no token may come next: biases or a grammar forbid all of them")]
    NoToken,
    /// What an answer must be like cannot be held.
    #[error("the answer cannot be held to its grammar: {0}")]
    Constraint(String),
    /// A value out of its range.
    #[error("{what} must be {range}, not {found}")]
    Range {
        /// Which (`--temperature`).
        what: &'static str,
        /// The range, in words.
        range: &'static str,
        /// The value.
        found: String,
    },
    /// A memory budget that cannot work.
    #[error("a budget of {} is too small for this bundle: it takes {} or more", mib(*.budget, false), mib(*.least, true))]
    Budget {
        /// Bytes asked for.
        budget: u64,
        /// The fewest that can work.
        least: u64,
    },
    /// More threads than the bundle's memory budget has scratch for.
    #[error("the bundle's memory budget is for {most} threads, not for {found}")]
    Threads {
        /// Threads asked for.
        found: usize,
        /// Threads of the budget.
        most: usize,
    },
    /// An option of experts on flash was given, and the bundle has none there.
    #[error("`{0}` is about experts on flash, and the bundle was built without a memory budget")]
    NoPaging(&'static str),
    /// Text was given or wanted, but the bundle has no tokenizer.
    #[error("the bundle has no tokenizer (`{}`)", .0.display())]
    NoTokenizer(PathBuf),
    /// The tokenizer file cannot be used.
    #[error("cannot use the tokenizer `{}`: {reason}", .path.display())]
    BadTokenizer {
        /// The file.
        path: PathBuf,
        /// Why not.
        reason: String,
    },
    /// The tokenizer failed on a text or on ids.
    #[error("the tokenizer failed: {0}")]
    Tokenizer(String),
    /// The text is not UTF-8.
    #[error("the prompt is not UTF-8")]
    NotUtf8,
    /// A stop was asked for (an interrupt from the keyboard).
    #[error("interrupted")]
    Interrupted,
    /// The caller's own condition ended the work.
    #[error("{0}")]
    Stopped(String),
}

/// What a state cannot do.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Cannot {
    /// Go back to an earlier position.
    Rewind {
        /// The slot.
        slot: u32,
        /// Tokens in it.
        len: usize,
        /// Tokens that were to stay.
        pos: usize,
        /// Positions of the snapshots of the slot, ascending.
        snapshots: Vec<usize>,
        /// Snapshots that the plan gives each slot room for.
        room: u32,
    },
    /// Go back further than what a ring has overwritten.
    Reach {
        /// The slot.
        slot: u32,
        /// Tokens in it.
        len: usize,
        /// Tokens that were to stay.
        pos: usize,
        /// Fewest tokens, but none, that can stay.
        least: usize,
    },
    /// Keep a copy of a slot, to which it could go back: the plan has no room for one.
    Snapshot,
    /// Go on, be copied or kept: a call that changed the slot has ended in an error.
    Torn {
        /// The slot.
        slot: u32,
    },
    /// Copy a slot to another one: another unit keeps it, which does not give it out.
    Fork,
    /// Be written to a file, or read from one: another unit keeps it.
    Save,
    /// Take several tokens of a sequence at once, of which some may be taken back.
    Draft,
}

impl fmt::Display for Cannot {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Rewind { slot, len, pos, snapshots, room } => {
                write!(f, "rewind slot {slot} from {len} tokens to {pos}: ")?;
                match snapshots.as_slice() {
                    [] if *room == 0 => f.write_str("the plan has no room for a snapshot"),
                    [] => f.write_str("there is no snapshot"),
                    [at] => write!(f, "the snapshot is at {at}"),
                    many => write!(f, "snapshots are at {many:?}"),
                }
            }
            Self::Reach { slot, len, pos, least } => write!(
                f,
                "rewind slot {slot} from {len} tokens to {pos}: it has overwritten what is seen from there, {least} is the least"
            ),
            Self::Snapshot => f.write_str("keep a snapshot: the plan has no room for one"),
            Self::Torn { slot } => {
                write!(f, "go on in slot {slot}: a call ended in an error while it changed the state")
            }
            Self::Fork => f.write_str("be copied to another slot: another unit keeps it"),
            Self::Save => f.write_str("be saved: another unit keeps it"),
            Self::Draft => f.write_str("take back tokens that were only guessed"),
        }
    }
}

impl Error {
    /// Whose fault it is.
    pub fn fault(&self) -> Fault {
        match self {
            Self::Flash(e) if e.fault.is_of_the_file() => Fault::Bundle,
            Self::Output(_)
            | Self::Input(_)
            | Self::NoLittle
            | Self::NoPaging(_)
            | Self::OwnUnderBudget
            | Self::Saved { .. }
            | Self::SavedElsewhere { .. }
            | Self::FewSlots { .. }
            | Self::Busy { .. }
            | Self::NotExact
            | Self::EmptyPrompt
            | Self::BadId { .. }
            | Self::BadSlot { .. }
            | Self::SlotTwice(_)
            | Self::Gap { .. }
            | Self::State { .. }
            | Self::Context { .. }
            | Self::Room { .. }
            | Self::NoToken
            | Self::Constraint(_)
            | Self::Range { .. }
            | Self::Threads { .. }
            | Self::Budget { .. }
            | Self::NoTokenizer(_)
            | Self::NotUtf8
            | Self::Interrupted
            | Self::Stopped(_) => Fault::Request,
            Self::MissingFile(_)
            | Self::OutsideBundle(_)
            | Self::WrongSize { .. }
            | Self::Changed { .. }
            | Self::Unlisted(_)
            | Self::Replaced(_)
            | Self::Manifest { .. }
            | Self::NoKernel(_)
            | Self::NoEntry(_)
            | Self::Plan(_)
            | Self::BadTokenizer { .. } => Fault::Bundle,
            Self::Io { .. }
            | Self::Flash(_)
            | Self::NoUring(_)
            | Self::NoUnit(_)
            | Self::Graph { .. }
            | Self::Launch { .. }
            | Self::Unit { .. }
            | Self::Library { .. }
            | Self::UnknownStep { .. }
            | Self::Memory { .. }
            | Self::NoRoom { .. }
            | Self::NoMemory { .. }
            | Self::Thread(_)
            | Self::MissingFeatures { .. }
            | Self::WrongArch { .. } => Fault::Host,
            Self::UnknownFeatures { .. }
            | Self::BadExpert { .. }
            | Self::RouterNan { .. }
            | Self::NotFinite
            | Self::Tokenizer(_) => Fault::Moec,
        }
    }

    /// Whether the arguments of a command are wrong: an option or value that this bundle does not take. Known before any work.
    pub fn is_bad_use(&self) -> bool {
        matches!(
            self,
            Self::Range { .. }
                | Self::NoPaging(_)
                | Self::NoLittle
                | Self::OwnUnderBudget
                | Self::FewSlots { .. }
                | Self::NotExact
                | Self::EmptyPrompt
                | Self::BadId { .. }
                | Self::Context { .. }
                | Self::Room { .. }
                | Self::Threads { .. }
                | Self::Budget { .. }
        )
    }

    /// What to do about it, if there is anything.
    pub fn hint(&self) -> Option<String> {
        let hint = match self {
            Self::MissingFile(_) | Self::WrongSize { .. } | Self::Changed { .. } | Self::Manifest { .. } => {
                "the bundle is damaged or incomplete; copy it again, or rebuild it with `moec build`"
            }
            Self::Flash(e) if e.fault.is_of_the_file() => {
                "the file was changed or damaged after the build; copy the bundle again, or rebuild it with `moec build`"
            }
            Self::Flash(_) => {
                "the disk does not answer as it should; see the system's log, or copy the bundle to another one"
            }
            Self::Unlisted(_) => "delete the file, or rebuild the bundle with `moec build`",
            Self::Replaced(_) => "start again when nothing writes to the bundle any more",
            Self::NoUring(_) => "set `MOEC_FLASH=pread`, or leave it to moec with `auto`",
            Self::OutsideBundle(_) | Self::Plan(_) | Self::NoKernel(_) | Self::NoEntry(_) => {
                "rebuild the bundle with `moec build`"
            }
            Self::BadTokenizer { .. } => {
                "replace the file by the checkpoint's `tokenizer.json`, or give `--ids`"
            }
            Self::WrongArch { triple, .. } if triple.contains("-apple-") => {
                "copy the bundle to a Mac, where `sh runner/build.sh` in it makes `run`; or build for this machine with \
                 `moec build --target native`"
            }
            Self::MissingFeatures { .. } | Self::WrongArch { .. } => {
                "build for this machine with `moec build --target native`, or run the bundle on one that has them"
            }
            Self::UnknownFeatures { .. } => "build the bundle and its runner with the same version of moec",
            Self::Memory { .. } => "build with a smaller `max_context` or fewer `decode_batch` slots",
            Self::NoMemory { .. } => {
                "end other programs or raise the limit of the control group, or build with a smaller `max_context` or a smaller largest \
                 `decode_batch` under `[shapes]` in `model.toml`"
            }
            Self::NoRoom { .. } => {
                "leave it to moec with `--weights auto`, or map them with `--weights mapped`"
            }
            Self::OwnUnderBudget => "give `--no-budget` to hold all weights, or leave out `--weights own`",
            Self::NoUnit(_) | Self::UnknownStep { .. } => {
                "run the bundle on its target, or emulate the unit with `moec run BUNDLE --emulate …`"
            }
            Self::Thread(_) => "give fewer with `--threads`",
            Self::Budget { least, .. } => {
                return Some(format!(
                    "give `--budget {}` or more, or build with a shorter `max_context`; `--no-budget` maps all weights",
                    mib(*least, true).replace(' ', "")
                ));
            }
            Self::NoPaging(_) => "set `budget` under `[memory]` in `model.toml` and build again",
            Self::NoLittle => "set `big_little = true` under `[decode]` in `model.toml` and build again",
            Self::FewSlots { needed, .. } => {
                return Some(format!(
                    "name {needed} in `decode_batch` under `[shapes]` in `model.toml`, as in `decode_batch = {}`, and build again",
                    batches(*needed)
                ));
            }
            Self::State { cannot: Cannot::Snapshot | Cannot::Rewind { room: 0, .. }, .. } => {
                "give the sequence again from its beginning, or build again: this version of moec gives states room for snapshots"
            }
            Self::State { cannot: Cannot::Rewind { .. } | Cannot::Torn { .. }, .. } => {
                "give the sequence again from its beginning, or go back to a snapshot"
            }
            Self::State { cannot: Cannot::Reach { .. }, .. } => "give the sequence again from its beginning",
            Self::State { cannot: Cannot::Fork, .. } => "give the sequence to every slot",
            Self::State { cannot: Cannot::Save, .. } => "leave out `--save-prompt` and `--load-prompt`",
            Self::State { cannot: Cannot::Draft, .. } => "leave out `--speculate`",
            Self::Saved { .. } => "give a file that `--save-prompt` has written, or write it again",
            Self::SavedElsewhere { .. } => {
                "a saved prompt belongs to one build, its weights included; save it again with `--save-prompt`"
            }
            Self::Library { hint, .. } | Self::Unit { hint, .. } => return Some(hint.clone()),
            Self::Busy { .. } => "ask again later, or let more wait",
            Self::NotExact => "leave out `--exact`, or build for a target whose experts have one unit",
            Self::EmptyPrompt => "give text with `--prompt` or token ids with `--ids`",
            Self::BadId { vocab, .. } => return Some(format!("ids are 0 to {}", vocab.saturating_sub(1))),
            Self::Context { .. } => {
                "shorten the prompt, ask for fewer tokens with `-n`, or build with a larger `max_context`"
            }
            Self::Room { prompt, max, .. } => {
                return Some(match max.saturating_sub(*prompt) {
                    0 => "shorten the prompt, or build with a larger `max_context`".to_owned(),
                    left => format!(
                        "up to {left} fit behind this prompt; ask for no more, shorten the prompt, or build with a larger \
                         `max_context`"
                    ),
                });
            }
            Self::Threads { .. } => {
                "ask for fewer, build with more `threads` under `[memory]`, or run with `--no-budget`"
            }
            Self::NoTokenizer(_) => {
                "give token ids with `--ids`, or put the checkpoint's `tokenizer.json` there"
            }
            Self::NoToken => "give fewer biases of −∞, or a grammar that the vocabulary can write",
            Self::Constraint(_) => "give a smaller grammar, or one with fewer choices at a time",
            Self::BadExpert { .. } | Self::NotFinite | Self::Graph { .. } | Self::Launch { .. } => {
                "check the bundle with `moec verify`; if it passes, this is a bug of moec"
            }
            Self::RouterNan { .. } => {
                "numbers before it have overflowed, or weights are NaN: `moec verify` compares the bundle with its checkpoint; with \
                 `activations = \"f32\"` under `[weights]` in `model.toml` fewer overflow"
            }
            Self::Io { source, .. } => {
                return crate::platform::regular::refused(source).map(|why| why.hint().to_owned());
            }
            Self::Output(_)
            | Self::Input(_)
            | Self::BadSlot { .. }
            | Self::SlotTwice(_)
            | Self::Gap { .. }
            | Self::Range { .. }
            | Self::Tokenizer(_)
            | Self::NotUtf8
            | Self::Interrupted
            | Self::Stopped(_) => return None,
        };
        Some(hint.to_owned())
    }
}

/// The router of a layer, in words.
fn router(layer: Option<u32>) -> String {
    layer.map_or_else(|| "a router".to_owned(), |layer| format!("the router of layer {layer}"))
}

/// Sizes of `decode_batch` up to `most`: the powers of two, and `most` itself.
fn batches(most: usize) -> String {
    let powers = std::iter::successors(Some(1_usize), |n| n.checked_mul(2)).take_while(|&n| n < most);
    let sizes: Vec<String> = powers.chain([most]).map(|n| n.to_string()).collect();
    format!("[{}]", sizes.join(", "))
}

/// A size as `--budget` takes it, in MiB with one digit; `up`: never less than it is.
fn mib(bytes: u64, up: bool) -> String {
    const TENTH: f64 = (1 << 20) as f64 / 10.0;
    let tenths = bytes as f64 / TENTH;
    let tenths = if up { tenths.ceil() } else { tenths.floor() };
    if tenths < 1.0 { format!("{bytes} bytes") } else { format!("{:.1} MiB", tenths / 10.0) }
}

/// The first eight bytes of a hash, in hexadecimal.
struct Hex<'a>(&'a [u8; 32]);

impl fmt::Display for Hex<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().take(8).try_for_each(|b| write!(f, "{b:02x}"))
    }
}

/// Names in backticks, joined by commas.
fn list(names: &[String]) -> String {
    names.iter().map(|n| format!("`{n}`")).collect::<Vec<_>>().join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What is said to be enough is enough, as it is said.
    #[test]
    fn a_budget_that_is_said_to_work_does() {
        for least in [1_u64 << 20, (1 << 20) + 1, 27_623_404, (40 << 30) + 12_345] {
            let said = Error::Budget { budget: 3 << 20, least }.to_string();
            let number = said.split("takes ").nth(1).and_then(|s| s.split(' ').next()).unwrap();
            let bytes = number.parse::<f64>().unwrap() * f64::from(1 << 20);
            assert!(bytes >= least as f64 && bytes < least as f64 + 2e5, "{said}");
            assert!(said.starts_with("a budget of 3.0 MiB is too small"), "{said}");
        }
        assert!(Error::Budget { budget: 7, least: 1 << 20 }.to_string().contains("7 bytes"));
    }
}
