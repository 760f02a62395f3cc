//! Operations that states cannot do: their errors, and the checks of plans for them.

use crate::error::{Error, Hint, Result};
use moec_ir::plan::{GraphDecl, Plan, StateBuf};
use moec_ir::state::StateKind;
use std::fmt;

/// Operation that a state cannot do.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum UnsupportedOperation {
    /// Go back to an earlier position.
    Rewind {
        /// Slot.
        slot: u32,
        /// Tokens in it.
        len: usize,
        /// Tokens that should remain.
        pos: usize,
        /// Positions of the snapshots of the slot, ascending.
        snapshots: Vec<usize>,
        /// Snapshots per slot that the plan has room for.
        room: u32,
    },
    /// Go back to a position whose window a ring has overwritten.
    RewindRing {
        /// Slot.
        slot: u32,
        /// Tokens in it.
        len: usize,
        /// Tokens that should remain.
        pos: usize,
        /// Fewest tokens above 0 that can remain.
        least: usize,
    },
    /// Take a snapshot of a slot: the plan has no room for one.
    Snapshot,
    /// Continue, be copied or kept: a call that changed the slot has ended in an error.
    Dirty {
        /// Slot.
        slot: u32,
    },
    /// Copy a slot to another one: the state is in another unit, which does not give it out.
    Fork,
    /// Be written to a file, or read from one: the state is in another unit.
    Save,
    /// Take several tokens of a sequence in one call, of which some may be taken back.
    Draft,
}

impl fmt::Display for UnsupportedOperation {
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
            Self::RewindRing { slot, len, pos, least } => write!(
                f,
                "rewind slot {slot} from {len} tokens to {pos}: it has overwritten what is seen from there, {least} is the least"
            ),
            Self::Snapshot => f.write_str("keep a snapshot: the plan has no room for one"),
            Self::Dirty { slot } => {
                write!(f, "go on in slot {slot}: a call ended in an error while it changed the state")
            }
            Self::Fork => f.write_str("be copied to another slot: another unit keeps it"),
            Self::Save => f.write_str("be saved: another unit keeps it"),
            Self::Draft => f.write_str("take back draft tokens"),
        }
    }
}

impl UnsupportedOperation {
    /// Error for a state.
    pub(super) fn error(&self, state: &str, kind: StateKind) -> Error {
        let what = format!("state `{state}` ({}) cannot {self}", kind.name());
        let hint: Hint = Some(self.hint().into());
        Error::State { what, hint }
    }

    /// Remedy.
    fn hint(&self) -> &'static str {
        match self {
            Self::Snapshot | Self::Rewind { room: 0, .. } => {
                "give the sequence again from its beginning, or build again: this version of moec gives states room for snapshots"
            }
            Self::Rewind { .. } | Self::Dirty { .. } => {
                "give the sequence again from its beginning, or go back to a snapshot"
            }
            Self::RewindRing { .. } => "give the sequence again from its beginning",
            Self::Fork => "give the sequence to every slot",
            Self::Save => "leave out `--save-prompt` and `--load-prompt`",
            Self::Draft => "leave out `--speculate`",
        }
    }
}

/// State with room for the fewest snapshots, of those that need snapshots to go back.
fn least(plan: &Plan) -> Option<&StateBuf> {
    plan.states.iter().filter(|s| s.kind.needs_snapshots()).min_by_key(|s| s.snapshots)
}

/// Error for a plan, in the name of the state with room for the fewest snapshots.
pub(super) fn refusal(plan: &Plan, operation: UnsupportedOperation) -> Error {
    let (state, kind) = least(plan).map(|s| (s.name.clone(), s.kind)).unwrap_or_default();
    operation.error(&state, kind)
}

/// Refuses a plan whose sequences cannot go back by a token, which decoding a token twice requires.
///
/// # Errors
/// [`Error::State`].
pub(crate) fn check_snapshots(plan: &Plan) -> Result<()> {
    match least(plan) {
        Some(state) if state.snapshots == 0 => Err(refusal(plan, UnsupportedOperation::Snapshot)),
        _ => Ok(()),
    }
}

/// Refuses a plan whose sequences cannot be copied from slot to slot.
///
/// # Errors
/// [`Error::State`], with the name of the static graph, or of the state in another memory.
pub(crate) fn check_fork(plan: &Plan) -> Result<()> {
    check_own(plan, UnsupportedOperation::Fork)
}

/// Refuses a plan with states outside of the CPU's memory: they cannot do this.
///
/// # Errors
/// As [`check_fork`].
pub(super) fn check_own(plan: &Plan, operation: UnsupportedOperation) -> Result<()> {
    let of_graph = |g: &GraphDecl| (format!("{} {}", g.package, g.function), StateKind::Cache);
    let graph = plan.graphs.iter().find(|g| g.stateful).map(of_graph);
    let elsewhere = plan.states.iter().find(|s| s.memory != 0).map(|s| (s.name.clone(), s.kind));
    graph.or(elsewhere).map_or(Ok(()), |(state, kind)| Err(operation.error(&state, kind)))
}

/// Most draft tokens that a call can take and undo: the positions that rings hold beyond their window.
///
/// # Errors
/// [`Error::State`] for a recurrent state without room for a snapshot, or that is in another unit.
pub(crate) fn max_draft_tokens(plan: &Plan) -> Result<usize> {
    check_own(plan, UnsupportedOperation::Draft)?;
    if plan.snapshots_of_slot() == 0 && least(plan).is_some() {
        return Err(refusal(plan, UnsupportedOperation::Draft));
    }
    let room = |s: &StateBuf| match s.kind {
        StateKind::Ring { window } => Some((s.shape[2] as usize).saturating_sub(window as usize)),
        _ => None,
    };
    Ok(plan.states.iter().filter_map(room).min().unwrap_or(usize::MAX))
}
