//! One tile of queries over a block of tokens, on tile registers (AMX).
//!
//! A group is 32 queries, as many as two tiles have rows. Panels of keys are panels of 32 tokens, panels of
//! values those of 32 channels, both in pairs of bf16: what [`amx::Sums`] multiplies. Scores are stored by
//! tiles and read by vectors, which leave the weights of the softmax in their place as bf16, the rows of the
//! second product. Results are what its tiles start from.
//!
//! The last group has fewer queries. Its tiles are whole all the same: a row of a tile computes that row's
//! sums alone, and the sums of absent queries are not read.

use super::Call;
use super::tile::Block;
use crate::dsl::{F, I, Kb, P, Span, TILE_ROWS};
use crate::kernels::amx::{self, Sums};
use crate::kernels::cache::BLOCK;

impl<'k> Call<'_, 'k> {
    /// Address of the shapes of tiles, if the kernel uses them.
    pub(super) fn tile_config(&self) -> Option<P<'k>> {
        self.s.on_tiles(&self.k.isa).then(|| self.at(self.scratch.config))
    }

    /// Processes a block of the cache for all `count` queries.
    pub(super) fn process_block_on_tiles(&self, block: &Block<'k>, count: I<'k>, config: P<'k>) {
        let k = self.k;
        k.each(0, count, amx::BLOCK, |first| {
            let len = (count - first).min(k.i(amx::BLOCK as i64));
            let [lowest, last_lowest, highest, least_highest] = self.token_bounds(first, len);
            let nr = k.i(k.isa.nr as i64);
            // Columns of the block, whole panels of them.
            let start = (lowest.max(block.first) - block.first).div(nr) * nr;
            let end = highest.min(block.first + BLOCK) - block.first;
            k.when(start.lt(end), || {
                let end = (end + nr - k.i(1)).div(nr) * nr;
                self.scores_on_tiles(block, [first, len], [start, end], config);
                let whole = last_lowest.lt(block.first + start + 1).and(least_highest.ge(block.first + end));
                k.branch(
                    whole,
                    || self.weights(block, [first, len], [start, end], false),
                    || self.weights(block, [first, len], [start, end], true),
                );
                self.accumulate_pv_on_tiles(block, [first, len], [start, end], config);
            });
        });
    }

    /// First tokens of queries, the lowest and the highest, and ends, the highest and the lowest.
    fn token_bounds(&self, first: I<'k>, len: I<'k>) -> [I<'k>; 4] {
        let (k, s) = (self.k, &self.scratch);
        let (most, none) = (k.i(i64::from(i32::MAX)), k.i(0));
        let found = k.fold(0, len, 1, &[most, none, none, most], |i, found| {
            let lo = self.at(s.firsts).words(first + i).load_int();
            let hi = self.at(s.ends).words(first + i).load_int();
            // A query that attends to nothing begins nowhere.
            let begins = lo.lt(hi).pick_int(lo, most);
            vec![found[0].min(begins), found[1].max(lo), found[2].max(hi), found[3].min(hi)]
        });
        [found[0], found[1], found[2], found[3]]
    }

    /// Runs a product on one or two tiles of rows, as many as `len` queries fill.
    fn product(&self, len: I<'k>, sums: &Sums<'k>) {
        let k = self.k;
        k.branch(k.i(TILE_ROWS as i64).lt(len), || sums.add(k, 2), || sums.add(k, 1));
    }

    fn scores_on_tiles(
        &self,
        block: &Block<'k>,
        [first, len]: [I<'k>; 2],
        [start, end]: [I<'k>; 2],
        config: P<'k>,
    ) {
        let (k, s, nr) = (self.k, &self.scratch, self.k.isa.nr);
        let words = self.s.query_words();
        k.each(start, end, nr, |column| {
            let sums = Sums {
                rows: self.at(s.queries).words(first * s.query),
                row_stride: s.query,
                weights: block.keys.bytes(column.div(k.i(nr as i64)) * block.key_panel),
                steps: k.i((words / amx::STEP) as i64),
                rest: words % amx::STEP,
                at: self.at(s.scores).words(column),
                pitch: s.score,
                fresh: true,
                config,
            };
            self.product(len, &sums);
        });
    }

    /// `output · rescale + Σ weight · value` over columns `start .. end`.
    fn accumulate_pv_on_tiles(
        &self,
        block: &Block<'k>,
        [first, len]: [I<'k>; 2],
        [start, end]: [I<'k>; 2],
        config: P<'k>,
    ) {
        let (k, s, nr) = (self.k, &self.scratch, self.k.isa.nr);
        let outputs = self.at(s.outputs).words(first * s.output);
        k.each(0, len, 1, |i| {
            let rescale = self.at(s.rescales).words(i).load();
            // The maximum grows seldom after the first blocks.
            k.when(k.f(1.0).gt(rescale), || {
                rescale_row(k, outputs.words(i * s.output), rescale.splat(), self.s.d.v_dim);
            });
        });
        let row_of_pairs = 4 * nr;
        k.each(0, self.s.d.v_dim.div_ceil(nr), 1, |panel| {
            let values = block.values.bytes(panel * (row_of_pairs * BLOCK / 2));
            let sums = Sums {
                rows: self.at(s.scores).halves(start),
                row_stride: s.score,
                weights: values.bytes(start.div(k.i(2)) * row_of_pairs),
                steps: (end - start).div(k.i(2 * amx::STEP as i64)),
                rest: 0,
                at: outputs.words(panel * nr),
                pitch: s.output,
                fresh: false,
                config,
            };
            self.product(len, &sums);
        });
    }
}

fn rescale_row<'k>(k: &'k Kb<'k>, row: P<'k>, rescale: F<'k>, count: usize) {
    k.each(0, count.next_multiple_of(k.lanes()), k.lanes(), |c| {
        let at = row.words(c);
        at.store(at.load_vec(Span::Full) * rescale);
    });
}
