//! Faults that stop a DIMM's unit.

use moec_ndp_isa::Place;

/// A stream that cannot be executed, or lines that are not there.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum Fault {
    /// A machine without DRAM, or with more than can be numbered.
    #[error("a machine of {0:?} has no DRAM, or more than can be addressed")]
    Dimms(crate::allocation::DimmConfig),
    /// A stream for other DIMMs.
    #[error("stream `{stream}` is for {theirs:?}, but this machine is {ours:?}: emit it again")]
    OtherDimms {
        /// Name of the stream.
        stream: String,
        /// The machine of its header.
        theirs: crate::allocation::DimmConfig,
        /// The machine that was to execute it.
        ours: crate::allocation::DimmConfig,
    },
    /// A stream that the verifier refuses.
    #[error("stream `{stream}`: {what}")]
    Stream {
        /// Name of the stream.
        stream: String,
        /// Message of the verifier.
        what: String,
    },
    /// A DIMM that is not there.
    #[error("there is no DIMM {dimm}: the machine has {count}, from 0")]
    NoDimm {
        /// Requested DIMM.
        dimm: u32,
        /// DIMMs.
        count: u32,
    },
    /// Tokens past the slots that a stream was made for.
    #[error("{n} tokens from slot {first} on are more than the {slots} slots of stream `{stream}`")]
    Slots {
        /// Name of the stream.
        stream: String,
        /// Slot of the first token.
        first: u32,
        /// Tokens.
        n: u32,
        /// Slots of the stream.
        slots: u32,
    },
    /// Lines after the end of their row sets.
    #[error("{lines} lines from line {line} on: rows {}..{} have {room}", .rows.start, .rows.end)]
    Outside {
        /// First line.
        line: u64,
        /// Lines.
        lines: u64,
        /// The row sets.
        rows: std::ops::Range<u32>,
        /// Lines that they have.
        room: u64,
    },
    /// A number of bytes that is not a multiple of lines.
    #[error("{0} bytes are not whole lines of 64")]
    NoLines(usize),
    /// Read of a line that was not written, where that is an error.
    #[error("DIMM {dimm} reads an address that was not written: {place:?}")]
    Unwritten {
        /// The DIMM.
        dimm: u32,
        /// Place.
        place: Place,
    },
    /// Bytes outside of the buffer.
    #[error("instruction {instruction}, `{op}`, reaches outside of the buffer")]
    Buffer {
        /// Its number.
        instruction: usize,
        /// Its name.
        op: &'static str,
    },
}
