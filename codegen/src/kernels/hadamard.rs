//! Rotation of heads by a Hadamard matrix, as [`moec_ir::state::rotate`] defines it and in its order of sums.

use crate::dsl::{Kb, P, Span};
use moec_ir::state::rotation_factor;

/// Rotates the `dim` numbers at `x`, a multiple of `block`, in place. A block of 1 changes nothing.
pub(super) fn rotate<'k>(k: &'k Kb<'k>, x: P<'k>, dim: usize, block: usize) {
    if block < 2 {
        return;
    }
    let (lanes, factor) = (k.lanes(), rotation_factor(block));
    // Pairs within a vector.
    k.columns(dim, |c, span| {
        let mut numbers = x.words(c).load_vec(span);
        let mut len = 1;
        while len < block.min(lanes) {
            let order: Vec<usize> = (0..lanes).map(|lane| lane ^ len).collect();
            let is_first = (k.lane_ids() & len).equals(k.i32v(0));
            let signs = is_first.pick(k.fv(1.0), k.fv(-1.0));
            numbers = numbers.fma(signs, numbers.shuffle(numbers, &order));
            len *= 2;
        }
        let numbers = if block <= lanes { numbers * factor } else { numbers };
        x.words(c).store_vec(numbers, span);
    });
    // Pairs of vectors.
    let mut len = lanes;
    while len < block {
        k.each(0, dim, 2 * len, |first| {
            k.each(0, len, lanes, |i| {
                let at = x.words(first + i);
                let [a, b] = [at, at.words(len)].map(|p| p.load_vec(Span::Full));
                let factor = if 2 * len == block { factor } else { 1.0 };
                for (to, value) in [(at, a + b), (at.words(len), a - b)] {
                    to.store(if factor == 1.0 { value } else { value * factor });
                }
            });
        });
        len *= 2;
    }
}
