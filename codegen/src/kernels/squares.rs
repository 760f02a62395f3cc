//! Rows of bf16 pairs times a panel of bf16 pairs, two rows and two columns at a time (`bfmmla` of NEON).
//!
//! An instruction multiplies four channels of two rows by four of two columns: twice the products of `bfdot`.
//! The sums of two rows and two columns share a vector, and are parted once at the end.

use super::panel::{Panel, fetch};
use crate::dsl::{F, I, Kb, P, Span};
use crate::machine::Isa;
use crate::spec::ComputeType;
use moec_ir::types::Format;

/// Words of pairs that a vector of a row holds: two steps of four channels.
const WORDS: usize = 4;
/// Lanes of two vectors that are in their lower and in their upper halves.
const LOWER: [usize; 4] = [0, 1, 4, 5];
const UPPER: [usize; 4] = [2, 3, 6, 7];

/// Whether such rows and panel are multiplied here.
pub(super) fn supports(isa: &Isa, rows: usize, panel: &Panel<'_>) -> bool {
    let pairs = panel.format == Format::Bf16 && panel.compute == ComputeType::Bf16;
    pairs && isa.squares() && rows.is_multiple_of(2)
}

/// As [`super::micro::product`], of an even number of rows.
pub(super) fn product<'k>(k: &'k Kb<'k>, rows: &[P<'k>], panel: &Panel<'k>) -> Vec<[F<'k>; 2]> {
    let nr = k.isa.nr;
    let words = panel.depth.div_ceil(2);
    let (whole, rest) = (words / WORDS * WORDS, words % WORDS);
    let step = |at: I<'k>, count: usize, sums: &mut [F<'k>]| {
        let span = if count == WORDS { Span::Full } else { k.span(count) };
        let numbers: Vec<I<'k>> = rows.iter().map(|row| row.words(at).load_vec(span).bits()).collect();
        let from = panel.weights.words(at * nr);
        for (half, order) in [LOWER, UPPER].into_iter().enumerate().filter(|(half, _)| 2 * half < count) {
            let columns = columns(k, from, 2 * half, count);
            for (pair, sums) in numbers.chunks_exact(2).zip(sums.chunks_exact_mut(4)) {
                let both = k.arrange(pair[0], pair[1], order);
                for (sum, &columns) in sums.iter_mut().zip(&columns) {
                    *sum = k.dot_squares(*sum, both, columns);
                }
            }
        }
    };
    let mut sums = vec![k.fv(0.0); 2 * rows.len()];
    if whole > 0 {
        sums = k.fold(0, whole, WORDS, &sums, |at, sums| {
            let mut sums = sums.to_vec();
            fetch(panel.weights.words(at * nr), WORDS * 4 * nr, panel.schedule.ahead);
            step(at, WORDS, &mut sums);
            sums
        });
    }
    if rest > 0 {
        step(k.i(whole as i64), rest, &mut sums);
    }
    let row = |sums: &[F<'k>], order| {
        [0, 2].map(|c| k.arrange(sums[c].bits(), sums[c + 1].bits(), order).as_float())
    };
    sums.chunks_exact(4).flat_map(|sums| [row(sums, LOWER), row(sums, UPPER)]).collect()
}

/// Words `word` and `word + 1` of the columns of a panel, two columns in a vector; words from `count` on are
/// zero.
fn columns<'k>(k: &'k Kb<'k>, from: P<'k>, word: usize, count: usize) -> [I<'k>; 4] {
    let load = |word: usize, column: usize| {
        if word < count { from.words(word * k.isa.nr + column).load_ints() } else { k.i32v(0) }
    };
    let [left, right] = [0, k.lanes()].map(|c| [load(word, c), load(word + 1, c)]);
    let two = |[a, b]: [I<'k>; 2], order| k.arrange(a, b, order);
    let (first, last) = ([0, 4, 1, 5], [2, 6, 3, 7]);
    [two(left, first), two(left, last), two(right, first), two(right, last)]
}
