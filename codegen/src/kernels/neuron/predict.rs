//! What a predictor says of neurons, in front of their gates (PowerInfer-2, §2.2 and §4.1.2): [`moec_ir::Predictor`].
//!
//! The product of a row with a matrix of few rows lies in scratch until the neurons of a work item have met it; without that
//! matrix they meet the row itself. A margin is what makes 0 the border.

use super::numbers::{Row, dot};
use super::{AHEAD, Bundle};
use crate::dsl::{I, Kb, LINE, P};
use crate::kernels::routed::expert;
use crate::spec::{KernelSpec, NEURONS};
use moec_ir::types::Format;

/// Bytes of the product of a row with `right`.
const fn small(rank: usize) -> usize {
    (rank * 4).next_multiple_of(LINE)
}

/// Bytes of scratch of [`write`]: those products of all rows.
pub(in crate::kernels) fn scratch_bytes(rows: usize, rank: Option<usize>) -> usize {
    rank.map_or(0, |rank| rows * small(rank))
}

/// A matrix whose rows are whole cache lines.
struct Matrix<'k> {
    k: &'k Kb<'k>,
    format: Format,
    cols: usize,
    at: P<'k>,
}

impl<'k> Matrix<'k> {
    /// Row `i`.
    fn row(&self, i: I<'k>) -> Row<'k> {
        let pitch = Bundle { format: self.format, hidden: self.cols, sketch: false }.part_bytes();
        Row::part(self.k, self.format, self.cols, self.at.bytes(i * pitch))
    }
}

pub(in crate::kernels) fn write<'k>(k: &'k Kb<'k>, spec: &KernelSpec) {
    let &KernelSpec::NeuronPredict { layout, hidden, inter, rank, format, x_ld } = spec else {
        return k.fail("not a predictor of neurons");
    };
    let (x, dispatch) = (k.arg(0), k.arg(1));
    let second = if rank.is_some() { 3 } else { 2 };
    let [left, margins, h] = [0, 1, 2].map(|i| k.arg(second + i));
    k.tiles_by_expert(inter.div_ceil(NEURONS), |active, [from, end]| {
        let e = expert(dispatch, layout, active);
        let of = |slot: I<'k>| {
            let token = dispatch.words(layout.token()).words(slot).load_int();
            x.words(token * x_ld)
        };
        let product = |slot: I<'k>, rank: usize| k.scratch().bytes((slot - e.first) * small(rank));
        if let Some(rank) = rank {
            let right = Matrix { k, format, cols: hidden, at: k.arg(2).load_address(e.id) };
            k.each(0, rank, 1, |i| {
                let row = right.row(i);
                k.each(e.first, e.end, 1, |slot| {
                    product(slot, rank).words(i).store(dot(k, &row, of(slot), Some(AHEAD)));
                });
            });
        }
        let left = Matrix { k, format, cols: rank.unwrap_or(hidden), at: left.load_address(e.id) };
        let margins = margins.load_address(e.id);
        let last = (end * NEURONS).min(k.i(inter as i64));
        k.each(from * NEURONS, last, 1, |neuron| {
            let (row, margin) = (left.row(neuron), margins.words(neuron).load());
            k.each(e.first, e.end, 1, |slot| {
                let meets = rank.map_or_else(|| of(slot), |rank| product(slot, rank));
                let said = dot(k, &row, meets, Some(AHEAD)) + margin;
                h.words(slot * inter).words(neuron).store(said);
            });
        });
    });
}
