//! Few rows by rows of a weight: a warp takes some rows of the weight, reads them once, 16 bytes to a lane,
//! and multiplies each by all rows. The cost is reading the weight.
//!
//! Sixteen bytes of codes multiply 16 or 32 numbers of a row, so lanes read the row 64 or 128 bytes apart,
//! which takes a cache line for every lane. Such rows are copied to shared memory, where four words after
//! every group of 32 keep eight lanes in different banks.

use super::weight::{Codes, Part, WeightRow, floats_at_once};
use crate::dsl::{F, HalfType, I, Kb, P, WARP};
use crate::kernels::panel::is_nibbles;
use crate::spec::ComputeType;
use moec_ir::types::{Format, GROUP};

/// Rows that are multiplied: where each begins, all in one format.
pub(super) struct Rows<'a, 'k> {
    pub(super) at: &'a [P<'k>],
    pub(super) compute: ComputeType,
    /// Words that the distances of rows are multiples of.
    pub(super) aligned: usize,
    /// Whether they are held in shared memory, as [`hold`] leaves them.
    pub(super) held: bool,
}

/// Most bytes of shared memory that rows are held in: a multiprocessor has room for several blocks then.
const MOST_HELD: usize = 24 << 10;

/// Words of a row in shared memory.
const fn held_words(cols: usize) -> usize {
    cols / GROUP * (GROUP + 4)
}

/// Bytes of shared memory that hold `rows` rows; 0 if rows are read from global memory.
pub(super) fn held_bytes(format: Format, compute: ComputeType, cols: usize, rows: usize) -> usize {
    let bytes = 4 * rows * held_words(cols);
    let pays = format.is_grouped() && compute == ComputeType::F32 && cols.is_multiple_of(GROUP);
    if pays && bytes <= MOST_HELD { bytes } else { 0 }
}

/// Copies rows of f32 to shared memory, by all threads of the block, once the rows before have been read.
/// Returns the place of each.
pub(super) fn hold<'k>(k: &'k Kb<'k>, rows: &Rows<'_, 'k>, cols: usize, threads: usize) -> Vec<P<'k>> {
    let addresses: Vec<P<'k>> = (0..rows.at.len()).map(|r| k.shared(4 * r * held_words(cols))).collect();
    k.barrier();
    for (&from, &to) in rows.at.iter().zip(&addresses) {
        k.each(k.thread(), cols / 4, threads, |four| {
            let numbers = from.words(four * 4).load_floats(4, floats_at_once(rows.aligned));
            let words: Vec<I<'k>> = numbers.into_iter().map(F::bits).collect();
            to.words(shared_word(four * 4)).store_words(&words);
        });
    }
    k.barrier();
    addresses
}

/// Word of column `c` in a row in shared memory.
fn shared_word(c: I<'_>) -> I<'_> {
    c + c.shr(5) * 4
}

/// Products of every row of the weight by every row, in all lanes: `[weight row][row]`.
pub(super) fn products<'k>(
    k: &'k Kb<'k>,
    weights: &[WeightRow<'k>],
    format: Format,
    cols: usize,
    rows: &Rows<'_, 'k>,
) -> Vec<Vec<F<'k>>> {
    let sums = match rows.compute {
        ComputeType::I8 => by_codes(k, weights, format, cols, rows),
        ComputeType::F32 | ComputeType::Bf16 => by_numbers(k, weights, format, cols, rows),
    };
    let count = rows.at.len().max(1);
    let sums: Vec<F<'k>> = sums.into_iter().map(|sum| sum.warp_sum(WARP)).collect();
    sums.chunks(count).map(<[F<'k>]>::to_vec).collect()
}

fn by_numbers<'k>(
    k: &'k Kb<'k>,
    weights: &[WeightRow<'k>],
    format: Format,
    cols: usize,
    rows: &Rows<'_, 'k>,
) -> Vec<F<'k>> {
    let Some(shape) = weights.first() else { return Vec::new() };
    let (parts, whole) = (shape.parts(), shape.whole());
    let zero = vec![k.f(0.0); weights.len() * rows.at.len()];
    let by_parts = || {
        k.fold(k.lane_index(), parts, WARP, &zero, |part, sums| {
            let mut read: Vec<_> = weights.iter().map(|w| w.part(part)).collect();
            if rows.compute == ComputeType::Bf16 {
                read.iter_mut().for_each(Part::round);
            }
            let Some(runs) = read.first().map(|p| p.runs.iter().map(|(c, run)| (*c, run.len()))) else {
                return sums.to_vec();
            };
            let mut sums = sums.to_vec();
            // One row after the other: registers hold only the part of each that a lane needs.
            for (r, &at) in rows.at.iter().enumerate() {
                let x: Vec<Vec<F<'k>>> = runs.clone().map(|(c, n)| rows.run(at, c, n)).collect();
                for (i, w) in read.iter().enumerate() {
                    let sum = &mut sums[i * rows.at.len() + r];
                    let start = if w.scale.is_some() { k.f(0.0) } else { *sum };
                    let terms = w.runs.iter().zip(&x).flat_map(|((_, w), x)| w.iter().zip(x));
                    let dot = terms.fold(start, |dot, (&w, &x)| w.fma(x, dot));
                    *sum = w.scale.map_or(dot, |scale| scale.fma(dot, *sum));
                }
            }
            sums
        })
    };
    // Rows that are not aligned to words are read number by number.
    let sums = if parts > 0 { by_parts() } else { zero.clone() };
    if whole == cols {
        return sums;
    }
    k.fold(k.lane_index() + whole, cols, WARP, &sums, |c, sums| {
        let xs: Vec<_> = rows.at.iter().map(|&at| rows.one(at, c)).collect();
        let one = |w: &WeightRow<'k>| match rows.compute {
            // Codes become the numbers that they encode, rounded to bf16, as in parts.
            ComputeType::Bf16 if format.is_grouped() => w.one(c).to_bf16().shl(16).as_float(),
            _ => w.one(c),
        };
        let ws = weights.iter().flat_map(|w| std::iter::repeat_n(one(w), xs.len()));
        ws.zip(xs.iter().cycle()).zip(sums).map(|((w, &x), &sum)| w.fma(x, sum)).collect()
    })
}

/// As [`by_numbers`], of codes by codes: integers within a group.
fn by_codes<'k>(
    k: &'k Kb<'k>,
    weights: &[WeightRow<'k>],
    format: Format,
    cols: usize,
    rows: &Rows<'_, 'k>,
) -> Vec<F<'k>> {
    let Some(shape) = weights.first() else { return Vec::new() };
    if shape.whole() != cols {
        k.fail("codes that end within a group, or that are not aligned to words");
    }
    let plain = is_nibbles(format);
    let zero = vec![k.f(0.0); weights.len() * rows.at.len()];
    k.fold(k.lane_index(), shape.parts(), WARP, &zero, |part, sums| {
        let read: Vec<Codes<'k>> = weights.iter().map(|w| w.codes(part)).collect();
        let mut sums = sums.to_vec();
        for (w, own) in read.iter().zip(sums.chunks_mut(rows.at.len())) {
            for (&at, sum) in rows.at.iter().zip(own) {
                // Eight words of codes, the scale, −128 times the sum of the codes.
                let x = at.words(w.group * (GROUP / 4 + 2));
                let start = if plain {
                    // Codes of the weight are stored plus 8.
                    w.first.pick_int(x.words(GROUP / 4 + 1).load_words(1)[0].shr(4), k.i32(0))
                } else {
                    k.i32(0)
                };
                let dot = w.words.iter().fold(start, |dot, &(byte, w)| {
                    dot.dot_of_bytes(w, x.bytes(byte).load_words(1)[0], !plain)
                });
                let scale = w.scale * x.words(GROUP / 4).load();
                *sum = dot.to_float().fma(scale, *sum);
            }
        }
        sums
    })
}

/// Whether rows of a weight are multiplied in that compute type here.
pub(super) fn multiplies(format: Format, compute: ComputeType, cols: usize) -> bool {
    super::weight::by_rows(format)
        && (compute != ComputeType::I8
            || format.is_grouped() && cols.is_multiple_of(GROUP) && format.row_bytes(cols).is_multiple_of(4))
}

impl<'k> Rows<'_, 'k> {
    /// `count` numbers of a row from column `c` on, a multiple of `count`.
    fn run(&self, at: P<'k>, c: I<'k>, count: usize) -> Vec<F<'k>> {
        match self.compute {
            ComputeType::Bf16 => {
                let words = at.bytes(c * 2);
                let once = floats_at_once(self.aligned).min(floats_at_once(count / 2));
                let all = (0..count / 2).step_by(once);
                all.flat_map(|i| words.words(i).load_words(once))
                    .flat_map(|w| w.unpack(HalfType::Bf16))
                    .collect()
            }
            _ => at.words(self.word(c)).load_floats(count, floats_at_once(self.aligned)),
        }
    }

    /// The number of column `c`.
    fn one(&self, at: P<'k>, c: I<'k>) -> F<'k> {
        match self.compute {
            ComputeType::Bf16 => at.bytes(c * 2).load_half().shl(16).as_float(),
            _ => at.words(self.word(c)).load(),
        }
    }

    /// Word of column `c` of a row of f32.
    fn word(&self, c: I<'k>) -> I<'k> {
        if self.held { shared_word(c) } else { c }
    }
}
