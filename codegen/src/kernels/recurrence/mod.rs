//! Kernels that go through the rows of a call in order, since each row changes the state that the next one
//! reads: one file each. Work items are cut by channels and heads alone.

mod chunk;
mod conv;
mod delta;
mod scan;

pub use conv::CausalConv;
pub use delta::{DeltaRule, delta_order};
pub use scan::SelectiveScan;

use crate::dsl::{I, Kb, P};

/// The work items of a kernel on at most `rows` rows: `body(tile, row, slot)` for every row with a position,
/// in order. `[pos, slot]` are operands.
fn in_order<'k>(k: &'k Kb<'k>, rows: usize, [pos, slot]: [P<'k>; 2], body: impl FnOnce(I<'k>, I<'k>, I<'k>)) {
    k.tiles(rows, |tile, first, end| {
        k.each(first, end, 1, |row| {
            k.when(pos.words(row).load_int().ge(k.i(0)), || body(tile, row, slot.words(row).load_int()));
        });
    });
}
