//! Rows of bf16 pairs times a panel of bf16 pairs, on tile registers (AMX).
//!
//! A block is 32 rows by the 32 columns of a panel: four tiles of sums, two of rows, two of weights. A step
//! of 32 channels loads four tiles (4 KiB) and multiplies four pairs of them: 65 536 operations, 16 for each
//! byte from a cache. So a core that reads 125 GB/s from its second-level cache multiplies at 2 TFLOP/s. A
//! panel is read from memory once, whatever the number of rows; 64 rows make 64 operations for each of its
//! bytes.
//!
//! Weights need no packing of their own. A row of a panel of pairs is 32 columns of a channel pair, so the
//! two tiles of a step are 16 such rows, 128 bytes apart, at bytes 0 and 64. Rows are used as they were
//! packed; their distance is the stride of a tile.
//!
//! The last block of rows has tiles of fewer rows, which multiply faster in proportion. A rest of channels
//! is a step with shorter tiles: the sums are stored and loaded again around its configuration.
//!
//! Loading and multiplying overlap where one operand comes from the first-level cache, and hardly where both
//! come from the second (`bench/amx.md`). So operands are to be near. Rows come in blocks that the
//! second-level cache holds ([`Schedule::rows`]), and all panels are multiplied by one block before the next.
//! While a panel is multiplied, the next is prefetched to that cache: each step prefetches its share of the
//! lines ([`NextPanel`]), and of the lines that results go to.
//!
//! Panels of a few steps that would stay in the first-level cache gain nothing: storing and loading sums
//! between them costs what is saved.

use super::panel::{Panel, PanelRows, Results};
use crate::dsl::{F, I, Kb, LINE, P, Span, TILE_CONFIG_BYTES, TILE_ROW_BYTES, TILE_ROWS, Tile};
use crate::machine::Isa;
#[cfg(doc)]
use crate::schedule::Schedule;

/// Words of pairs that a tile's row holds: a step.
pub(super) const STEP: usize = TILE_ROW_BYTES / 4;
/// Columns of a tile of sums.
const COLUMNS: usize = TILE_ROW_BYTES / 4;
/// Rows of a block.
pub(super) const BLOCK: usize = 2 * TILE_ROWS;

/// Sums, by row of the block and columns of the panel.
const SUMS: [[Tile; 2]; 2] = [[Tile(0), Tile(1)], [Tile(2), Tile(3)]];
/// Rows.
const A: [Tile; 2] = [Tile(4), Tile(5)];
/// Weights.
const B: [Tile; 2] = [Tile(6), Tile(7)];

/// Bytes of scratch: the sums of a block and a configuration.
pub(super) fn scratch_bytes(isa: &Isa) -> usize {
    BLOCK * isa.nr * 4 + TILE_CONFIG_BYTES
}

/// Steps that are unrolled.
const UNROLL: usize = 4;
/// Bits after the point of a rate.
const PARTS: i64 = 16;
/// Lines that are prefetched together, far from each other.
const STREAMS: usize = 8;

/// As [`super::multiply::multiply`], of a panel of pairs; `rows.row_stride` must be known, and there must be
/// a row.
pub(super) fn multiply<'k>(
    k: &'k Kb<'k>,
    panel: &Panel<'k>,
    rows: &PanelRows<'_, 'k>,
    scratch: P<'k>,
    ahead: NextPanel<'k>,
    store: &dyn Fn(I<'k>, [F<'k>; 2]),
) {
    let [first, end] = rows.range;
    let Some(row_stride) = rows.row_stride else { return k.fail("rows of a tile anywhere") };
    let config = scratch.words(BLOCK * k.isa.nr);
    let job = Job { k, panel, at: rows.at, out: rows.out, row_stride, sums: scratch, config };
    let blocks = (end - first + (BLOCK - 1)).div(k.i(BLOCK as i64));
    let rate = ahead.rate(k, blocks * job.steps().max(1));
    // Many rows of results would push rows and panels out of the second-level cache.
    let past = rows.out.lines.then(|| rows.out.at.begins_line());
    job.shape(k.i(TILE_ROWS as i64), k.i(TILE_ROWS as i64), STEP);
    k.each(first, end, BLOCK, |row| {
        let left = (end - row).min(k.i(BLOCK as i64));
        let before = (row - first).div(k.i(BLOCK as i64)) * job.steps();
        let prefetcher = |step: I<'k>| ahead.prefetch(k, before + step, rate);
        k.branch(
            k.i(TILE_ROWS as i64).lt(left),
            || job.block(row, [k.i(TILE_ROWS as i64), left - TILE_ROWS], 2, &prefetcher),
            || job.block(row, [left, k.i(1)], 1, &prefetcher),
        );
        let results = || {
            k.each(0, left, 1, |i| {
                let at = job.sums.words(i * k.isa.nr);
                store(row + i, [0, COLUMNS].map(|c| at.words(c).load_vec(Span::Full)));
            });
        };
        match past {
            Some(past) => k.branch(past, || k.past_caches(results), results),
            None => results(),
        }
    });
}

/// The panel that is multiplied next, as it is packed.
///
/// It is prefetched in [`STREAMS`] places at once, a line of each in turn. Lines in the order of their
/// addresses wait for each other in memory; lines of different pages do not.
#[derive(Clone, Copy)]
pub(super) struct NextPanel<'k> {
    at: P<'k>,
    /// Lines from one stream to the next.
    lines: usize,
}

impl<'k> NextPanel<'k> {
    /// `bytes` from `at` on, which need not be mapped.
    pub(super) fn of(at: P<'k>, bytes: usize) -> Self {
        Self { at, lines: bytes.div_ceil(LINE * STREAMS) }
    }

    /// Lines of each stream to prefetch in each of `steps` steps, in [`PARTS`]ths.
    fn rate(&self, k: &'k Kb<'k>, steps: I<'k>) -> I<'k> {
        (k.i((self.lines << PARTS) as i64) + steps - k.i(1)).div(steps)
    }

    /// Prefetches the share of a step.
    fn prefetch(&self, k: &'k Kb<'k>, step: I<'k>, rate: I<'k>) {
        let before = |step: I<'k>| (step * rate).shr(PARTS).min(k.i(self.lines as i64));
        k.each(before(step), before(step + 1), 1, |line| {
            let line = self.at.bytes(line * LINE);
            for stream in 0..STREAMS {
                line.beyond(stream * self.lines * LINE).prefetch_far();
            }
        });
    }
}

struct Job<'j, 'k> {
    k: &'k Kb<'k>,
    panel: &'j Panel<'k>,
    at: &'j dyn Fn(I<'k>) -> P<'k>,
    out: Results<'k>,
    /// Words from row to row.
    row_stride: usize,
    /// Scratch: the sums of a block.
    sums: P<'k>,
    config: P<'k>,
}

impl<'k> Job<'_, 'k> {
    /// Words of pairs of a row.
    fn words(&self) -> usize {
        self.panel.depth.div_ceil(2)
    }

    /// Whole steps.
    fn steps(&self) -> usize {
        self.words() / STEP
    }

    /// Bytes from one row of pairs of the panel to the next, and from one row of a block to the next.
    fn pitch(&self) -> usize {
        self.k.isa.nr * 4
    }

    /// Shapes for a block of `a` and `b` rows and steps of `words` pairs.
    fn shape(&self, a: I<'k>, b: I<'k>, words: usize) {
        let (full, deep) = (TILE_ROW_BYTES, self.k.i(words as i64));
        let rows = 4 * words;
        self.k.shape_tiles(
            self.config,
            [(full, a), (full, a), (full, b), (full, b), (rows, a), (rows, b), (full, deep), (full, deep)],
        );
    }

    /// The sums of one or two row tiles, to scratch.
    fn block(&self, row: I<'k>, [a, b]: [I<'k>; 2], tiles: usize, prefetcher: &dyn Fn(I<'k>)) {
        let (k, steps, rest) = (self.k, self.steps(), self.words() % STEP);
        // A rest of channels leaves its own shape behind.
        let full = k.i(TILE_ROWS as i64);
        let other = if tiles == 2 { b.lt(full) } else { a.lt(full) };
        if rest > 0 {
            self.shape(a, b, STEP);
        } else {
            k.when(other, || self.shape(a, b, STEP));
        }
        let each_sum = |body: &dyn Fn(Tile, P<'k>)| {
            for (r, tiles) in SUMS.iter().enumerate().take(tiles) {
                for (c, &tile) in tiles.iter().enumerate() {
                    body(tile, self.sums.words((r * TILE_ROWS) * k.isa.nr + c * COLUMNS));
                }
            }
        };
        each_sum(&|tile, _| k.zero_tile(tile));
        let rows = [0, TILE_ROWS].map(|r| (self.at)(row).words(r * self.row_stride));
        // Results that go to the caches find their lines there; lines after the last row are prefetched, too.
        let (blocks, out) = (steps / UNROLL, self.out.at.words(row * self.out.ld));
        let each = BLOCK.div_ceil(blocks.max(1));
        let step = |step: I<'k>| {
            prefetcher(step);
            self.step(&rows[..tiles], step);
        };
        if blocks > 0 {
            k.each(0, blocks, 1, |block| {
                let out = out.words(block * (each * self.out.ld));
                let bytes = if self.out.lines { 0 } else { self.out.bytes };
                let lines = (0..bytes).step_by(LINE);
                for (row, at) in lines.flat_map(|at| (0..each).map(move |row| (row, at))) {
                    out.beyond(4 * row * self.out.ld + at).prefetch_to_write();
                }
                (0..UNROLL).for_each(|u| step(block * UNROLL + u));
            });
        }
        if steps > blocks * UNROLL {
            k.each(blocks * UNROLL, steps, 1, step);
        }
        if rest > 0 {
            each_sum(&|tile, at| at.store_tile(tile, self.pitch()));
            self.shape(a, b, rest);
            each_sum(&|tile, at| at.load_tile(tile, self.pitch()));
            self.step(&rows[..tiles], k.i(steps as i64));
        }
        each_sum(&|tile, at| at.store_tile(tile, self.pitch()));
    }

    fn step(&self, rows: &[P<'k>], step: I<'k>) {
        let weights = self.panel.weights.bytes(step * (STEP * self.pitch()));
        let rows: Vec<P<'k>> = rows.iter().map(|row| row.words(step * STEP)).collect();
        multiply_step(self.k, &rows, self.row_stride, weights);
    }
}

/// One step of one or two tiles of rows, `row_stride` words from row to row, and of the weights at an
/// address. A load comes directly before the first product that needs it.
fn multiply_step<'k>(k: &'k Kb<'k>, rows: &[P<'k>], row_stride: usize, weights: P<'k>) {
    for (r, row) in rows.iter().enumerate() {
        for (c, b) in B.iter().enumerate() {
            if r == 0 {
                weights.bytes(c * TILE_ROW_BYTES).load_tile(*b, k.isa.nr * 4);
            }
            if c == 0 {
                row.load_tile(A[r], 4 * row_stride);
            }
            k.dot_tiles(SUMS[r][c], A[r], *b);
        }
    }
}

/// Gives every tile its full shape; `config` is scratch for it.
pub(super) fn shape<'k>(k: &'k Kb<'k>, config: P<'k>) {
    shape_steps(k, config, STEP);
}

/// Full tiles, for steps of `words` pairs.
fn shape_steps<'k>(k: &'k Kb<'k>, config: P<'k>, words: usize) {
    let (full, most, deep) = (TILE_ROW_BYTES, k.i(TILE_ROWS as i64), k.i(words as i64));
    let (sums, rows, weights) = ((full, most), (4 * words, most), (full, deep));
    k.shape_tiles(config, [sums, sums, sums, sums, rows, rows, weights, weights]);
}

/// A product of up to 32 rows with 32 columns of weights, added to the sums in memory. Tiles
/// have their full [`shape`] before and after.
pub(super) struct Sums<'k> {
    /// First row of pairs, and words from row to row.
    pub(super) rows: P<'k>,
    pub(super) row_stride: usize,
    /// First row of pairs of the weights, [`Isa::nr`] words each.
    pub(super) weights: P<'k>,
    /// Whole steps.
    pub(super) steps: I<'k>,
    /// Words of pairs after them.
    pub(super) rest: usize,
    /// Sums of the first row, and words from row to row.
    pub(super) at: P<'k>,
    pub(super) pitch: usize,
    /// Whether they start from zero, not from what is there.
    pub(super) fresh: bool,
    /// Scratch for shapes.
    pub(super) config: P<'k>,
}

impl<'k> Sums<'k> {
    /// Computes one or two tiles of rows.
    pub(super) fn add(&self, k: &'k Kb<'k>, tiles: usize) {
        let each = |body: &dyn Fn(Tile, P<'k>)| {
            for (r, tiles) in SUMS.iter().enumerate().take(tiles) {
                for (c, &tile) in tiles.iter().enumerate() {
                    body(tile, self.at.words((r * TILE_ROWS) * self.pitch + c * COLUMNS));
                }
            }
        };
        let load = |tile, at: P<'k>| at.load_tile(tile, 4 * self.pitch);
        let store = |tile, at: P<'k>| at.store_tile(tile, 4 * self.pitch);
        let step = |step: I<'k>| {
            let row = |r: usize| self.rows.words(r * TILE_ROWS * self.row_stride).words(step * STEP);
            let rows: Vec<P<'k>> = (0..tiles).map(row).collect();
            multiply_step(k, &rows, self.row_stride, self.weights.bytes(step * (STEP * 4 * k.isa.nr)));
        };
        if self.fresh {
            each(&|tile, _| k.zero_tile(tile));
        } else {
            each(&load);
        }
        k.each(0, self.steps, 1, step);
        each(&store);
        if self.rest > 0 {
            shape_steps(k, self.config, self.rest);
            each(&load);
            step(self.steps);
            each(&store);
            shape(k, self.config);
        }
    }
}
