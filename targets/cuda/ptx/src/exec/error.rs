//! Reasons that a kernel cannot start, or stopped.

/// Kind of error that stopped a kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// An access outside of every buffer, or of a block's or a thread's memory.
    OutOfBounds,
    /// An address that is not a multiple of the size of the access.
    Misaligned,
    /// A store to read-only memory.
    ReadOnly,
    /// An unwritten register or unwritten shared memory is read.
    Uninitialised,
    /// Two threads touch the same shared memory, one writes, and no barrier is in between.
    Race,
    /// Threads wait for what never comes.
    Deadlock,
    /// Threads of one warp wait at several barriers, or at one that others never reach.
    DivergentBarrier,
    /// A shuffle or vote with a lane that does not participate.
    InactiveLane,
    /// An operand that the instruction does not take.
    Operand,
    /// `trap`.
    Trap,
    /// More steps than were allowed.
    StepLimit,
}

/// Reason that a kernel stopped, and its place.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "kernel `{kernel}`, line {line}, `{instruction}`, thread {} of block {}: {message}\n  help: {hint}",
    at(thread),
    at(block)
)]
pub struct ExecutionError {
    /// Its kind.
    pub kind: Kind,
    /// The kernel.
    pub kernel: String,
    /// Line of the text, from 1.
    pub line: u32,
    /// The instruction's text.
    pub instruction: String,
    /// The thread in its block: x, y and z.
    pub thread: [u32; 3],
    /// The block in the grid: x, y and z.
    pub block: [u32; 3],
    /// The fault.
    pub message: String,
    /// Remedy.
    pub hint: String,
}

fn at(of: &[u32; 3]) -> String {
    format!("({}, {}, {})", of[0], of[1], of[2])
}

/// Reason that a launch has no result.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum LaunchError {
    /// The launch does not fit the kernel.
    #[error("kernel `{kernel}` cannot start: {message}\n  help: {hint}")]
    Start {
        /// The kernel.
        kernel: String,
        /// The fault.
        message: String,
        /// Remedy.
        hint: String,
    },
    /// The kernel stopped.
    #[error(transparent)]
    Execution(Box<ExecutionError>),
}

/// Error that stopped a warp: its kind, its lane and words. The caller that runs it adds the place.
#[derive(Debug)]
pub(super) struct Stop {
    pub(super) kind: Kind,
    pub(super) lane: u32,
    pub(super) message: String,
    pub(super) hint: &'static str,
}

impl Stop {
    pub(super) fn new(kind: Kind, lane: u32, message: impl Into<String>, hint: &'static str) -> Self {
        Self { kind, lane, message: message.into(), hint }
    }
}
