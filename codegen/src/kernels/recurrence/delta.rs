//! [`Op::DeltaRule`](moec_ir::Op::DeltaRule): the gated delta rule, row by row (Yang, Kautz and Hatamizadeh,
//! *Gated Delta Networks*, equation 10).
//!
//! The columns of a head's state are independent. A work item has a panel of them, which stays in the
//! first-level cache from row to row. It goes over the panel twice: once to multiply the state by the key,
//! once to change it and to apply the query. In decoding every state is read and written once, the least that
//! memory allows.
//!
//! Of a prompt whole chunks of rows are computed together ([`chunk`]).

use super::chunk::{self, Chunk, Scratch};
use super::in_order;
use crate::dsl::{F, I, Kb, P, Span};
use crate::gpu::GpuKernel;
use crate::kernels::{Kernel, Rule};
use crate::machine::Isa;
use crate::spec::Symbol;
use moec_ir::plan::{CacheOrder, Grid, Results};

/// Vectors of a panel.
pub(super) const VECTORS: usize = 2;
/// Rows of the state that are summed apart, to hide the latency of additions.
const SUMS: usize = 4;
/// Columns of a work item that computes chunks, at least a panel: they share what a chunk has of its head.
const COLUMNS: usize = 128;

/// `[state, q, k, v, decay, beta, pos i32, slot i32, out]`. The state is f32, ordered as [`delta_order`]
/// says.
#[derive(Clone, Debug, PartialEq)]
pub struct DeltaRule {
    /// Rows of a call, at most.
    pub rows: usize,
    /// Heads of queries and keys.
    pub key_heads: usize,
    /// Heads of values, a multiple.
    pub heads: usize,
    /// Channels of a key, even.
    pub key: usize,
    /// Channels of a value.
    pub value: usize,
    /// Whether the state's value for the key is subtracted first: the delta rule, and not a plain sum
    /// ([`Op::Ssd`](moec_ir::Op::Ssd)).
    pub corrects: bool,
    /// Whether every channel of a key has a decay of its own, or a head one.
    pub by_channel: bool,
    /// Whether consecutive rows of one sequence are computed together where there are enough.
    pub chunked: bool,
    /// Row distances of `q`, `k`, `v`, `decay` and `beta`.
    pub ld: [usize; 5],
    /// Row distance of `out`.
    pub out_ld: usize,
}

/// Columns of a panel.
pub(super) fn columns(isa: &Isa) -> usize {
    VECTORS * isa.lanes
}

/// Order of a state with this many key channels: panels of columns, each contiguous.
pub fn delta_order(isa: &Isa, key: usize) -> CacheOrder {
    CacheOrder::Values { nr: columns(isa) as u32, block: key as u32 }
}

impl Kernel for DeltaRule {
    fn kind(&self) -> &'static str {
        if self.corrects { "delta_rule" } else { "ssd" }
    }

    fn name(&self, s: &mut Symbol, _isa: &Isa) {
        s.word(self.kind()).num("t", self.rows).num("kh", self.key_heads).num("h", self.heads);
        s.num("k", self.key).num("v", self.value).flag("channels", self.by_channel);
        s.flag("chunked", self.chunked);
        for (tag, ld) in ["q", "x", "y", "g", "b"].into_iter().zip(self.ld) {
            s.num(tag, ld);
        }
        s.num("o", self.out_ld);
    }

    fn grid(&self, isa: &Isa) -> Grid {
        Grid::Tiles { rows: self.rows as u32, tiles: (self.heads * self.parts(isa)) as u32 }
    }

    fn args(&self) -> usize {
        9
    }

    fn results(&self) -> Results {
        Results::new([0, 8]).unwrap_or_default()
    }

    /// Factors of decay of every channel of a key; before them what a chunk keeps.
    fn scratch_bytes(&self, isa: &Isa) -> usize {
        let factors = if self.by_channel { self.key + isa.lanes } else { 0 };
        (self.chunk_words(isa) + factors) * 4
    }

    fn rules(&self, _isa: &Isa) -> Vec<Rule> {
        let [q, k, v, decay, beta] = self.ld;
        let keys = self.key_heads * self.key;
        let decays = if self.by_channel { self.heads * self.key } else { self.heads };
        vec![
            (self.rows > 0 && self.key > 0 && self.value > 0, "an extent is zero"),
            (self.key.is_multiple_of(2), "a state of an odd number of rows"),
            (self.key_heads > 0 && self.heads.is_multiple_of(self.key_heads.max(1)), "heads without a key"),
            (
                q >= keys
                    && k >= keys
                    && v >= self.heads * self.value
                    && decay >= decays
                    && beta >= self.heads,
                "rows overlap",
            ),
            (self.out_ld >= self.heads * self.value, "rows of the output overlap"),
        ]
    }

    fn write<'k>(&self, k: &'k Kb<'k>) {
        let (parts, places) = (self.parts(&k.isa), [k.arg(6), k.arg(7)]);
        if !self.chunked {
            in_order(k, self.rows, places, |tile, row, slot| {
                let (head, panel) = (tile.div(k.i(parts as i64)), tile.rem(k.i(parts as i64)));
                self.step(k, head, panel, row, slot);
            });
            return;
        }
        let chunk = chunk::rows(&k.isa);
        k.tiles(self.rows, |tile, first, end| {
            let (head, part) = (tile.div(k.i(parts as i64)), tile.rem(k.i(parts as i64)));
            let from = part * self.item_panels(&k.isa);
            let end_panel = (from + self.item_panels(&k.isa)).min(k.i(self.panels(&k.isa) as i64));
            let panels = [from, end_panel];
            let [pos, slot] = places.map(|p| move |row: I<'k>| p.words(row).load_int());
            k.fold(first, end, 1, &[first], |row, next| {
                // The row that comes after what is computed at this one, if that is not computed yet.
                let pending = row.ge(next[0]);
                let here = slot(row);
                let whole = (0..chunk).fold((row + chunk).lt(end + 1), |whole, i| {
                    let row = (row + i).min(end - 1);
                    whole.and(pos(row).ge(k.i(0))).and(slot(row).equals(here))
                });
                k.when(pending, || {
                    let together = || {
                        let state = k.arg(0).words((here * self.heads + head) * self.head_words(&k.isa));
                        Chunk { rule: self, k, first: row, head, state }.compute(panels);
                    };
                    k.branch(whole, together, || {
                        k.when(pos(row).ge(k.i(0)), || {
                            k.each(panels[0], panels[1], 1, |panel| self.step(k, head, panel, row, here));
                        });
                    });
                });
                vec![pending.pick_int(whole.pick_int(row + chunk, row + 1), next[0])]
            });
        });
    }

    fn on_gpu(&self) -> Option<&dyn GpuKernel> {
        Some(self)
    }
}

impl DeltaRule {
    /// Panels of a head's state.
    fn panels(&self, isa: &Isa) -> usize {
        self.value.div_ceil(columns(isa))
    }

    /// Work items of a head.
    fn parts(&self, isa: &Isa) -> usize {
        self.panels(isa).div_ceil(self.item_panels(isa))
    }

    /// Panels of a work item.
    fn item_panels(&self, isa: &Isa) -> usize {
        if self.chunked { (COLUMNS / columns(isa)).max(1) } else { 1 }
    }

    /// Words of a head's state.
    fn head_words(&self, isa: &Isa) -> usize {
        self.panels(isa) * columns(isa) * self.key
    }

    /// Words of scratch that chunks take.
    fn chunk_words(&self, isa: &Isa) -> usize {
        if self.chunked { Scratch::new(isa, self.key).words } else { 0 }
    }

    /// One row, for one panel of a head's state.
    fn step<'k>(&self, k: &'k Kb<'k>, head: I<'k>, panel: I<'k>, row: I<'k>, slot: I<'k>) {
        let &Self { key_heads, heads, key, value, corrects, by_channel, ld, out_ld, .. } = self;
        let [q_ld, k_ld, v_ld, decay_ld, beta_ld] = ld;
        let (state, out) = (k.arg(0), k.arg(8));
        let width = columns(&k.isa);
        let of_key = head.div(k.i((heads / key_heads.max(1)) as i64)) * key;
        let query = k.arg(1).words(row * q_ld + of_key);
        let keys = k.arg(2).words(row * k_ld + of_key);
        let first = panel * width;
        let column = head * value + first;
        let values = k.arg(3).words(row * v_ld + column);
        let beta = k.arg(5).words(row * beta_ld + head).load().splat();
        let decay = k.arg(4).words(row * decay_ld);
        let decay = if by_channel {
            let (decay, factors) = (decay.words(head * key), k.scratch().words(self.chunk_words(&k.isa)));
            k.columns(key, |c, span| {
                factors.words(c).store_vec(decay.words(c).load_vec(span).exp(), span);
            });
            Decay::Channels(factors)
        } else {
            Decay::Head(decay.words(head).load().splat().exp())
        };
        let at = state.words((slot * heads + head) * self.head_words(&k.isa) + panel * (width * key));
        let s = Panel { k, at, width, key };
        // The state's value for the key is subtracted from the new value: `v − kᵀ S`.
        let retrieved = corrects.then(|| {
            s.sums(|i, vector, sum| decay.of(s.row(i, vector), i).fma(keys.words(i).load().splat(), sum))
        });
        let span = |v: usize| k.span_before(k.i(value as i64) - first - v * k.lanes());
        let change: Vec<F<'k>> = (0..VECTORS)
            .map(|v| {
                let x = values.words(v * k.lanes()).load_vec(span(v));
                retrieved.as_ref().map_or(x, |retrieved| x - retrieved[v]) * beta
            })
            .collect();
        let output = s.sums(|i, vector, sum| {
            let old = decay.of(s.row(i, vector), i);
            let new = keys.words(i).load().splat().fma(change[vector], old);
            s.address(i, vector).store_vec(new, Span::Full);
            new.fma(query.words(i).load().splat(), sum)
        });
        for (v, y) in output.into_iter().enumerate() {
            out.words(row * out_ld + column).words(v * k.lanes()).store_vec(y, span(v));
        }
    }
}

/// Factors of the rows of a state.
#[derive(Clone, Copy)]
pub(super) enum Decay<'k> {
    /// One factor for all rows.
    Head(F<'k>),
    /// One factor for each row, in memory.
    Channels(P<'k>),
}

impl<'k> Decay<'k> {
    /// Part of row `i` of the state, decayed.
    pub(super) fn of(self, x: F<'k>, i: I<'k>) -> F<'k> {
        match self {
            Self::Head(factor) => x * factor,
            Self::Channels(factors) => x * factors.words(i).load().splat(),
        }
    }
}

/// A panel of a head's state: its rows one after the other, [`VECTORS`] vectors each.
#[derive(Clone, Copy)]
pub(super) struct Panel<'k> {
    pub(super) k: &'k Kb<'k>,
    pub(super) at: P<'k>,
    pub(super) width: usize,
    /// Its rows.
    pub(super) key: usize,
}

impl<'k> Panel<'k> {
    pub(super) fn address(self, row: I<'k>, vector: usize) -> P<'k> {
        self.at.words(row * self.width).words(vector * self.k.lanes())
    }

    pub(super) fn row(self, row: I<'k>, vector: usize) -> F<'k> {
        self.address(row, vector).load_vec(Span::Full)
    }

    /// For every vector the sum of what `add(row, vector, sum so far)` adds of all rows.
    pub(super) fn sums(self, add: impl Fn(I<'k>, usize, F<'k>) -> F<'k>) -> Vec<F<'k>> {
        let k = self.k;
        let each = |from: I<'k>, sums: &[F<'k>], rows: usize| -> Vec<F<'k>> {
            let mut sums = sums.to_vec();
            for row in 0..rows {
                for vector in 0..VECTORS {
                    let sum = &mut sums[row * VECTORS + vector];
                    *sum = add(from + row, vector, *sum);
                }
            }
            sums
        };
        let whole = self.key / SUMS * SUMS;
        let zeros = vec![k.fv(0.0); SUMS * VECTORS];
        let sums = k.fold(0, whole, SUMS, &zeros, |i, sums| each(i, sums, SUMS));
        let sums = each(k.i(whole as i64), &sums, self.key - whole);
        (0..VECTORS).map(|v| (1..SUMS).fold(sums[v], |sum, s| sum + sums[s * VECTORS + v])).collect()
    }
}
