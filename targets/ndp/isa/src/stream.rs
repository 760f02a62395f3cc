//! A stream: what one DIMM does for one expert.

use crate::geometry::{Geometry, Layout, System};
use crate::op::Op;
use crate::{EVENTS, MAX_NAME};
use std::ops::Range;

/// Header, regions and instructions.
///
/// A stream has two parameters at its start: `n`, the number of tokens of this expert in this step, and
/// `first`, the number of its first slot. Token `t` of them has row `first + t`, and `first + n` is at most
/// [`Self::slots`].
#[derive(Clone, Debug, PartialEq)]
pub struct Stream {
    /// Name in messages: a word of letters, digits, `_` and `.`.
    pub name: String,
    /// The DIMMs of the machine.
    pub system: System,
    /// Number of the DIMM that executes the stream.
    pub dimm: u32,
    /// The DRAM of each DIMM.
    pub geometry: Geometry,
    /// Most tokens of a block, one iteration of the loop.
    pub tokens: u32,
    /// Most slots of what has a row for each token.
    pub slots: u32,
    /// Row sets that its instructions may touch.
    pub regions: Vec<Region>,
    /// Instructions in program order.
    pub code: Vec<Instruction>,
}

/// Allowed accesses of a region.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Access {
    /// Read only.
    Read,
    /// Written, and possibly read.
    Write,
}

impl Access {
    /// Both.
    pub const ALL: [Self; 2] = [Self::Read, Self::Write];

    /// Name in the text form.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Read => "read",
            Self::Write => "write",
        }
    }
}

/// Row sets of the DIMM under a name. Those of a striped region are allocated on every DIMM.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Region {
    /// A word of letters, digits, `_` and `.`.
    pub name: String,
    /// Row sets.
    pub rows: Range<u32>,
    /// Layout of its lines in them.
    pub layout: Layout,
    /// Allowed accesses.
    pub access: Access,
}

impl Region {
    /// Lines of the region: of a striped one, those on all DIMMs. `None` where geometry or system are empty
    /// or too large.
    pub fn lines(&self, geometry: &Geometry, system: &System) -> Option<u64> {
        let rows = u64::from(self.rows.end.saturating_sub(self.rows.start));
        let own = geometry.set_lines()?.checked_mul(rows)?;
        match self.layout {
            Layout::Localized => Some(own),
            Layout::Striped => own.checked_mul(u64::from(system.count()?)),
        }
    }
}

/// One instruction of a stream.
#[derive(Clone, Debug, PartialEq)]
pub struct Instruction {
    /// Operation.
    pub op: Op,
    /// It begins when these have been signalled.
    pub waits: Events,
    /// Event that it signals when it has completed: below [`EVENTS`].
    pub signal: Option<u8>,
}

impl From<Op> for Instruction {
    fn from(op: Op) -> Self {
        Self { op, waits: Events::default(), signal: None }
    }
}

impl Instruction {
    /// The same instruction, waiting for one event more. Numbers past the last event are left out.
    pub fn wait(mut self, event: u8) -> Self {
        self.waits.insert(event);
        self
    }

    /// The same instruction, signalling an event.
    pub fn signal(mut self, event: u8) -> Self {
        self.signal = Some(event);
        self
    }
}

/// A set of events: bit `i` is event `i`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Events(pub u32);

impl Events {
    /// Adds an event; `false` if there is no event of this number.
    pub const fn insert(&mut self, event: u8) -> bool {
        let there_is = event < EVENTS;
        if there_is {
            self.0 |= 1 << event;
        }
        there_is
    }

    /// Whether it has the event.
    pub const fn contains(self, event: u8) -> bool {
        event < EVENTS && self.0 >> event & 1 == 1
    }

    /// Whether it is empty.
    pub const fn is_empty(self) -> bool {
        self.0 == 0
    }

    /// Its events, ascending.
    pub fn iter(self) -> impl Iterator<Item = u8> {
        (0..EVENTS).filter(move |&event| self.contains(event))
    }
}

/// Whether a name has a text form: a word of letters, digits, `_` and `.` that begins with a letter or `_`.
pub(crate) fn is_name(name: &str) -> bool {
    let mut bytes = name.bytes();
    name.len() <= MAX_NAME
        && bytes.next().is_some_and(|b| b.is_ascii_alphabetic() || b == b'_')
        && bytes.all(|b| b.is_ascii_alphanumeric() || matches!(b, b'_' | b'.'))
}
