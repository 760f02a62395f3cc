//! Attention with an online softmax over blocks of the KV cache.
//!
//! A work item holds a tile of queries: some rows, and all query heads that share a key-value head. The tile
//! processes each block of tokens in groups of as many queries as the microkernel takes. Scores are the
//! product with panels of keys; results accumulate the product of the weights with panels of values.
//!
//! With few rows, as in decoding, the tokens of the cache are cut into parts that are work items of their
//! own; [`merge`] joins them. Parts follow from a row's position alone, never from the number of threads.

pub(crate) mod merge;
mod tile;
mod tiles;

use super::cache::{self, BLOCK};
use super::{GpuKernel, Kernel, Rule, amx};
use crate::dsl::{I, Kb, P, TILE_CONFIG_BYTES};
use crate::machine::Isa;
use crate::spec::{ComputeType, Symbol};
use moec_ir::op::AttentionDesc;
use moec_ir::plan::Grid;
use moec_ir::state::CACHED;
use moec_ir::types::{Format, GROUP};

/// A maximum below every score: not infinite, so that differences of two are numbers.
const LOWEST: f32 = -1e30;

/// Most queries of a tile that are multiplied by codes as f32, whatever was requested.
const FEW: usize = 8;

/// Shape, fixed at build time.
#[derive(Clone, Copy)]
struct Shape<'a> {
    d: &'a AttentionDesc,
    cache: Format,
    rotated: [usize; 2],
    compute: ComputeType,
    ctx: usize,
    rows: usize,
    splits: usize,
    q_ld: usize,
    out_ld: usize,
}

impl<'a> Shape<'a> {
    fn of(spec: &'a Attention) -> Self {
        let &Attention { desc: ref d, cache, rotated, compute, ctx, rows, splits, q_ld, out_ld } = spec;
        let shape = Self { d, cache, rotated, compute, ctx, rows, splits, q_ld, out_ld };
        let few = cache.is_quantised() && !d.v_from_k && shape.queries() <= FEW;
        // Widening a block would take longer than its few queries do.
        Self { compute: if few { ComputeType::F32 } else { compute }, ..shape }
    }

    /// Query heads per key-value head.
    fn shared(&self) -> usize {
        self.d.heads / self.d.kv_heads.max(1)
    }

    /// Queries of a full tile.
    fn queries(&self) -> usize {
        self.rows * self.shared()
    }

    /// Whether codes are multiplied by f32 without widening, with their scales applied to the results: fewest
    /// steps for a byte from memory. Otherwise they are widened first, once for all queries.
    fn direct(&self) -> bool {
        self.cache.is_quantised() && self.compute == ComputeType::F32 && !self.d.v_from_k
    }

    /// Whether products run on tile registers: of tiles of several rows, in pairs of bf16.
    fn on_tiles(&self, isa: &Isa) -> bool {
        isa.tiles && self.compute == ComputeType::Bf16 && self.rows > 1
    }

    /// Format of the panels that the microkernel reads: codes are widened to what the queries are in.
    fn panels(&self) -> Format {
        match (self.cache, self.compute) {
            (format, ComputeType::Bf16) if format.is_quantised() => Format::Bf16,
            (format, _) if format.is_quantised() => Format::F32,
            (format, _) => format,
        }
    }

    /// Words of a query.
    fn query_words(&self) -> usize {
        match self.compute {
            ComputeType::Bf16 => self.d.qk_dim.div_ceil(2),
            // Absent channels of a group have the code zero.
            _ if self.direct() => self.d.qk_dim.next_multiple_of(GROUP),
            _ => self.d.qk_dim,
        }
    }

    /// Words of a part's result: maximum, sum, values.
    fn part_words(&self) -> usize {
        self.d.v_dim + 2
    }
}

/// `[q, k_state, v_state?, pos i32, slot i32, sinks? f32 [heads], out]`. States are ordered as
/// [`crate::key_order`] and [`crate::value_order`] say; `v_state` is absent with `v_from_k`. `pos < 0`:
/// zeros. With a window, position `p` is row `p mod ctx` of states of whole blocks, and of no other state
/// past `ctx`.
///
/// With `splits > 1` the tokens of the cache are cut into this many parts, `sinks` is absent, and `out` is
/// the input of [`AttentionMerge`](crate::spec::AttentionMerge).
#[derive(Clone, Debug, PartialEq)]
pub struct Attention {
    /// Heads, dimensions, scale, window, sinks.
    pub desc: AttentionDesc,
    /// Format of the states.
    pub cache: Format,
    /// Channels of a block of a head that keys, and values, are stored [rotated](moec_ir::state::rotate) in; 1:
    /// as they are. Queries are rotated as keys are, and results back.
    pub rotated: [usize; 2],
    /// Format of queries and weights.
    pub compute: ComputeType,
    /// Tokens of the states.
    pub ctx: usize,
    /// Token rows per work item.
    pub rows: usize,
    /// Parts that the tokens of the cache are cut into.
    pub splits: usize,
    /// Row distance of `q`.
    pub q_ld: usize,
    /// Row distance of `out`.
    pub out_ld: usize,
}

impl Kernel for Attention {
    fn kind(&self) -> &'static str {
        "attention"
    }

    fn name(&self, s: &mut Symbol, isa: &Isa) {
        let Self { desc, cache, rotated, compute, ctx, rows, splits, q_ld, out_ld } = self;
        s.word("attention").num("h", desc.heads).num("kv", desc.kv_heads).num("d", desc.qk_dim);
        s.num("v", desc.v_dim).float("s", desc.scale).option("w", desc.window);
        s.flag("chunked", desc.chunked).flag("sinks", desc.sinks).flag("latent", desc.v_from_k);
        s.word(cache.name()).word(compute.name()).num("p", isa.nr).num("r", *rows).num("n", *splits);
        s.num("q", *q_ld).num("o", *out_ld).num("ctx", *ctx);
        let [keys, values] = rotated.map(|block| (block > 1).then_some(block));
        s.option("rk", keys).option("rv", values);
    }

    fn grid(&self, _isa: &Isa) -> Grid {
        Grid::Tiles { rows: self.rows as u32, tiles: (self.desc.kv_heads * self.splits) as u32 }
    }

    fn args(&self) -> usize {
        5 + usize::from(!self.desc.v_from_k) + usize::from(self.desc.sinks && self.splits == 1)
    }

    fn scratch_bytes(&self, isa: &Isa) -> usize {
        Scratch::of(&Shape::of(self), isa).words * 4
    }

    fn rules(&self, _isa: &Isa) -> Vec<Rule> {
        let s = Shape::of(self);
        let d = s.d;
        let out = if s.splits > 1 { d.heads * s.splits * s.part_words() } else { d.heads * d.v_dim };
        vec![
            (
                d.kv_heads > 0 && d.heads.is_multiple_of(d.kv_heads.max(1)),
                "heads that no key-value head serves",
            ),
            (!d.v_from_k || d.v_dim <= d.qk_dim, "values wider than the keys that they are part of"),
            (s.q_ld >= d.heads * d.qk_dim && s.out_ld >= out, "rows overlap"),
            (s.ctx > 0 && d.qk_dim > 0 && d.v_dim > 0 && s.rows > 0 && s.splits > 0, "an extent is zero"),
            (
                d.window != Some(0) && (d.window.is_some() || !d.chunked),
                "an empty window, or chunks without one",
            ),
            (d.scale > 0.0, "a factor that does not keep the order of scores"),
            (CACHED.contains(&s.cache), "a cache of another format"),
            (
                s.compute == ComputeType::F32 || (s.compute == ComputeType::Bf16 && s.cache != Format::F32),
                "an arithmetic that the cache is not stored for",
            ),
            cache::rotation_rule(s.rotated[0], d.qk_dim),
            cache::rotation_rule(s.rotated[1], d.v_dim),
            (
                !d.v_from_k || s.rotated[0] == s.rotated[1],
                "values rotated otherwise than the keys that they are",
            ),
        ]
    }

    fn on_gpu(&self) -> Option<&dyn GpuKernel> {
        Some(self)
    }

    fn write<'k>(&self, k: &'k Kb<'k>) {
        let s = Shape::of(self);
        let mut args = (0..).map(|i| k.arg(i));
        let mut arg = || args.next().unwrap_or(k.scratch());
        let (q, keys) = (arg(), arg());
        let values = (!s.d.v_from_k).then(&mut arg);
        let (pos, slot) = (arg(), arg());
        let sinks = (s.d.sinks && s.splits == 1).then(&mut arg);
        let out = arg();
        let call = Call { k, s, scratch: Scratch::of(&s, &k.isa), q, keys, values, pos, slot, sinks, out };
        let config = call.tile_config();
        if let Some(config) = config {
            amx::shape(k, config);
        }
        k.mixed_tiles(s.rows, |tile, first, end| {
            let (head, part) = match s.splits {
                1 => (tile, k.i(0)),
                n => (tile.div(k.i(n as i64)), tile.rem(k.i(n as i64))),
            };
            if s.rows == 1 {
                return call.tile(first, end, head, part);
            }
            // A tile's rows share a slot: others begin a tile of their own.
            k.each(first, end, 1, |row| {
                let own = call.slot_of(row);
                let begins = row.equals(first).or(call.slot_of((row - 1).max(first)).equals(own).not());
                k.when(begins, || {
                    let stop = k.fold(row + 1, end, 1, &[row + 1], |at, stop| {
                        let goes_on = at.equals(stop[0]).and(call.slot_of(at).equals(own));
                        vec![goes_on.pick_int(at + 1, stop[0])]
                    });
                    call.tile(row, stop[0], head, part);
                });
            });
        });
        if config.is_some() {
            k.release_tiles();
        }
    }
}

/// Places in the scratch, in words.
struct Scratch {
    /// Words from query to query.
    query: usize,
    /// Words from row to row of scores.
    score: usize,
    /// Words from row to row of results.
    output: usize,
    queries: usize,
    /// A query in f32, before it is rounded.
    query_f32: usize,
    firsts: usize,
    ends: usize,
    maxima: usize,
    sums: usize,
    rescales: usize,
    scores: usize,
    /// Weights times the scales of a group of values.
    scaled: usize,
    outputs: usize,
    keys: usize,
    values: usize,
    /// Shapes of tile registers.
    config: usize,
    words: usize,
}

impl Scratch {
    fn of(s: &Shape<'_>, isa: &Isa) -> Self {
        let lanes = isa.lanes;
        let mut words = 0;
        let mut take = |n: usize| {
            let at = words;
            words += n.next_multiple_of(16);
            at
        };
        // A vector after each row: neighbours then do not fall into the same sets of a cache.
        let query = s.query_words().next_multiple_of(lanes) + lanes;
        let score = BLOCK + lanes;
        let output = s.d.v_dim.next_multiple_of(isa.nr) + lanes;
        let count = s.queries();
        // Tiles are whole: there is room for queries that fill the last one.
        let (held, group, config) = if s.on_tiles(isa) {
            (count.next_multiple_of(amx::BLOCK), amx::BLOCK, TILE_CONFIG_BYTES / 4)
        } else {
            (count, count.min(isa.mr), 0)
        };
        let wide = s.panels();
        let widened = s.cache.is_quantised() && !s.direct();
        let rounds_rotated = s.rotated[0] > 1 && s.compute == ComputeType::Bf16;
        let keys = if widened { BLOCK / isa.nr * cache::wide_panel_bytes(isa, wide, s.d.qk_dim) } else { 0 };
        let values = if widened || s.d.v_from_k { cache::value_block_bytes(isa, wide, s.d.v_dim) } else { 0 };
        let mut scratch = Self {
            query,
            score,
            output,
            queries: take(held * query),
            query_f32: take(if rounds_rotated { s.d.qk_dim.next_multiple_of(lanes) } else { 0 }),
            firsts: take(count),
            ends: take(count),
            maxima: take(count),
            sums: take(count * lanes),
            rescales: take(group),
            scores: take(group * score),
            scaled: take(if s.direct() { group * score } else { 0 }),
            outputs: take(held * output),
            keys: take(keys / 4),
            values: take(values / 4),
            config: take(config),
            words: 0,
        };
        scratch.words = words;
        scratch
    }
}

/// Addresses of a call.
struct Call<'a, 'k> {
    k: &'k Kb<'k>,
    s: Shape<'a>,
    scratch: Scratch,
    q: P<'k>,
    keys: P<'k>,
    /// Absent where the keys are the values.
    values: Option<P<'k>>,
    pos: P<'k>,
    slot: P<'k>,
    sinks: Option<P<'k>>,
    out: P<'k>,
}

/// The first token that a row sees whose last is before `end`.
pub(crate) fn first<'k>(k: &'k Kb<'k>, d: &AttentionDesc, ctx: usize, end: I<'k>) -> I<'k> {
    match d.window {
        Some(w) if d.chunked => {
            let last = (end - 1).max(k.i(0));
            last - last.rem(k.i(w as i64))
        }
        Some(w) => (end - w.min(ctx)).max(k.i(0)),
        None => k.i(0),
    }
}

impl<'k> Call<'_, 'k> {
    fn slot_of(&self, row: I<'k>) -> I<'k> {
        self.slot.words(row).load_int()
    }

    fn at(&self, words: usize) -> P<'k> {
        self.k.scratch().words(words)
    }

    /// Tokens that a row attends to in a part: first, and one past the last. Empty for a padding row.
    fn range(&self, row: I<'k>, part: I<'k>) -> [I<'k>; 2] {
        let (k, ctx) = (self.k, self.s.ctx);
        let pos = self.pos.words(row).load_int();
        let pos = if self.s.d.window.is_some() { pos } else { pos.min(k.i(ctx as i64 - 1)) };
        let end = (pos + 1).max(k.i(0));
        let first = first(k, self.s.d, ctx, end);
        if self.s.splits == 1 {
            return [first, end];
        }
        // Parts are whole blocks, as many in each as can be.
        let block = k.i(BLOCK as i64);
        let (from, to) = (first.div(block), (end + (BLOCK - 1)).div(block));
        let splits = k.i(self.s.splits as i64);
        let border = |part: I<'k>| (from + ((to - from) * part).div(splits)) * BLOCK;
        [first.max(border(part)), end.min(border(part + 1))]
    }
}
