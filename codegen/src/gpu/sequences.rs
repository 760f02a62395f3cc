//! The rows of a call by sequence, for kernels of states that every token changes.

use super::launch::Extent;
use crate::dsl::{I, Kb, P};

/// Most blocks that share the sequences of a call.
const BLOCKS: usize = 64;

/// Rows whose sequences a block takes, of calls with at most `rows`. A batch of decoding has a block for every
/// sequence; of a prompt's blocks one has work.
fn share(rows: usize) -> usize {
    rows.div_ceil(BLOCKS).max(1)
}

/// Blocks along the axis of sequences.
pub(super) fn extent(rows: usize) -> Extent {
    Extent::rows(share(rows))
}

/// Rows of a call, with their positions and slots. Rows without a position are of no sequence.
#[derive(Clone, Copy)]
pub(super) struct Rows<'k> {
    k: &'k Kb<'k>,
    pos: P<'k>,
    slot: P<'k>,
    /// Number of rows.
    pub(super) n: I<'k>,
}

impl<'k> Rows<'k> {
    pub(super) fn new(k: &'k Kb<'k>, [pos, slot]: [P<'k>; 2]) -> Self {
        Self { k, pos, slot, n: k.row_count() }
    }

    /// Whether a row is of a sequence.
    pub(super) fn is_there(&self, row: I<'k>) -> I<'k> {
        self.pos.words(row).load_int().ge(self.k.i(0))
    }

    /// Slot of a row of a sequence.
    pub(super) fn slot(&self, row: I<'k>) -> I<'k> {
        self.slot.words(row).load_int()
    }

    /// Whether a row is of the sequence in a slot.
    pub(super) fn is_of(&self, row: I<'k>, slot: I<'k>) -> I<'k> {
        self.is_there(row).and(self.slot(row).equals(slot))
    }

    /// First row from `row` on of the sequence in a slot; the number of rows if there is none.
    pub(super) fn next(&self, row: I<'k>, slot: I<'k>) -> I<'k> {
        let last = self.n - 1;
        let passed = |at: I<'k>| at.lt(self.n).and(self.is_of(at.min(last), slot).not());
        self.k.fold_while::<I<'k>>(row, &[], |at, _| passed(at), |at, _| (at + 1, Vec::new())).0
    }

    /// Whether no earlier row is of the sequence in a slot.
    fn begins(&self, row: I<'k>, slot: I<'k>) -> I<'k> {
        let k = self.k;
        let passed = |at: I<'k>| at.ge(k.i(1)).and(self.is_of((at - 1).max(k.i(0)), slot).not());
        let before = k.fold_while::<I<'k>>(row, &[], |at, _| passed(at), |at, _| (at - 1, Vec::new())).0;
        before.equals(k.i(0))
    }

    /// `body(first row, slot)` for every sequence of the block, by its index on the axis of [`extent`]; all
    /// threads of the block do the same.
    pub(super) fn sequences(&self, block: I<'k>, rows: usize, body: impl FnOnce(I<'k>, I<'k>)) {
        let (k, share) = (self.k, share(rows));
        let from = block * share;
        k.each(from, (from + share).min(self.n), 1, |row| {
            k.when(self.is_there(row), || {
                let slot = self.slot(row);
                k.when(self.begins(row, slot), || body(row, slot));
            });
        });
    }
}
