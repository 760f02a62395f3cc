//! Many rows by rows of a weight in f32. A block takes 64 rows and 64 rows of the weight through shared
//! memory; a thread computes four by four results. Sums are taken in the order of columns.

use super::weight::WeightRow;
use crate::dsl::{F, I, Kb, P};
use crate::spec::ComputeType;

/// Rows of a block.
pub(super) const ROWS: usize = 64;
/// Rows of the weight of a block.
const COLUMNS: usize = 64;
/// Columns of a step.
const STEP: usize = 16;
/// Rows of each that a thread takes.
const OWN: usize = 4;
/// Threads along either.
const SIDE: usize = 16;
/// Threads.
pub(super) const THREADS: usize = SIDE * SIDE;
/// Words from column to column in shared memory, padding included that keeps columns in different banks.
const PITCH: usize = ROWS + 4;
/// Bytes of shared memory.
pub(super) const SHARED: usize = 2 * STEP * PITCH * 4;

/// Columns of the result of a block.
pub(super) const fn columns(gated: bool) -> usize {
    if gated { COLUMNS / 2 } else { COLUMNS }
}

/// Product of a block, and the use of its result: as [`super::tile::Product`], of rows of any compute type.
pub(super) struct Product<'a, 'k> {
    pub(super) depth: usize,
    pub(super) compute: ComputeType,
    pub(super) gated: bool,
    pub(super) row: &'a dyn Fn(I<'k>) -> P<'k>,
    pub(super) weight: &'a dyn Fn(I<'k>, I<'k>) -> WeightRow<'k>,
    pub(super) finish: &'a dyn Fn(I<'k>, I<'k>, F<'k>, Option<F<'k>>),
}

impl<'k> Product<'_, 'k> {
    /// Does the block's part. All threads must come here.
    pub(super) fn write(&self, k: &'k Kb<'k>) {
        let thread = k.thread();
        let (along, across) = (thread.shr(4), thread & (SIDE - 1));
        let rows: Vec<_> = (0..OWN).map(|i| (self.row)(along + i * SIDE)).collect();
        let weights: Vec<_> = (0..OWN)
            .map(|i| {
                let at = along + i * SIDE;
                if self.gated {
                    // Sixteen of the gate, then the sixteen that are multiplied with them.
                    (self.weight)(at.shr(5) * SIDE + (at & (SIDE - 1)), at.shr(4) & 1)
                } else {
                    (self.weight)(at, k.i(0))
                }
            })
            .collect();
        let (held, held_weights) = (k.shared(0), k.shared(STEP * PITCH * 4));
        let zero = vec![k.f(0.0); OWN * OWN];
        let sums = k.fold(0, self.depth, STEP, &zero, |first, sums| {
            // A thread copies one column of four rows; past the last column there is nothing to add.
            let c = first + across;
            let inside = c.lt(k.i(self.depth as i64));
            let c = c.min(k.i(self.depth as i64 - 1));
            for (i, (row, weight)) in rows.iter().zip(&weights).enumerate() {
                let x = match self.compute {
                    ComputeType::Bf16 => row.bytes(c * 2).load_half().shl(16).as_float(),
                    _ => row.words(c).load(),
                };
                let at = across * PITCH + along + i * SIDE;
                held.words(at).store(inside.pick(x, k.f(0.0)));
                held_weights.words(at).store(inside.pick(weight.one(c), k.f(0.0)));
            }
            k.barrier();
            let mut sums = sums.to_vec();
            for column in 0..STEP {
                let own = |p: P<'k>, from: I<'k>| -> [F<'k>; OWN] {
                    std::array::from_fn(|i| p.words(from + (column * PITCH + i * SIDE)).load())
                };
                let (xs, ws) = (own(held, along), own(held_weights, across));
                for (i, x) in xs.iter().enumerate() {
                    for (j, &w) in ws.iter().enumerate() {
                        sums[i * OWN + j] = x.fma(w, sums[i * OWN + j]);
                    }
                }
            }
            k.barrier();
            sums
        });
        for i in 0..OWN {
            for j in (0..OWN).step_by(1 + usize::from(self.gated)) {
                let row = along + i * SIDE;
                let column = across + if self.gated { j / 2 * SIDE } else { j * SIDE };
                let up = self.gated.then(|| sums[i * OWN + j + 1]);
                (self.finish)(row, column, sums[i * OWN + j], up);
            }
        }
    }
}
