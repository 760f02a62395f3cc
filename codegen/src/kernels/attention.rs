//! Attention with an online softmax: key blocks in order, the running maximum and sum kept per query.
//!
//! A work item is a block of rows and one key-value head, with all query heads that share it. Each block
//! of keys is read once into the cache and met by every query of the item.

use crate::dsl::{F, I, Index, Kb, P, Span};
use crate::machine::Isa;
use crate::spec::{KernelSpec, attention_rows};
use moec_ir::op::AttentionDesc;

/// Keys of a block: a multiple of every vector width. Rescaling is paid once per block.
const KEYS: usize = 32;
/// Output vectors that are accumulated in registers together.
const OUTPUTS: usize = 8;

/// Scratch, in words: the scores of one query and block; output, maximum and sum of every query.
pub(crate) struct Scratch {
    queries: usize,
    output_ld: usize,
}

impl Scratch {
    pub(crate) fn of(desc: &AttentionDesc, isa: &Isa) -> Self {
        let queries = attention_rows(desc) * (desc.heads / desc.kv_heads.max(1));
        Self { queries, output_ld: desc.v_dim.next_multiple_of(isa.lanes) }
    }

    pub(crate) fn bytes(&self) -> usize {
        (KEYS + self.queries * (self.output_ld + 2)) * 4
    }
}

/// Addresses and constants of a kernel.
struct Kernel<'a, 'k> {
    k: &'k Kb<'k>,
    d: &'a AttentionDesc,
    ctx: usize,
    /// Query heads per key-value head.
    shared: usize,
    output_ld: usize,
    keys: P<'k>,
    /// Values, and their row distance.
    values: (P<'k>, usize),
    pos: P<'k>,
    slot: P<'k>,
    scores: P<'k>,
    outputs: P<'k>,
    maxima: P<'k>,
    sums: P<'k>,
}

pub(super) fn write<'k>(k: &'k Kb<'k>, spec: &KernelSpec) {
    let KernelSpec::Attention { desc: d, q_ld, out_ld, ctx } = spec else {
        return k.fail("not an attention");
    };
    let mut args = (0..).map(|i| k.arg(i));
    let mut arg = || args.next().unwrap_or(k.scratch());
    let (q, keys) = (arg(), arg());
    let values = if d.v_from_k { (keys, d.qk_dim) } else { (arg(), d.v_dim) };
    let (pos, slot) = (arg(), arg());
    let sinks = d.sinks.then(&mut arg);
    let out = arg();
    let s = Scratch::of(d, &k.isa);
    let scores = k.scratch();
    let outputs = scores.words(KEYS);
    let maxima = outputs.words(s.queries * s.output_ld);
    let a = Kernel {
        k,
        d,
        ctx: *ctx,
        shared: d.heads / d.kv_heads,
        output_ld: s.output_ld,
        keys,
        values,
        pos,
        slot,
        scores,
        outputs,
        maxima,
        sums: maxima.words(s.queries),
    };
    k.tiles(attention_rows(d), |head, first, end| {
        let heads = head * a.shared;
        a.start(first, end, sinks.map(|p| p.words(heads)));
        a.walk(first, end, head, |row| q.words(row * *q_ld + heads * d.qk_dim));
        a.finish(first, end, |row| out.words(row * *out_ld + heads * d.v_dim));
    });
}

impl<'k> Kernel<'_, 'k> {
    /// Positions that a row attends to: first, and one past the last. Empty for a padding row.
    fn range(&self, row: I<'k>) -> [I<'k>; 2] {
        let k = self.k;
        let pos = self.pos.words(row).load_int().min(k.i(self.ctx as i64 - 1));
        let end = pos + 1;
        let first = match self.d.window {
            Some(w) => (end - w.min(self.ctx)).max(k.i(0)),
            None => k.i(0),
        };
        [first, end]
    }

    /// Every query of a row: `body(number of the query in the item, number in the row)`.
    fn queries(&self, first: I<'k>, row: I<'k>, body: impl FnOnce(I<'k>, I<'k>)) {
        let base = (row - first) * self.shared;
        self.k.each(0, self.shared, 1, |i| body(base + i, i));
    }

    /// No key was seen; a sink is a key without a value.
    fn start(&self, first: I<'k>, end: I<'k>, sinks: Option<P<'k>>) {
        let k = self.k;
        k.each(first, end, 1, |row| {
            self.queries(first, row, |query, i| {
                k.zero(self.outputs.words(query * self.output_ld), self.output_ld);
                let (max, sum) = match sinks {
                    Some(p) => (p.words(i).load(), k.f(1.0)),
                    None => (k.f(f32::NEG_INFINITY), k.f(0.0)),
                };
                self.maxima.words(query).store(max);
                self.sums.words(query).store(sum);
            });
        });
    }

    fn walk(&self, first: I<'k>, end: I<'k>, head: I<'k>, q: impl Fn(I<'k>) -> P<'k>) {
        let k = self.k;
        let none = [k.i(i64::from(i32::MAX)), k.i(0)];
        let reach = k.fold(first, end, 1, &none, |row, reach| {
            let [lo, hi] = self.range(row);
            let lo = hi.equals(k.i(0)).pick_int(none[0], lo);
            vec![lo.min(reach[0]), hi.max(reach[1])]
        });
        let block = reach[0].div(k.i(KEYS as i64)) * KEYS;
        k.each(block, reach[1], KEYS, |block| {
            k.each(first, end, 1, |row| {
                let [lo, hi] = self.range(row);
                let (lo, hi) = (lo.max(block), hi.min(block + KEYS));
                k.when(lo.lt(hi), || {
                    let cache = (self.slot.words(row).load_int() * self.d.kv_heads + head) * self.ctx;
                    let q = q(row);
                    self.queries(first, row, |query, i| {
                        let q = q.words(i * self.d.qk_dim);
                        self.meet(q, query, cache, block, lo, hi);
                    });
                });
            });
        });
    }

    /// One query meets the keys `lo .. hi` of a block.
    fn meet(&self, q: P<'k>, query: I<'k>, cache: I<'k>, block: I<'k>, lo: I<'k>, hi: I<'k>) {
        let (k, lanes) = (self.k, self.k.lanes());
        let low = k.fv(f32::NEG_INFINITY);
        let start = lo.div(k.i(lanes as i64)) * lanes;
        let tops = k.fold(start, hi, lanes, &[low], |key, tops| {
            let scores = self.scores(q, cache, key) * self.d.scale;
            let ids = k.lane_ids() + key.narrow().splat(lanes);
            let seen = ids.ge(lo.narrow().splat(lanes)).and(ids.lt(hi.narrow().splat(lanes)));
            let scores = seen.pick(scores, low);
            self.scores.words(key - block).store(scores);
            vec![tops[0].max(scores)]
        });
        let (max_at, sum_at) = (self.maxima.words(query), self.sums.words(query));
        let before = max_at.load();
        let max = tops[0].lanes_max().max(before);
        let fade = (before - max).splat().exp();
        let sums = k.fold(start, hi, lanes, &[k.fv(0.0)], |key, sums| {
            let at = self.scores.words(key - block);
            let weights = (at.load_vec(Span::Full) - max).exp();
            at.store(weights);
            vec![sums[0] + weights]
        });
        max_at.store(max);
        sum_at.store(sum_at.load().fma(fade.lane(0), sums[0].sum()));
        self.accumulate(query, cache, block, lo, hi, fade);
    }

    /// Dot products of a query with as many keys as a vector has lanes, from `key` on.
    fn scores(&self, q: P<'k>, cache: I<'k>, key: I<'k>) -> F<'k> {
        let (k, lanes, dim) = (self.k, self.k.lanes(), self.d.qk_dim);
        let first = self.keys.words((cache + key) * dim);
        let rows: Vec<P<'k>> = (0..lanes)
            .map(|i| {
                if self.ctx.is_multiple_of(lanes) {
                    first.words(i * dim)
                } else {
                    // The last keys of the group may lie behind the cache.
                    let key = (key + i).min(k.i(self.ctx as i64 - 1));
                    self.keys.words((cache + key) * dim)
                }
            })
            .collect();
        let meet = |sums: &[F<'k>], c: I<'k>, span| -> Vec<F<'k>> {
            let q = q.words(c).load_vec(span);
            rows.iter().zip(sums).map(|(row, &sum)| row.words(c).load_vec(span).fma(q, sum)).collect()
        };
        let whole = dim / lanes * lanes;
        let mut sums = vec![k.fv(0.0); lanes];
        if whole > 0 {
            sums = k.fold(0, whole, lanes, &sums, |c, sums| meet(sums, c, Span::Full));
        }
        if dim > whole {
            sums = meet(&sums, whole.int(k), k.span(dim - whole));
        }
        F::sums(&sums)
    }

    /// `output · fade + Σ weight · value`
    fn accumulate(&self, query: I<'k>, cache: I<'k>, block: I<'k>, lo: I<'k>, hi: I<'k>, fade: F<'k>) {
        let (k, lanes, dim) = (self.k, self.k.lanes(), self.d.v_dim);
        let output = self.outputs.words(query * self.output_ld);
        let group = |c: I<'k>, spans: &[Span<'k>]| {
            let at: Vec<P<'k>> = (0..spans.len()).map(|i| output.words(c).words(i * lanes)).collect();
            let start: Vec<F<'k>> = at.iter().map(|p| p.load_vec(Span::Full) * fade).collect();
            let sums = k.fold(lo, hi, 1, &start, |key, sums| {
                let weight = self.scores.words(key - block).load().splat();
                let value = self.values.0.words((cache + key) * self.values.1).words(c);
                let value = |i: usize, span| value.words(i * lanes).load_vec(span);
                let terms = spans.iter().zip(sums).enumerate();
                terms.map(|(i, (&span, &sum))| value(i, span).fma(weight, sum)).collect()
            });
            for (p, sum) in at.iter().zip(sums) {
                p.store(sum);
            }
        };
        let whole = dim / (OUTPUTS * lanes) * OUTPUTS * lanes;
        if whole > 0 {
            k.each(0, whole, OUTPUTS * lanes, |c| group(c, &[Span::Full; OUTPUTS]));
        }
        let rest: Vec<Span<'k>> = (whole..dim).step_by(lanes).map(|c| k.span(dim - c)).collect();
        if !rest.is_empty() {
            group(whole.int(k), &rest);
        }
    }

    fn finish(&self, first: I<'k>, end: I<'k>, out: impl Fn(I<'k>) -> P<'k>) {
        let k = self.k;
        k.each(first, end, 1, |row| {
            let out = out(row);
            self.queries(first, row, |query, i| {
                let sum = self.sums.words(query).load();
                let factor = sum.gt(k.f(0.0)).pick(k.f(1.0) / sum, k.f(0.0)).splat();
                let (from, to) = (self.outputs.words(query * self.output_ld), out.words(i * self.d.v_dim));
                k.columns(self.d.v_dim, |c, span| {
                    to.words(c).store_vec(from.words(c).load_vec(Span::Full) * factor, span);
                });
            });
        });
    }
}
