//! Errors for operations that states cannot do.

use crate::error::{Error, Hint};
use moec_ir::state::StateKind;
use std::fmt;

/// Operation that a state cannot do.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Cannot {
    /// Go back to an earlier position.
    Rewind {
        /// Slot.
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
        /// Slot.
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
        /// Slot.
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
            Self::Draft => f.write_str("take back draft tokens"),
        }
    }
}

impl Cannot {
    /// The error of a state.
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
            Self::Rewind { .. } | Self::Torn { .. } => {
                "give the sequence again from its beginning, or go back to a snapshot"
            }
            Self::Reach { .. } => "give the sequence again from its beginning",
            Self::Fork => "give the sequence to every slot",
            Self::Save => "leave out `--save-prompt` and `--load-prompt`",
            Self::Draft => "leave out `--speculate`",
        }
    }
}
