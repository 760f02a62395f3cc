//! Units, their memories, and the contents of each memory.
//!
//! A plan names its units and its memories. Memory 0 is the CPU's; every buffer, state and weight that a unit
//! touches is in the unit's own. A [`Copy`](crate::plan::Builtin::Copy) step moves data from one memory to
//! another.

use crate::cpus::CpuList;
use crate::op::{Attributes, attributes};
use crate::paging::Paging;
use crate::text::ops::{Parsed, Reader, Word, Writer};
use bincode::{Decode, Encode};

/// A unit that executes steps. Unit 0 is the CPU that runs the program.
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
pub struct UnitRef {
    /// Name in the device file.
    pub name: String,
    /// Backend that executes its steps.
    pub backend: String,
    /// Index into [`crate::plan::Plan::memories`]: the memory of everything that it touches.
    pub memory: u32,
    /// Static graphs of one step that it runs at a time, at least 1.
    pub queues: u32,
    /// CPUs that its threads are bound to: those of a NUMA node of the machine that runs the program, whose memory
    /// the unit works in. Empty: any.
    pub cpus: CpuList,
}

impl UnitRef {
    /// The CPU of a plan, whose memory is the first.
    pub fn cpu() -> Self {
        Self {
            name: "cpu".to_owned(),
            backend: "cpu".to_owned(),
            memory: 0,
            queues: 1,
            cpus: CpuList::default(),
        }
    }
}

/// A memory.
#[derive(Clone, Debug, Default, PartialEq, Eq, Encode, Decode)]
pub struct Memory {
    /// Name in the device file.
    pub name: String,
    /// Bytes that the plan may take of it, if the device file says so. The verifier proves that
    /// [`crate::plan::Plan::peak`] is no more.
    pub capacity: Option<u64>,
    /// Bytes of the arena that the buffers of all entry points share.
    pub arena_bytes: u64,
    /// Weights that are brought there before anything runs. Memory 0 has none: there a store serves every
    /// weight that its units read, from files or from disk.
    pub residents: Vec<Resident>,
    /// Experts among them that stay on the disk of the memory's host, where that has a budget: it reads them when its
    /// steps need them. Memory 0 has [`crate::plan::Plan::paging`].
    pub paging: Option<Paging>,
}

attributes! {
    /// Matrices of a segment that a memory holds.
    #[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
    pub struct Resident as "resident" {
        /// Index into [`crate::plan::Plan::segments`].
        pub segment: u32,
        /// Its matrices (experts), ascending; empty: the whole segment in one piece. If the segment has just as
        /// many, it has these alone, in their order.
        pub matrices: Vec<u32>,
    }
}

attributes! {
    /// Two memories between which values are copied, in either direction.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Encode, Decode)]
    pub struct MemoryLink {
        /// One.
        pub from: u32,
        /// The other, the larger index.
        pub to: u32,
    }
}
