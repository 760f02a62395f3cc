//! One tile of queries over the blocks of its tokens.

use super::{Call, LOWEST};
use crate::dsl::{F, I, Kb, P, Span};
use crate::kernels::cache::{self, BLOCK, ValuePanel, Values};
use crate::kernels::micro::{outer, pairs, product, variants, widened};
use crate::kernels::panel::Panel;
use crate::kernels::{hadamard, unpack};
use crate::machine::Isa;
use crate::schedule::Schedule;
use crate::spec::ComputeType;
use moec_ir::types::{Format, GROUP};

/// Steps of a product that are written out. A panel of tokens has a multiple of them.
const UNROLL: usize = 4;
const LOG2_E: f32 = std::f32::consts::LOG2_E;

/// Addresses of the panels of one block.
pub(super) struct Block<'k> {
    /// Its first token.
    pub(super) first: I<'k>,
    /// Panels of keys, the first one's.
    pub(super) keys: P<'k>,
    pub(super) key_panel: usize,
    /// Panels of values.
    pub(super) values: P<'k>,
}

/// Queries that the microkernel takes together.
#[derive(Clone, Copy)]
struct Group<'k> {
    first: I<'k>,
    len: usize,
}

impl<'k> Call<'_, 'k> {
    /// Rows `first .. end`, all of one slot, with the query heads of one key-value head, over one part.
    pub(super) fn tile(&self, first: I<'k>, end: I<'k>, head: I<'k>, part: I<'k>) {
        let k = self.k;
        let shared = self.s.shared();
        let count = if self.s.rows == 1 { k.i(shared as i64) } else { (end - first) * shared };
        let reach = self.start(first, end, head, part);
        let at = self.slot_of(first) * self.s.d.kv_heads + head;
        let size = |values, dim| cache::head_bytes(&k.isa, self.s.cache, values, self.s.ctx, dim);
        let keys = self.keys.bytes(at * size(false, self.s.d.qk_dim));
        let values = self.values.map(|v| v.bytes(at * size(true, self.s.d.v_dim)));
        k.each(reach[0].div(k.i(BLOCK as i64)) * BLOCK, reach[1], BLOCK, |token| {
            let block = self.block(token, reach, keys, values);
            match self.tile_config() {
                Some(config) => self.process_block_on_tiles(&block, count, config),
                None => self.groups(count, |group| self.process_block(&block, group)),
            }
        });
        self.finish(first, end, head, part);
    }

    /// Every query of rows: `body(query, row, query head)`.
    fn each_query(&self, first: I<'k>, end: I<'k>, head: I<'k>, body: impl FnOnce(I<'k>, I<'k>, I<'k>)) {
        let shared = self.s.shared();
        self.k.each(first, end, 1, |row| {
            self.k.each(0, shared, 1, |i| body((row - first) * shared + i, row, head * shared + i));
        });
    }

    /// Packs the queries and sets their ranges; gives the tokens that any of them attends to.
    fn start(&self, first: I<'k>, end: I<'k>, head: I<'k>, part: I<'k>) -> Vec<I<'k>> {
        let (k, s, d) = (self.k, &self.scratch, self.s.d);
        self.each_query(first, end, head, |query, row, head| {
            let from = self.q.words(row * self.s.q_ld + head * d.qk_dim);
            let to = self.at(s.queries).words(query * s.query);
            let rotated = |to: P<'k>| {
                k.copy(from, to, d.qk_dim);
                hadamard::rotate(k, to, d.qk_dim, self.s.rotated[0]);
                to
            };
            match self.s.compute {
                ComputeType::Bf16 if self.s.rotated[0] > 1 => {
                    k.round_row(rotated(self.at(s.query_f32)), to, d.qk_dim);
                }
                ComputeType::Bf16 => k.round_row(from, to, d.qk_dim),
                _ => _ = rotated(to),
            }
            if self.s.direct() {
                k.zero(to.words(d.qk_dim), self.s.query_words() - d.qk_dim);
            }
            let [lo, hi] = self.range(row, part);
            self.at(s.firsts).words(query).store_int(lo.narrow());
            self.at(s.ends).words(query).store_int(hi.narrow());
            // A sink is a key without a value.
            let max = self.sinks.map_or(k.f(LOWEST), |p| p.words(head).load() * LOG2_E);
            self.at(s.maxima).words(query).store(max);
            self.at(s.sums).words(query * k.lanes()).store(k.fv(0.0));
            k.zero(self.at(s.outputs).words(query * s.output), d.v_dim.next_multiple_of(k.isa.nr));
        });
        let none = [k.i(i64::from(i32::MAX)), k.i(0)];
        k.fold(first, end, 1, &none, |row, reach| {
            let [lo, hi] = self.range(row, part);
            let some = lo.lt(hi);
            vec![some.pick_int(lo, none[0]).min(reach[0]), some.pick_int(hi, none[1]).max(reach[1])]
        })
    }

    /// The panels of the block at `token`, brought into their format where they are not.
    fn block(&self, token: I<'k>, reach: Vec<I<'k>>, keys: P<'k>, values: Option<P<'k>>) -> Block<'k> {
        let (k, d, isa, cached) = (self.k, self.s.d, &self.k.isa, self.s.cache);
        let wide = self.s.panels();
        let nr = isa.nr;
        let lo = (reach[0].max(token) - token).div(k.i(nr as i64)) * nr;
        let hi = (reach[1].min(token + BLOCK) - token + (nr - 1)).div(k.i(nr as i64)) * nr;
        let stored = cache::key_panel_bytes(isa, cached, d.qk_dim);
        // The row of the state where the block begins: with a window, blocks go round.
        let around = self.s.ctx.next_multiple_of(BLOCK) as i64;
        let row = if d.window.is_some() { token.rem(k.i(around)) } else { token };
        let mut keys = keys.bytes(row.div(k.i(nr as i64)) * stored);
        let mut key_panel = stored;
        let widen = cached.is_quantised() && !self.s.direct();
        if widen {
            let to = self.at(self.scratch.keys);
            cache::widen_keys(k, [lo, hi], d.qk_dim, (keys, cached), to, wide);
            (keys, key_panel) = (to, cache::wide_panel_bytes(isa, wide, d.qk_dim));
        }
        let at = row.div(k.i(BLOCK as i64)) * cache::value_block_bytes(isa, cached, d.v_dim);
        let own = self.at(self.scratch.values);
        let values = match values.map(|v| v.bytes(at)) {
            Some(values) if widen => {
                cache::widen_values(k, [lo, hi], d.v_dim, (values, cached), own, wide);
                own
            }
            Some(values) => values,
            None => {
                cache::turn_keys(k, [lo, hi], [d.qk_dim, d.v_dim], (keys, key_panel), own, wide);
                own
            }
        };
        Block { first: token, keys, key_panel, values }
    }

    /// Cuts `count` queries, a multiple of those that share a head, into groups.
    fn groups(&self, count: I<'k>, mut body: impl FnMut(Group<'k>)) {
        let (k, shared) = (self.k, self.s.shared());
        let single = self.s.rows == 1;
        let mut first = k.i(0);
        let mut left = shared;
        for m in variants(k.isa.mr) {
            // How many remain after larger groups: exactly `left` of a single row, else any multiple of
            // `shared`.
            let needed = if single { left >= m } else { m <= self.s.queries() && few(&k.isa, m, shared) };
            if !needed {
                continue;
            }
            let stop = if m == 1 { count } else { first + (count - first).div(k.i(m as i64)) * m };
            k.each(first, stop, m, |query| body(Group { first: query, len: m }));
            first = stop;
            left %= m;
        }
    }

    /// Processes a block of the cache for a group of queries.
    fn process_block(&self, block: &Block<'k>, group: Group<'k>) {
        let (k, s, nr) = (self.k, &self.scratch, self.k.isa.nr);
        let ends = [k.i(i64::from(i32::MAX)), k.i(0)];
        let (mut lowest, mut last_lowest) = (ends[0], ends[1]);
        let (mut highest, mut least_highest) = (ends[1], ends[0]);
        for i in 0..group.len {
            let lo = self.at(s.firsts).words(group.first).words(i).load_int();
            let hi = self.at(s.ends).words(group.first).words(i).load_int();
            (lowest, last_lowest) = (lowest.min(lo), last_lowest.max(lo));
            (highest, least_highest) = (highest.max(hi), least_highest.min(hi));
        }
        // Columns of the block, whole panels of them.
        let first = (lowest.max(block.first) - block.first).div(k.i(nr as i64)) * nr;
        let end = highest.min(block.first + BLOCK) - block.first;
        k.when(first.lt(end), || {
            let end = (end + (nr - 1)).div(k.i(nr as i64)) * nr;
            self.scores(block, group, [first, end]);
            let whole = last_lowest.lt(block.first + first + 1).and(least_highest.ge(block.first + end));
            k.branch(
                whole,
                || self.weights(block, [group.first, k.i(group.len as i64)], [first, end], false),
                || self.weights(block, [group.first, k.i(group.len as i64)], [first, end], true),
            );
            self.accumulate_pv(block, group, [first, end]);
        });
    }

    /// Products of the queries with the keys of columns `first .. end`.
    fn scores(&self, block: &Block<'k>, group: Group<'k>, [first, end]: [I<'k>; 2]) {
        let (k, s, nr) = (self.k, &self.scratch, self.k.isa.nr);
        let query = self.at(s.queries).words(group.first * s.query);
        let rows: Vec<P<'k>> = (0..group.len).map(|i| query.words(i * s.query)).collect();
        k.each(first, end, nr, |column| {
            let weights = block.keys.bytes(column.div(k.i(nr as i64)) * block.key_panel);
            let sums = if self.s.direct() {
                grouped(k, &rows, (weights, self.s.cache), self.s.query_words() / GROUP)
            } else {
                let (depth, format, compute) = (self.s.d.qk_dim, self.s.panels(), self.s.compute);
                product(
                    k,
                    &rows,
                    &Panel { weights, depth, format, compute, schedule: Schedule::default(), outliers: None },
                    None,
                )
            };
            for (i, sums) in sums.into_iter().enumerate() {
                let to = self.at(s.scores).words(column).words(i * s.score);
                to.store(sums[0]);
                to.words(k.lanes()).store(sums[1]);
            }
        });
    }

    /// Scores to weights `2^(score − maximum)`, in the compute type of the values; maxima, sums and what is
    /// left of earlier results, of `len` queries from `queries` on. `masked`: a query may not attend to all
    /// of the columns.
    pub(super) fn weights(
        &self,
        block: &Block<'k>,
        [queries, len]: [I<'k>; 2],
        [first, end]: [I<'k>; 2],
        masked: bool,
    ) {
        let (k, s, lanes, nr) = (self.k, &self.scratch, self.k.lanes(), self.k.isa.nr);
        let rough = self.s.compute == ComputeType::Bf16;
        let factor = self.s.d.scale * LOG2_E;
        k.each(0, len, 1, |i| {
            let query = queries + i;
            let row = self.at(s.scores).words(i * s.score);
            let border = |at: usize| {
                let at = self.at(at).words(query).load_int() - block.first;
                at.narrow().splat(lanes)
            };
            let range = masked.then(|| [border(s.firsts), border(s.ends)]);
            let visible = |column: I<'k>| {
                range.map(|[lo, hi]| {
                    let ids = k.lane_ids() + column.narrow().splat(lanes);
                    ids.ge(lo).and(ids.lt(hi))
                })
            };
            let low = k.fv(f32::NEG_INFINITY);
            let tops = k.fold(first, end, nr, &[low; 2], |column, tops| {
                let top = |(u, &top): (usize, &F<'k>)| {
                    let column = column + u * lanes;
                    let score = row.words(column).load_vec(Span::Full);
                    let score = visible(column).map_or(score, |visible| visible.pick(score, low));
                    top.max(score)
                };
                tops.iter().enumerate().map(top).collect()
            });
            let before = self.at(s.maxima).words(query).load();
            let top = tops[0].max(tops[1]).lanes_max() * factor;
            let max = before.max(top);
            self.at(s.maxima).words(query).store(max);
            let rescale = (before - max).splat().exp2_down(false);
            self.at(s.rescales).words(i).store(rescale.lane(0));
            let below = -max.splat();
            let sums = k.fold(first, end, nr, &[k.fv(0.0); 2], |column, sums| {
                let weight = |(u, &sum): (usize, &F<'k>)| {
                    let column = column + u * lanes;
                    let score = row.words(column).load_vec(Span::Full);
                    let weight = score.fma(k.f(factor), below).exp2_down(rough);
                    // Columns that a query does not attend to count nothing, whatever they hold.
                    let weight = visible(column).map_or(weight, |visible| visible.pick(weight, k.fv(0.0)));
                    match self.s.compute {
                        ComputeType::Bf16 => row.halves(column).store_bf16(weight, Span::Full),
                        _ => row.words(column).store(weight),
                    }
                    sum + weight
                };
                sums.iter().enumerate().map(weight).collect()
            });
            let at = self.at(s.sums).words(query * lanes);
            at.store(at.load_vec(Span::Full).fma(rescale, sums[0] + sums[1]));
        });
    }

    /// `output · rescale + Σ weight · value` over columns `first .. end`, panel by panel of value channels.
    fn accumulate_pv(&self, block: &Block<'k>, group: Group<'k>, [first, end]: [I<'k>; 2]) {
        let (k, s, nr, lanes) = (self.k, &self.scratch, self.k.isa.nr, self.k.lanes());
        let (format, direct) = (self.s.panels(), self.s.direct());
        let weights = match self.s.compute {
            ComputeType::Bf16 => self.at(s.scores).halves(first),
            _ if direct => self.at(s.scaled).words(first),
            _ => self.at(s.scores).words(first),
        };
        let rows: Vec<P<'k>> = (0..group.len).map(|i| weights.words(i * s.score)).collect();
        let size = format.bytes(nr);
        let stored = Values::of(k, self.s.cache, self.s.d.v_dim, block.values);
        let outputs = self.at(s.outputs).words(group.first * s.output);
        k.each(0, self.s.d.v_dim.div_ceil(nr), 1, |panel| {
            if direct {
                self.scale(block, group, [first, end], panel);
            }
            let output = |i: usize, half: usize| outputs.words(panel * nr).words(i * s.output + half * lanes);
            let sums = (0..group.len)
                .flat_map(|i| {
                    let rescale = self.at(s.rescales).words(i).load().splat();
                    [0, 1].map(|half| output(i, half).load_vec(Span::Full) * rescale)
                })
                .collect();
            let sums = if direct {
                let codes = of_values(k, &rows, stored.panel(k, panel), first);
                accumulate(k, rows.len(), end - first, sums, &codes)
            } else {
                let from = block.values.bytes(first * size).bytes(panel * (size * BLOCK));
                let steps = if format == Format::Bf16 { (end - first).div(k.i(2)) } else { end - first };
                accumulate(k, rows.len(), steps, sums, &numbers(k, &rows, from, format, self.s.compute))
            };
            for (at, sum) in sums.into_iter().enumerate() {
                output(at / 2, at % 2).store(sum);
            }
        });
    }

    /// Weights of columns `first .. end` times the scales that the values of a panel have there.
    fn scale(&self, block: &Block<'k>, group: Group<'k>, [first, end]: [I<'k>; 2], panel: I<'k>) {
        let (k, s, nr, lanes) = (self.k, &self.scratch, self.k.isa.nr, self.k.lanes());
        let scales = Values::of(k, self.s.cache, self.s.d.v_dim, block.values).scales;
        let scales = scales.halves((panel * nr).div(k.i(GROUP as i64)) * BLOCK);
        let fill = || {
            k.each(first, end, lanes, |column| {
                let scale = scales.halves(column).load_halves().shl(16).as_float();
                for i in 0..group.len {
                    let at = |row: usize| self.at(row).words(column).words(i * s.score);
                    at(s.scaled).store(at(s.scores).load_vec(Span::Full) * scale);
                }
            });
        };
        if nr < GROUP {
            // Panels of one group follow each other.
            k.when((panel * nr).rem(k.i(GROUP as i64)).equals(k.i(0)), fill);
        } else {
            fill();
        }
    }

    /// Results of the queries, or of their parts.
    fn finish(&self, first: I<'k>, end: I<'k>, head: I<'k>, part: I<'k>) {
        let (k, s, d) = (self.k, &self.scratch, self.s.d);
        self.each_query(first, end, head, |query, row, head| {
            let from = self.at(s.outputs).words(query * s.output);
            hadamard::rotate(k, from, d.v_dim, self.s.rotated[1]);
            let max = self.at(s.maxima).words(query).load();
            let sum = self.at(s.sums).words(query * k.lanes()).load_vec(Span::Full).sum();
            let out = self.out.words(row * self.s.out_ld);
            if self.s.splits > 1 {
                let to = out.words((head * self.s.splits + part) * self.s.part_words());
                to.store(max);
                to.words(1).store(sum);
                return k.copy(from, to.words(2), d.v_dim);
            }
            let sum = match self.sinks {
                Some(p) => sum + (p.words(head).load() * LOG2_E - max).splat().exp2_down(false).lane(0),
                None => sum,
            };
            let factor = sum.gt(k.f(0.0)).pick(k.f(1.0) / sum, k.f(0.0)).splat();
            let to = out.words(head * d.v_dim);
            k.columns(d.v_dim, |c, span| {
                to.words(c).store_vec(from.words(c).load_vec(Span::Full) * factor, span);
            });
        });
    }
}

/// Whether groups of `m` queries are written for tiles of several rows. Each group costs code, and few
/// queries of a tile are left over. So there are the largest group, groups of four, and single queries.
fn few(isa: &Isa, m: usize, shared: usize) -> bool {
    let fours = shared.is_multiple_of(4) && isa.mr.is_multiple_of(4);
    m == isa.mr || m == 4 || (m == 1 && !fours)
}

/// Effect of a step of a product on one set of sums.
type Step<'a, 'k> = dyn Fn(I<'k>, usize, &mut [F<'k>]) + 'a;

/// `steps` steps of `rows` rows, a multiple of [`UNROLL`], on top of `sums`: two vectors for each row.
fn accumulate<'k>(
    k: &'k Kb<'k>,
    rows: usize,
    steps: I<'k>,
    sums: Vec<F<'k>>,
    step: &Step<'_, 'k>,
) -> Vec<F<'k>> {
    let sets = sets(rows);
    let mut all = sums;
    let width = all.len();
    all.resize(sets * width, k.fv(0.0));
    let all = k.fold(0, steps, UNROLL, &all, |at, sums| {
        let mut sums = sums.to_vec();
        for u in 0..UNROLL {
            step(at, u, &mut sums[u % sets * width..][..width]);
        }
        sums
    });
    join_sets(&all, width)
}

/// Sets of accumulators that steps take turns with: few rows do not fill the pipeline.
fn sets(rows: usize) -> usize {
    match rows {
        1 => UNROLL,
        2 => 2,
        _ => 1,
    }
}

/// Sum of sets of `width` accumulators.
fn join_sets<'k>(all: &[F<'k>], width: usize) -> Vec<F<'k>> {
    let (first, rest) = all.split_at(width);
    let mut total = first.to_vec();
    for set in rest.chunks_exact(width) {
        for (t, &s) in total.iter_mut().zip(set) {
            *t = *t + s;
        }
    }
    total
}

/// Steps over a panel of numbers: one channel, or a pair of bf16.
fn numbers<'k>(
    k: &'k Kb<'k>,
    rows: &[P<'k>],
    panel: P<'k>,
    format: Format,
    compute: ComputeType,
) -> impl Fn(I<'k>, usize, &mut [F<'k>]) {
    let nr = k.isa.nr;
    move |at, u, sums| {
        let from = panel.words(at * nr).words(u * nr);
        match (format, compute) {
            (Format::Bf16, ComputeType::Bf16) => pairs(k, rows, from, at, u, sums),
            (Format::Bf16, _) => {
                for odd in 0..2 {
                    let rows: Vec<_> = rows.iter().map(|r| r.words(at * 2).words(2 * u + odd)).collect();
                    outer(&rows, widened(k, from, odd), sums);
                }
            }
            _ => {
                let rows: Vec<_> = rows.iter().map(|r| r.words(at).words(u)).collect();
                outer(&rows, [from, from.words(k.lanes())].map(|p| p.load_vec(Span::Full)), sums);
            }
        }
    }
}

/// Steps over a panel of codes of values from token `first` on, without their scales.
fn of_values<'k>(
    k: &'k Kb<'k>,
    rows: &[P<'k>],
    panel: ValuePanel<'k>,
    first: I<'k>,
) -> impl Fn(I<'k>, usize, &mut [F<'k>]) {
    move |at, u, sums| {
        let rows: Vec<_> = rows.iter().map(|r| r.words(at).words(u)).collect();
        outer(&rows, [0, k.lanes()].map(|c| panel.codes(k, first + at, u, c).to_float()), sums);
    }
}

/// Rows times one group of keys in q5 or q4, without their scales.
fn of_quads<'k>(k: &'k Kb<'k>, rows: &[P<'k>], (group, format): (P<'k>, Format)) -> Vec<F<'k>> {
    let (nr, sets) = (k.isa.nr, sets(rows.len()));
    let width = 2 * rows.len();
    let mut sums = vec![k.fv(0.0); sets * width];
    for quad in 0..GROUP / 4 {
        let codes = [0, k.lanes()].map(|column| unpack::codes(format, group, nr, quad, column));
        for j in 0..4 {
            let rows: Vec<_> = rows.iter().map(|r| r.words(4 * quad + j)).collect();
            outer(&rows, codes.map(|c| unpack::byte(c, j)), &mut sums[j % sets * width..][..width]);
        }
    }
    join_sets(&sums, width)
}

/// Steps over a panel of q8 keys, without their scales.
fn codes<'k>(k: &'k Kb<'k>, rows: &[P<'k>], panel: P<'k>) -> impl Fn(I<'k>, usize, &mut [F<'k>]) {
    let nr = k.isa.nr;
    move |at, u, sums| {
        let from = panel.bytes(at * nr).bytes(u * nr);
        let rows: Vec<_> = rows.iter().map(|r| r.words(at).words(u)).collect();
        outer(&rows, [from, from.bytes(k.lanes())].map(|p| p.load_codes().to_float()), sums);
    }
}

/// Rows times a panel of keys in codes: two vectors for each row.
fn grouped<'k>(
    k: &'k Kb<'k>,
    rows: &[P<'k>],
    (panel, format): (P<'k>, Format),
    groups: usize,
) -> Vec<[F<'k>; 2]> {
    let nr = k.isa.nr;
    let zero = vec![k.fv(0.0); 2 * rows.len()];
    let total = k.fold(0, groups, 1, &zero, |group, total| {
        let rows: Vec<_> = rows.iter().map(|r| r.words(group * GROUP)).collect();
        let from = panel.bytes(group * (nr * format.group_bytes().unwrap_or(0)));
        let sums = if format == Format::Q8 {
            accumulate(k, rows.len(), k.i(GROUP as i64), zero.clone(), &codes(k, &rows, from))
        } else {
            of_quads(k, &rows, (from, format))
        };
        let scales = [0, k.lanes()].map(|column| cache::key_scale(from, format, nr, column));
        let grown = sums.iter().zip(total).enumerate();
        grown.map(|(i, (sum, &total))| sum.fma(scales[i % 2], total)).collect()
    });
    total.chunks_exact(2).map(|pair| [pair[0], pair[1]]).collect()
}
