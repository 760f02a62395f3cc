//! Geometry of a channel, and the places of lines in it.

use serde::Serialize;

/// The counts of a memory: what an address may name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Geometry {
    /// Channels: data buses of 32 bits that share nothing.
    pub channels: u32,
    /// Ranks of one channel.
    pub ranks: u32,
    /// Bank groups of a rank.
    pub groups: u32,
    /// Banks of a bank group.
    pub banks: u32,
    /// Rows of a bank.
    pub rows: u32,
    /// Lines of 64 bytes in a row.
    pub columns: u32,
}

impl Geometry {
    /// The subchannels of TriMoE's module (Table 1: 128 GB, 4 ranks × 8 bank groups × 4 banks).
    ///
    /// 128 GB are 8 subchannel-ranks of 16 GB: 32 banks of 2^17 rows of 4 KB with four chips of 32 Gb per
    /// rank, or 32 banks of 2^16 rows of 8 KB with eight chips of 16 Gb. Timing depends on neither, so rows
    /// and columns are the larger of both.
    pub const fn trimoe() -> Self {
        Self { channels: 64, ranks: 4, groups: 8, banks: 4, rows: 1 << 17, columns: 128 }
    }

    /// Banks of one rank.
    pub const fn banks_per_rank(&self) -> u32 {
        self.groups * self.banks
    }
}

/// Address of a line of 64 bytes in one channel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize)]
pub struct Address {
    /// Rank of the channel.
    pub rank: u32,
    /// Bank group of the rank.
    pub group: u32,
    /// Bank of the bank group.
    pub bank: u32,
    /// Row of the bank.
    pub row: u32,
    /// Line of the row.
    pub column: u32,
}

/// Whether a line is read or written.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
pub enum Kind {
    /// Read.
    Read,
    /// Written.
    Write,
}

/// One line to be read or written.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Request {
    /// Read or written.
    pub kind: Kind,
    /// Place.
    pub at: Address,
}
