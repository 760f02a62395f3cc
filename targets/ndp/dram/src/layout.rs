//! Order of the lines of a long stream over ranks, bank groups, banks, rows and columns.

use crate::{Address, Geometry, Kind, Request};

/// Parts of a line's number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Axis {
    /// The ranks that hold the stream.
    Rank,
    /// Bank groups.
    Group,
    /// Banks of a bank group.
    Bank,
    /// Rows of a bank.
    Row,
    /// Lines of a row.
    Column,
}

use Axis::*;

/// The axes from the one that changes with every line to the one that changes last.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Layout(pub [Axis; 5]);

impl Layout {
    /// Order of lines in one module for the unit on it: line by line over its ranks, then over bank groups,
    /// along the rows, over banks.
    pub const LOCALIZED: Self = Self([Rank, Group, Column, Bank, Row]);
    /// Order of lines in all DIMMs of a channel for the host: over the bank groups of a rank, then over the
    /// ranks of all DIMMs, along the rows, over banks.
    pub const STRIPED: Self = Self([Group, Rank, Column, Bank, Row]);
    /// Row by row of one bank, bank by bank.
    pub const ROW_MAJOR: Self = Self([Column, Bank, Group, Rank, Row]);

    /// The requests for `lines` lines of a region that starts at row `row` of the ranks from `rank` on.
    /// `geometry.ranks` counts those ranks. What runs past the last row goes on in row 0.
    pub fn requests(
        self,
        kind: Kind,
        geometry: Geometry,
        (rank, row): (u32, u32),
        lines: u64,
    ) -> impl Iterator<Item = Request> {
        let sizes = self.0.map(|axis| match axis {
            Rank => geometry.ranks,
            Group => geometry.groups,
            Bank => geometry.banks,
            Row => geometry.rows,
            Column => geometry.columns,
        });
        let mut place = [0; 5];
        (0..lines).map(move |_| {
            let mut at = Address { rank, group: 0, bank: 0, row: 0, column: 0 };
            for (axis, n) in self.0.iter().zip(place) {
                match axis {
                    Rank => at.rank += n,
                    Group => at.group = n,
                    Bank => at.bank = n,
                    Row => at.row = (row + n) % geometry.rows,
                    Column => at.column = n,
                }
            }
            for (n, size) in place.iter_mut().zip(sizes) {
                *n += 1;
                if *n < size {
                    break;
                }
                *n = 0;
            }
            Request { kind, at }
        })
    }
}
