//! Many rows by rows of a weight: a block takes 64 rows and 128 rows of the weight, and products run on
//! tensor cores.
//!
//! Both come through shared memory, a step of 32 columns at a time. While a step is multiplied, the next is
//! copied into the other half of shared memory. Rows and weights of bf16 are copied asynchronously; codes go
//! through registers, in which they become bf16. A number of f16 becomes two of bf16 with the same sum, so
//! its rows are read twice and a step has 16 columns: `[x, x] · [w₁, w₂]`. So weights of bf16 and f16 are
//! multiplied exactly, and codes times scales are rounded to bf16.

use super::weight::WeightRow;
use crate::dsl::{F, HalfType, I, Kb, P, WARP};
use moec_ir::types::Format;

/// Rows of a block.
pub(super) const ROWS: usize = 64;
/// Rows of the weight of a block.
const COLUMNS: usize = 128;
/// Columns of a step: a group of codes.
const STEP: usize = 32;
/// Bytes from row to row of a step: 16 more than a row has, so that eight rows are in different banks.
const PITCH: usize = 2 * STEP + 16;
/// Bytes of a step of both.
const STAGE: usize = (ROWS + COLUMNS) * PITCH;
/// Threads: four warps, each 32 rows by 64.
pub(super) const THREADS: usize = 4 * WARP;
/// Bytes of shared memory.
pub(super) const SHARED: usize = 2 * STAGE;

/// Extents of a fragment: rows, and rows of the weight.
const HIGH: usize = 16;
const WIDE: usize = 8;
/// Fragments of a warp.
const DOWN: usize = 2;
const ACROSS: usize = 8;

/// Columns of the result of a block.
pub(super) const fn columns(gated: bool) -> usize {
    if gated { COLUMNS / 2 } else { COLUMNS }
}

/// Whether a block can multiply rows of bf16, `ld` words apart, by rows of this weight.
pub(super) fn multiplies(format: Format, depth: usize, ld: usize) -> bool {
    let sixteen = ld.is_multiple_of(4) && depth.is_multiple_of(STEP);
    let whole = |unit: usize| format.row_bytes(depth).is_multiple_of(unit);
    sixteen
        && match format {
            Format::Bf16 | Format::F16 => whole(16),
            _ => format.is_grouped() && !format.has_fine_scales() && whole(4),
        }
}

/// Columns of a step that are different ones.
const fn columns_of_step(format: Format) -> usize {
    if matches!(format, Format::F16) { STEP / 2 } else { STEP }
}

/// Product of a block, and the use of its result.
pub(super) struct Product<'a, 'k> {
    pub(super) depth: usize,
    pub(super) format: Format,
    /// Whether fragments of gate and up alternate: 16 rows of the weight are 8 columns of the result.
    pub(super) gated: bool,
    /// Address of a row of the block; of any valid row for one past the end.
    pub(super) row: &'a dyn Fn(I<'k>) -> P<'k>,
    /// The row of the weight for a column of the block's result, of the gate or of its partner. As above.
    pub(super) weight: &'a dyn Fn(I<'k>, I<'k>) -> WeightRow<'k>,
    /// Takes a result: row and column in the block, the sum, and that of the gate's partner.
    pub(super) finish: &'a dyn Fn(I<'k>, I<'k>, F<'k>, Option<F<'k>>),
}

impl<'k> Product<'_, 'k> {
    /// The row of the weight at `at` of the block's.
    fn weight_row(&self, k: &'k Kb<'k>, at: I<'k>) -> WeightRow<'k> {
        if self.gated {
            let column = at.div(k.i(2 * WIDE as i64)) * WIDE + (at & (WIDE - 1));
            (self.weight)(column, at.shr(3) & 1)
        } else {
            (self.weight)(at, k.i(0))
        }
    }

    /// Does the block's part. All threads must come here.
    pub(super) fn write(&self, k: &'k Kb<'k>) {
        let thread = k.thread();
        // Sixteen bytes of four threads are a step of a row.
        let (own_row, piece) = (thread.shr(2), thread & 3);
        let every = THREADS / 4;
        let own = columns_of_step(self.format);
        // Pieces of a row that are different ones.
        let of_row = piece & (own / 8 - 1);
        let rows: Vec<_> =
            (0..ROWS / every).map(|i| (self.row)(own_row + i * every).bytes(of_row * 16)).collect();
        let copies: Vec<_> = if self.format == Format::Bf16 {
            (0..COLUMNS / every).map(|i| self.weight_row(k, own_row + i * every).bytes(piece * 16)).collect()
        } else {
            Vec::new()
        };
        let codes = (self.format != Format::Bf16).then(|| self.weight_row(k, thread));
        let weights_at = |stage: P<'k>, row: I<'k>| stage.bytes(row * PITCH + ROWS * PITCH);
        let copy = |step: I<'k>, stage: P<'k>| {
            for (i, row) in rows.iter().enumerate() {
                let to = stage.bytes((own_row + i * every) * PITCH + piece * 16);
                to.copy_from(row.bytes(step * (2 * own)));
            }
            for (i, row) in copies.iter().enumerate() {
                let to = weights_at(stage, own_row + i * every).bytes(piece * 16);
                to.copy_from(row.bytes(step * (2 * STEP)));
            }
            k.commit_copies();
        };
        let keep = |words: &[I<'k>], stage: P<'k>| {
            let to = weights_at(stage, thread);
            words.chunks(4).enumerate().for_each(|(i, four)| to.bytes(16 * i).store_words(four));
        };
        let read = |step: I<'k>| match codes {
            Some(row) if self.format == Format::F16 => row.sixteen_as_two_bf16(step),
            Some(row) => row.group_as_bf16(step),
            None => Vec::new(),
        };

        let steps = self.depth / own;
        let stage = |step: I<'k>| k.shared((step & 1) * STAGE);
        copy(k.i(0), k.shared(0));
        keep(&read(k.i(0)), k.shared(0));
        let zero = vec![k.f(0.0); DOWN * ACROSS * 4];
        let sums = k.fold(0, steps, 1, &zero, |step, sums| {
            // The copies for this step have arrived, and no thread reads the step before any more.
            k.wait_copies(0);
            k.barrier();
            // The last step is read once more rather than a branch taken.
            let next = (step + 1).min(k.i(steps as i64 - 1));
            let to = stage(step + 1);
            copy(next, to);
            let ahead = read(next);
            let sums = multiply_step(k, stage(step), sums);
            keep(&ahead, to);
            sums
        });
        k.wait_copies(0);
        self.store(k, &sums);
    }

    fn store(&self, k: &'k Kb<'k>, sums: &[F<'k>]) {
        let (down, across) = first_rows(k);
        let (g, t) = (k.lane_index().shr(2), k.lane_index() & 3);
        let at = |i: usize, j: usize, part: usize| sums[(i * ACROSS + j) * 4 + part];
        for i in 0..DOWN {
            for j in (0..ACROSS).step_by(1 + usize::from(self.gated)) {
                for part in 0..4 {
                    let row = down + g + (HIGH * i + part / 2 * 8);
                    let column = if self.gated { across.shr(1) + j / 2 * WIDE } else { across + j * WIDE };
                    let up = self.gated.then(|| at(i, j + 1, part));
                    (self.finish)(row, column + t * 2 + part % 2, at(i, j, part), up);
                }
            }
        }
    }
}

/// First row of the warp in its block, and first row of the weight.
fn first_rows<'k>(k: &'k Kb<'k>) -> (I<'k>, I<'k>) {
    let warp = k.warp_index();
    ((warp & 1) * (DOWN * HIGH), warp.shr(1) * (ACROSS * WIDE))
}

/// Adds the products of a step.
fn multiply_step<'k>(k: &'k Kb<'k>, stage: P<'k>, sums: &[F<'k>]) -> Vec<F<'k>> {
    let (down, across) = first_rows(k);
    let lane = k.lane_index();
    let (row, eighth, half) = (lane & 7, lane.shr(3) & 1, lane.shr(4));
    let mut sums = sums.to_vec();
    for column in (0..STEP).step_by(16) {
        // Of rows the upper eight, then the lower, then both again of the next columns.
        let a: Vec<_> = (0..DOWN)
            .map(|i| {
                let at = (down + row + eighth * 8 + HIGH * i) * PITCH + half * 16;
                stage.bytes(at).bytes(2 * column).load_matrices()
            })
            .collect();
        // Of the weight eight rows of both columns, then the next eight.
        let b: Vec<[I<'k>; 2]> = (0..ACROSS / 2)
            .flat_map(|j| {
                let at = (across + row + half * 8 + 2 * WIDE * j) * PITCH + eighth * 16;
                let [a, b, c, d] = stage.bytes(at + ROWS * PITCH).bytes(2 * column).load_matrices();
                [[a, b], [c, d]]
            })
            .collect();
        for (i, &a) in a.iter().enumerate() {
            for (j, &b) in b.iter().enumerate() {
                let own = &mut sums[(i * ACROSS + j) * 4..][..4];
                let sum = k.multiply_fragments(HalfType::Bf16, a, b, [own[0], own[1], own[2], own[3]]);
                own.copy_from_slice(&sum);
            }
        }
    }
    sums
}
