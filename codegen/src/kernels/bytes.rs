//! Rows of bytes times a panel of codes: integer dot products within a group of 32 channels, joined in f32 by
//! the group's two scales. Where columns have one scale each, it is taken when all groups are joined, and then
//! the outliers of the panel are added.
//!
//! A group of the panel is unpacked into registers once and multiplies every row of a block; the sums of the
//! block wait in scratch, which stays in the first-level cache. So unpacking is paid once per block, and a
//! row costs its dot products and one multiply-add per group and vector. A single row, as in decoding, keeps its sums
//! in registers: its loop has neither branches nor stores, so that a core looks far enough ahead to keep memory busy.
//! A thread of an EPYC (Zen 5) read q8 at 33 GB/s with them, and reads it at 41 without.
//!
//! With I8MM two rows are multiplied by the group at once, in half as many instructions. With AVX2 four rows
//! are, because the group does not fit into its sixteen registers: a vector of weights is loaded once for the
//! four. The sums are the same integers.
//!
//! With VNNI the weights are unsigned: `Σ (code + 128)·x = Σ code·x + 128·Σ x`. The packed row carries
//! `−128·Σ x` of every group, from which the integer sum starts.

use super::fine::Scales;
use super::outliers;
use super::panel::{Panel, fetch, group_bytes, is_nibbles};
use super::quantise::{CORRECTION, ROW_GROUP, SCALE};
use super::unpack::{codes, flipped, from_grid, low_nibbles, scales};
use crate::dsl::{F, I, Kb, LINE, P, Span};
use crate::machine::{ByteDot, Isa};
use crate::schedule::Schedule;
use moec_ir::types::{Coding, Format, GROUP};

/// A row's sum over a group by its correction.
const PER_CORRECTION: f32 = 1.0 / 128.0;

/// Words of four channels in a group.
const QUADS: usize = GROUP / 4;

/// Bytes of scratch.
pub(super) fn scratch_bytes(isa: &Isa, schedule: Schedule) -> usize {
    schedule.block * isa.nr * 4
}

/// As [`super::multiply::multiply`].
pub(super) fn multiply<'k>(
    k: &'k Kb<'k>,
    panel: &Panel<'k>,
    first: I<'k>,
    end: I<'k>,
    row: &dyn Fn(I<'k>) -> P<'k>,
    store: &dyn Fn(I<'k>, [F<'k>; 2]),
) {
    let (nr, lanes) = (k.isa.nr, k.lanes());
    let bytes = group_bytes(panel.format, nr);
    let by_channel = panel.format.is_by_channel();
    let Schedule { block, ahead, .. } = panel.schedule;
    let several = at_once(k.isa.bytes, panel.format);
    let groups = panel.depth.div_ceil(GROUP);
    k.each(first, end, block, |start| {
        let stop = (start + block).min(end);
        let sums = |i: I<'k>| k.scratch().words((i - start) * nr);
        let store_sums = |i: I<'k>, found: [F<'k>; 2]| {
            found.into_iter().enumerate().for_each(|(half, sum)| sums(i).words(half * lanes).store(sum));
        };
        let one = || {
            let row = row(start);
            let found = k.fold(0, groups, 1, &[k.fv(0.0); 2], |index, sums| {
                let group = Group::load(k, panel, index);
                fetch(group.from, bytes, ahead);
                let x = row.bytes(index * ROW_GROUP);
                group.add(x, &dots(k, panel.format, &group.weights, x), [sums[0], sums[1]]).to_vec()
            });
            store_sums(start, [found[0], found[1]]);
        };
        let many = || {
            k.each(start, stop, 1, |i| k.zero(sums(i), nr));
            let prefetcher = Prefetcher::new(k, stop - start, bytes, ahead);
            k.each(0, groups, 1, |index| {
                let group = Group::load(k, panel, index);
                let add = |i: I<'k>, x: P<'k>, found: &[[I<'k>; 2]]| {
                    let before = [0, lanes].map(|c| sums(i).words(c).load_vec(Span::Full));
                    store_sums(i, group.add(x, found, before));
                };
                let x = |i: I<'k>| row(i).bytes(index * ROW_GROUP);
                let mut single = start;
                if several > 1 {
                    // Few rounds: nothing waits for the lines.
                    fetch(group.from, bytes, ahead);
                    single = start + (stop - start).div(k.i(several as i64)) * several;
                    let columns = (k.isa.bytes == ByteDot::Smmla).then(|| columns(k, &group.weights));
                    k.each(start, single, several, |i| {
                        let rows: Vec<P<'k>> = (0..several).map(|j| x(i + j)).collect();
                        let found = match (&columns, rows.as_slice()) {
                            (Some(columns), &[a, b]) => two_rows(k, columns, [a, b]).to_vec(),
                            _ if nibbles(k, panel.format) => nibble_rows(k, panel.format, group.from, &rows),
                            _ => code_rows(k, group.from, &rows),
                        };
                        for (j, (x, found)) in rows.into_iter().zip(found).enumerate() {
                            add(i + j, x, &[found]);
                        }
                    });
                }
                k.each(single, stop, 1, |i| {
                    add(i, x(i), &dots(k, panel.format, &group.weights, x(i)));
                    if several == 1 {
                        prefetcher.next(group.from, i - start);
                    }
                });
            });
        };
        k.branch((stop - start).lt(k.i(2)), one, many);
        if by_channel {
            let scales = [0, lanes].map(|c| weight_scales(k, panel, k.i(0), panel.weights, c).of_run(0));
            k.each(start, stop, 1, |i| {
                for (half, scale) in scales.into_iter().enumerate() {
                    let at = sums(i).words(half * lanes);
                    at.store(at.load_vec(Span::Full) * scale);
                }
            });
            outliers::add(k, panel, [start, stop], row, &sums);
        }
        k.each(start, stop, 1, |i| {
            store(i, [0, lanes].map(|c| sums(i).words(c).load_vec(Span::Full)));
        });
    });
}

/// A group of the panel in registers: its codes, and its scales unless columns have them.
struct Group<'k> {
    k: &'k Kb<'k>,
    format: Format,
    from: P<'k>,
    weights: Vec<[I<'k>; 2]>,
    scales: Option<[Scales<'k>; 2]>,
}

impl<'k> Group<'k> {
    fn load(k: &'k Kb<'k>, panel: &Panel<'k>, index: I<'k>) -> Self {
        let format = panel.format;
        let from = panel.weights.bytes(index * group_bytes(format, k.isa.nr));
        let halves = [0, k.lanes()];
        let weights = (0..QUADS).map(|quad| halves.map(|c| operand(k, format, from, quad, c))).collect();
        let scales =
            (!format.is_by_channel()).then(|| halves.map(|c| weight_scales(k, panel, index, from, c)));
        Self { k, format, from, weights, scales }
    }

    /// Adds to a row's sums what the integer sums of its runs, `found`, stand for.
    fn add(&self, x: P<'k>, found: &[[I<'k>; 2]], mut sums: [F<'k>; 2]) -> [F<'k>; 2] {
        let by = x.bytes(SCALE).load().splat();
        let corrections = corrections(self.k, self.format, x, found.len());
        for (half, sum) in sums.iter_mut().enumerate() {
            for (run, found) in found.iter().enumerate() {
                let by = self.scales.map_or(by, |scales| scales[half].of_run(run) * by);
                *sum = found[half].to_float().fma(by, *sum);
            }
            // Where numbers have minima, times the sum of a row.
            for (run, of_row) in corrections.iter().enumerate() {
                if let Some(of_sum) = self.scales.and_then(|scales| scales[half].of_sum(run)) {
                    *sum = (of_sum * PER_CORRECTION).fma(of_row.to_float() * by, *sum);
                }
            }
        }
        sums
    }
}

/// Prefetches weights that are needed later, some lines after every row that is multiplied by a group.
/// Prefetched all at once, they would fill the core's queue of outstanding lines, and the rows would wait: on
/// Zen 4 eight rows took twice as long. For the same reason the group's own lines come before those that it
/// prefetches.
struct Prefetcher<'k> {
    k: &'k Kb<'k>,
    /// Bytes of a group.
    bytes: usize,
    ahead: usize,
    /// Lines in a round.
    lines: I<'k>,
}

impl<'k> Prefetcher<'k> {
    fn new(k: &'k Kb<'k>, rounds: I<'k>, bytes: usize, ahead: usize) -> Self {
        let lines = (rounds + (bytes.div_ceil(LINE) - 1)).div(rounds.max(k.i(1)));
        Self { k, bytes, ahead, lines }
    }

    /// After a round.
    fn next(&self, group: P<'k>, round: I<'k>) {
        if self.ahead == 0 {
            return;
        }
        let from = round * self.lines;
        let to = (from + self.lines).min(self.k.i(self.bytes.div_ceil(LINE) as i64));
        self.k.each(from, to, 1, |line| group.bytes(line * LINE).beyond(self.ahead).prefetch());
    }
}

/// Rows that are multiplied by a group at once. Planes of bits are not put together again for each row, and
/// sums of several rows are those of whole groups.
const fn at_once(bytes: ByteDot, format: Format) -> usize {
    match bytes {
        _ if format.runs() > 1 => 1,
        ByteDot::Smmla => 2,
        ByteDot::Maddubs if format.spreads_codes() || is_wide(format) => 1,
        ByteDot::Maddubs => 4,
        ByteDot::None | ByteDot::Vnni | ByteDot::Sdot => 1,
    }
}

/// Whether nibbles are multiplied as their codes less the lowest, several words to one widening.
fn nibbles(k: &Kb<'_>, format: Format) -> bool {
    format.coding() == Some(Coding::Nibbles) && k.isa.bytes == ByteDot::Maddubs && !is_wide(format)
}

/// Whether products of nibbles less the lowest do not fit into 16 bits: they are multiplied as signed bytes.
const fn is_wide(format: Format) -> bool {
    matches!(format.coding(), Some(Coding::Nibbles)) && words_to_widening(format) == 0
}

/// One quad of the weights, as the machine wants it.
fn operand<'k>(k: &'k Kb<'k>, format: Format, group: P<'k>, quad: usize, column: usize) -> I<'k> {
    match k.isa.bytes {
        ByteDot::Vnni => flipped(format, group, k.isa.nr, quad, column),
        _ if nibbles(k, format) => above_lowest(format, group, k.isa.nr, quad, column),
        _ => codes(format, group, k.isa.nr, quad, column),
    }
}

/// Lowest code of nibbles, as much as it is below 0.
fn below_zero(format: Format) -> usize {
    format.spec().codes.map_or(0, |codes| usize::from(codes.lowest.unsigned_abs()))
}

/// The codes of one quad of nibbles less the lowest.
fn above_lowest(format: Format, group: P<'_>, nr: usize, quad: usize, column: usize) -> I<'_> {
    if is_nibbles(format) {
        return low_nibbles(group, nr, quad, column);
    }
    from_grid(format, group, nr, quad, column, below_zero(format) as u8)
}

/// Words of codes less the lowest whose products with bytes, added by pairs, stay below 2¹⁵.
const fn words_to_widening(format: Format) -> usize {
    let highest = match &format.spec().codes {
        Some(codes) => codes.highest.abs_diff(codes.lowest) as usize,
        None => 1,
    };
    ((1 << 15) - 1) / (2 * 127 * highest)
}

/// The sum that products of a group begin with where codes are multiplied less the lowest, by the row's correction.
fn start(format: Format, correction: I<'_>) -> I<'_> {
    correction.shr(7) * below_zero(format)
}

fn weight_scales<'k>(
    k: &'k Kb<'k>,
    panel: &Panel<'k>,
    index: I<'k>,
    group: P<'k>,
    column: usize,
) -> Scales<'k> {
    if nibbles(k, panel.format) {
        Scales::new(k, panel, index, group, column)
    } else {
        scales(k, panel, index, group, column)
    }
}

/// The integer sums of one row and group, by runs with a scale of their own.
fn dots<'k>(k: &'k Kb<'k>, format: Format, weights: &[[I<'k>; 2]], x: P<'k>) -> Vec<[I<'k>; 2]> {
    let words: Vec<I<'k>> = (0..QUADS).map(|q| x.words(q).load_word().splat(k.lanes())).collect();
    let correction = || x.bytes(CORRECTION).load_word();
    let start = match k.isa.bytes {
        ByteDot::Vnni => correction().splat(k.lanes()),
        _ if nibbles(k, format) => start(format, correction()).splat(k.lanes()),
        _ => k.i32v(0),
    };
    if nibbles(k, format) {
        let found = [0, 1].map(|half| {
            let terms: Vec<_> = weights.iter().zip(&words).map(|(w, &x)| (w[half], x)).collect();
            terms.chunks(words_to_widening(format)).fold(start, |sum, terms| k.dot_above(sum, terms))
        });
        return vec![found];
    }
    // Two chains: one alone would be twice as long as the machine can look ahead.
    let (w, v) = weights.split_at(QUADS / 2);
    let (x, y) = words.split_at(QUADS / 2);
    let dot = |sum, w, x| {
        let codes = format.spec().codes;
        let any = codes.is_some_and(|c| c.lowest == i8::MIN);
        if any { k.dot_any_bytes(sum, w, x) } else { k.dot_bytes(sum, w, x) }
    };
    let chain = |half: usize, start, w: &[[I<'k>; 2]], x: &[I<'k>]| {
        w.iter().zip(x).fold(start, |sum, (w, &x)| dot(sum, w[half], x))
    };
    if format.runs() == 1 {
        return vec![[0, 1].map(|half| chain(half, start, w, x) + chain(half, k.i32v(0), v, y))];
    }
    let starts = match k.isa.bytes {
        ByteDot::Vnni => corrections_of_runs(k, start, y),
        _ => [start; 2],
    };
    let runs = starts.into_iter().zip([(w, x), (v, y)]);
    runs.map(|(start, (w, x))| [0, 1].map(|half| chain(half, start, w, x))).collect()
}

/// A row's corrections by runs, in every lane, where numbers have minima.
fn corrections<'k>(k: &'k Kb<'k>, format: Format, x: P<'k>, runs: usize) -> Vec<I<'k>> {
    if !format.fine().is_some_and(|fine| fine.minima) {
        return Vec::new();
    }
    let whole = x.bytes(CORRECTION).load_word().splat(k.lanes());
    if runs == 1 {
        return vec![whole];
    }
    let upper: Vec<I<'k>> = (QUADS / 2..QUADS).map(|q| x.words(q).load_word().splat(k.lanes())).collect();
    corrections_of_runs(k, whole, &upper).to_vec()
}

/// The corrections of two runs, by that of both and the words of the upper one.
fn corrections_of_runs<'k>(k: &'k Kb<'k>, whole: I<'k>, upper: &[I<'k>]) -> [I<'k>; 2] {
    // Unsigned 128 or signed −128, as the machine takes weights.
    let all = k.i32v(0x8080_8080_u32.cast_signed());
    let sum = upper.iter().fold(k.i32v(0), |sum, &x| k.dot_any_bytes(sum, all, x));
    let upper = if k.isa.bytes == ByteDot::Vnni { k.i32v(0) - sum } else { sum };
    [whole - upper, upper]
}

/// Four bytes of a row, in every lane.
fn word<'k>(k: &'k Kb<'k>, x: P<'k>, quad: I<'k>) -> I<'k> {
    x.words(quad).load_word().splat(k.lanes())
}

/// The integer sums of some rows and a group of nibbles, as [`dots`] gives them. A loop, because written out the
/// sums would be joined as a tree, for which there are no registers.
fn nibble_rows<'k>(k: &'k Kb<'k>, format: Format, group: P<'k>, x: &[P<'k>]) -> Vec<[I<'k>; 2]> {
    let (nr, lanes) = (k.isa.nr, k.lanes());
    // Sums of 16 bits over the loop, or of 32 bits where a word's products fill 16.
    let all = words_to_widening(format) >= QUADS;
    let widened = |pairs: I<'k>| if all { pairs } else { k.add_pairs(pairs) };
    let none = k.pairs(k.i32v(0), k.i32v(0));
    let sums = k.fold(0, QUADS / 2, 1, &vec![widened(none); 2 * x.len()], |quad, sums| {
        let packed = [0, lanes].map(|c| group.words(quad * nr + c).load_ints());
        let above = |w: I<'k>| {
            let index = w & 0x0f0f_0f0f;
            let grid = format.grid();
            if grid.is_empty() { index } else { index.codes_at(grid, below_zero(format) as u8) }
        };
        let (low, high) = (packed.map(above), packed.map(|w| above(w.shr(4))));
        let rows = x.iter().zip(sums.chunks_exact(2));
        rows.flat_map(|(x, sums)| {
            let (x, y) = (word(k, *x, quad), word(k, *x, quad + QUADS / 2));
            [0, 1].map(|half| sums[half] + widened(k.pairs(low[half], x)) + widened(k.pairs(high[half], y)))
        })
        .collect()
    });
    let rows = x.iter().zip(sums.chunks_exact(2));
    rows.map(|(x, sums)| {
        let start = start(format, x.bytes(CORRECTION).load_word()).splat(lanes);
        [0, 1].map(|half| start + if all { k.add_pairs(sums[half]) } else { sums[half] })
    })
    .collect()
}

/// As [`nibble_rows`], of bytes.
fn code_rows<'k>(k: &'k Kb<'k>, group: P<'k>, x: &[P<'k>]) -> Vec<[I<'k>; 2]> {
    let (nr, lanes) = (k.isa.nr, k.lanes());
    let sums = k.fold(0, QUADS, 1, &vec![k.i32v(0); 2 * x.len()], |quad, sums| {
        let weights = [0, lanes].map(|c| group.words(quad * nr + c).load_ints());
        let magnitudes = weights.map(|w| k.abs_bytes(w));
        let rows = x.iter().zip(sums.chunks_exact(2));
        rows.flat_map(|(x, sums)| {
            let x = word(k, *x, quad);
            let pairs = |half: usize| k.pairs_signed(magnitudes[half], weights[half], x);
            [0, 1].map(|half| sums[half] + k.add_pairs(pairs(half)))
        })
        .collect()
    });
    sums.chunks_exact(2).map(|halves| [halves[0], halves[1]]).collect()
}

/// Lanes of two vectors that are in the lower and the upper halves.
const LOWER: [usize; 4] = [0, 1, 4, 5];
const UPPER: [usize; 4] = [2, 3, 6, 7];

/// Quads of four columns each, rearranged: eight channels of two columns in a vector. By steps of eight
/// channels, then by pairs of columns.
fn columns<'k>(k: &'k Kb<'k>, weights: &[[I<'k>; 2]]) -> Vec<[I<'k>; 4]> {
    let steps = weights.chunks_exact(2);
    steps
        .map(|step| {
            let pair = |half: usize, order| k.arrange(step[0][half], step[1][half], order);
            let (left, right) = ([0, 4, 1, 5], [2, 6, 3, 7]);
            [pair(0, left), pair(0, right), pair(1, left), pair(1, right)]
        })
        .collect()
}

/// The integer sums of two rows and a group.
fn two_rows<'k>(k: &'k Kb<'k>, columns: &[[I<'k>; 4]], x: [P<'k>; 2]) -> [[I<'k>; 2]; 2] {
    let mut sums = [k.i32v(0); 4];
    for (step, columns) in columns.iter().enumerate() {
        // Two steps are a vector of each row.
        let [a, b] = x.map(|x| x.words(step / 2 * 4).load_ints());
        let rows = k.arrange(a, b, if step % 2 == 0 { LOWER } else { UPPER });
        for (sum, &columns) in sums.iter_mut().zip(columns) {
            *sum = k.dot_rows(*sum, rows, columns);
        }
    }
    [LOWER, UPPER].map(|row| [0, 2].map(|c| k.arrange(sums[c], sums[c + 1], row)))
}
