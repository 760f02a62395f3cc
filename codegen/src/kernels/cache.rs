//! The KV cache: writes tokens, normalised and rotated, in the order that attention reads.

mod codes;
mod widen;

pub(super) use codes::{ValuePanel, Values, key_scale};
pub(super) use widen::{turn_keys, wide_panel_bytes, widen_keys, widen_values};

use super::position::{self, HeadOperation, Rotation, RowNorm};
use super::{GpuKernel, Kernel, Rule, hadamard};
use crate::dsl::{F, I, Kb, P};
use crate::machine::Isa;
use crate::spec::Symbol;
use codes::{fifth_bits, low_bits, panel_group_bytes, quads, quantise};
use moec_ir::plan::{CacheOrder, Grid, Results};
use moec_ir::state::CacheHead;
use moec_ir::types::{Format, GROUP};

/// Tokens of a block of values, and of a step of attention.
pub const BLOCK: usize = 128;

/// Rows of a work item: as many tokens as are stored together, at most.
const ROWS: usize = 16;

/// Order of the keys that attention reads.
pub fn key_order(isa: &Isa) -> CacheOrder {
    CacheOrder::Keys { nr: isa.nr as u32 }
}

/// Order of the values that attention reads.
pub fn value_order(isa: &Isa) -> CacheOrder {
    CacheOrder::Values { nr: isa.nr as u32, block: BLOCK as u32 }
}

/// Bytes of a (slot, head).
pub(crate) fn head_bytes(isa: &Isa, format: Format, values: bool, ctx: usize, dim: usize) -> usize {
    let order = if values { value_order(isa) } else { key_order(isa) };
    CacheHead { format, order, ctx, dim }.bytes().unwrap_or(0)
}

/// Bytes of one panel of keys.
pub(crate) fn key_panel_bytes(isa: &Isa, format: Format, dim: usize) -> usize {
    head_bytes(isa, format, false, isa.nr, dim)
}

/// Bytes of one block of values.
pub(crate) fn value_block_bytes(isa: &Isa, format: Format, dim: usize) -> usize {
    head_bytes(isa, format, true, BLOCK, dim)
}

/// Bytes of the scratch of a cache write that hold a token of one head in bf16, or one group of codes.
fn small_bytes(dim: usize) -> usize {
    // Room for a whole vector after the last number.
    (dim * 2).next_multiple_of(64) + 64
}

/// Words from one token's head to the next in the scratch: an odd number of cache lines.
fn prepared_ld(dim: usize) -> usize {
    (dim.div_ceil(16) | 1) * 16
}

/// Place of a token: its (slot, head), and its number in it.
struct Token<'k> {
    head: P<'k>,
    at: I<'k>,
}

/// Heads `x` of tokens that are stored together, and the words from one to the next.
type Heads<'k> = (P<'k>, usize);

/// `[state, x, norm weight?, angles?, pos i32, slot i32]`: rows into a KV-cache tensor, ordered as
/// [`crate::key_order`] or [`crate::value_order`] says, normalised and rotated by their positions before, if so,
/// and in the end by a Hadamard matrix. Rows with a
/// position outside of `0 .. ctx` are skipped; in a ring those below 0 alone, and position `p` goes to row `p
/// mod ctx`.
#[derive(Clone, Debug, PartialEq)]
pub struct CacheWrite {
    /// Heads.
    pub heads: usize,
    /// Channels of a head.
    pub dim: usize,
    /// Tokens of the state.
    pub ctx: usize,
    /// Whether the state is a ring of whole blocks ([`CACHE_BLOCK`](crate::CACHE_BLOCK)).
    pub ring: bool,
    /// Format of the state.
    pub cache: Format,
    /// Channels of a block of a head that is stored [rotated](moec_ir::state::rotate); 1: heads as they are.
    pub rotated: usize,
    /// Whether they are values, not keys.
    pub values: bool,
    /// The norm before.
    pub norm: Option<RowNorm>,
    /// The rotation before.
    pub rotation: Option<Rotation>,
    /// Heads of a work item: all of them, or a divisor of their number.
    pub each: usize,
    /// Row distance of `x`.
    pub x_ld: usize,
}

impl Kernel for CacheWrite {
    fn kind(&self) -> &'static str {
        "cache_write"
    }

    fn name(&self, s: &mut Symbol, isa: &Isa) {
        s.word("cache_write").word(if self.values { "values" } else { "keys" }).word(self.cache.name());
        s.num("p", isa.nr).num("h", self.heads).num("d", self.dim).num("ctx", self.ctx).num("x", self.x_ld);
        s.flag("ring", self.ring).option("rot", (self.rotated > 1).then_some(self.rotated));
        s.option("n", (self.each != self.heads).then_some(self.each));
        if let Some(r) = self.rotation {
            s.rotation(r);
        }
        s.norm(self.norm);
    }

    fn grid(&self, _isa: &Isa) -> Grid {
        Grid::Tiles { rows: ROWS as u32, tiles: (self.heads / self.each.max(1)) as u32 }
    }

    fn args(&self) -> usize {
        4 + RowNorm::args(self.norm) + usize::from(self.rotation.is_some())
    }

    fn results(&self) -> Results {
        Results::new([0]).unwrap_or_default()
    }

    /// Scratch for a token in another format, then for the heads of tokens and the factors of their norms.
    fn scratch_bytes(&self, isa: &Isa) -> usize {
        let &Self { dim, rotated, norm, rotation, .. } = self;
        let is_moved = norm.is_some() || rotation.is_some() || rotated > 1;
        small_bytes(dim) + if is_moved { isa.lanes * (prepared_ld(dim) + 1) * 4 } else { 0 }
    }

    fn rules(&self, isa: &Isa) -> Vec<Rule> {
        let &Self { heads, dim, ctx, ring, cache, rotated, values, norm, rotation, each, x_ld } = self;
        let mut rules = vec![
            (x_ld >= heads * dim, "rows overlap"),
            (dim > 0 && ctx > 0, "an extent is zero"),
            (!ring || ctx.is_multiple_of(BLOCK), "a ring of no whole blocks"),
            (each > 0 && heads.is_multiple_of(each.max(1)), "heads that no work item has"),
            // GPU kernels have an order of their own, and refuse formats themselves.
            (isa.is_thread() || head_bytes(isa, cache, values, ctx, dim) > 0, "a cache of another format"),
            rotation_rule(rotated, dim),
        ];
        rules.extend(position::rules(heads, dim, norm, rotation));
        rules
    }

    fn on_gpu(&self) -> Option<&dyn GpuKernel> {
        Some(self)
    }

    fn write<'k>(&self, k: &'k Kb<'k>) {
        let &Self { heads, dim, ctx, ring, cache, rotated, values, norm, rotation, each, x_ld } = self;
        let head_bytes = head_bytes(&k.isa, cache, values, ctx, dim);
        let mut args = (0..).map(|i| k.arg(i));
        let mut arg = || args.next().unwrap_or(k.scratch());
        let (state, x) = (arg(), arg());
        let operation = HeadOperation::new(dim, norm, rotation, &mut arg);
        let (pos, slot) = (arg(), arg());
        // The row of the state that a row goes to.
        let place = |row: I<'k>| {
            let at = pos.words(row).load_int();
            if ring { at.lt(k.i(0)).pick_int(at, at.rem(k.i(ctx as i64))) } else { at }
        };
        let prepared = k.scratch().bytes(small_bytes(dim));
        let factors = prepared.words(k.lanes() * prepared_ld(dim));
        // The heads of `count` tokens from `row` on, one head after the other.
        let each_head = |tile: I<'k>, row: I<'k>, count: usize, put: &dyn Fn(Heads<'k>, &Token<'k>)| {
            let (slots, at) = (slot.words(row).load_int() * heads, place(row));
            k.each(0, count, 1, |i| {
                if let Some(factor) = operation.of_row(k, x.words((row + i) * x_ld)) {
                    factors.words(i).store(factor);
                }
            });
            k.each(tile * each, (tile + 1) * each, 1, |head| {
                let token = Token { head: state.bytes((slots + head) * head_bytes), at };
                if operation.is_plain() && rotated < 2 {
                    return put((x.words(row * x_ld + head * dim), x_ld), &token);
                }
                k.each(0, count, 1, |i| {
                    let at = (x.words((row + i) * x_ld), row + i, head);
                    let of_row = operation.is_of_rows().then(|| factors.words(i).load());
                    let to = prepared.words(i * prepared_ld(dim));
                    operation.head(k, at, of_row, to, None);
                    hadamard::rotate(k, to, dim, rotated);
                });
                put((prepared, prepared_ld(dim)), &token);
            });
        };
        let one = |tile: I<'k>, row: I<'k>| {
            let at = place(row);
            k.when(at.ge(k.i(0)).and(at.lt(k.i(ctx as i64))), || {
                each_head(tile, row, 1, &|(x, _), token| {
                    if values {
                        put_value(k, cache, dim, x, token);
                    } else {
                        put_key(k, cache, dim, x, token);
                    }
                });
            });
        };
        // A word of values in bf16 has two tokens, and the words of a key are as far apart as tokens are in a
        // panel. So as many tokens as a vector has lanes are stored together. Where a token's numbers are
        // contiguous this gains nothing.
        if cache.is_quantised() || (values && cache == Format::F32) {
            return k.tiles(ROWS, |tile, first, end| k.each(first, end, 1, |row| one(tile, row)));
        }
        let lanes = k.lanes();
        k.tiles(ROWS, |tile, first, end| {
            k.fold(first, end, 1, &[first], |row, next| {
                let begins = row.ge(next[0]);
                let run =
                    begins.and(is_run(k, pos, slot, row, end)).and(pos.words(row).load_int().ge(k.i(0)));
                let run = run.and((place(row) + (lanes - 1)).lt(k.i(ctx as i64)));
                k.when(run, || {
                    each_head(tile, row, lanes, &|x, token| {
                        if values {
                            put_values(k, dim, x, token);
                        } else {
                            put_keys(k, cache, dim, x, token);
                        }
                    });
                });
                k.when(begins.and(run.not()), || one(tile, row));
                vec![begins.pick_int(run.pick_int(row + lanes, row + 1), next[0])]
            });
        });
    }
}

/// Whether the rows from `row` on, one for each lane of a vector, are consecutive tokens of one slot, the
/// first at a multiple of their number.
fn is_run<'k>(k: &'k Kb<'k>, pos: P<'k>, slot: P<'k>, row: I<'k>, end: I<'k>) -> I<'k> {
    let (lanes, there) = (k.lanes(), k.span_before(end - row));
    let [at, of] = [pos, slot].map(|p| p.words(row).load_vec(there).bits());
    let [first, same] = [pos, slot].map(|p| p.words(row).load_int());
    // Lanes that are not there are zero, which no position after the first is.
    let runs = at.equals(first.narrow().splat(lanes) + k.lane_ids());
    let runs = runs.and(of.equals(same.narrow().splat(lanes))).pick_int(k.i32v(1), k.i32v(0));
    runs.lanes_min().wide().equals(k.i(1)).and(first.rem(k.i(lanes as i64)).equals(k.i(0)))
}

/// Stores one head of as many tokens as a vector has lanes among the keys: `x` is the head of the first, `ld`
/// the words from row to row. They are in one panel.
fn put_keys<'k>(k: &'k Kb<'k>, format: Format, dim: usize, (x, ld): Heads<'k>, token: &Token<'k>) {
    let (nr, lanes) = (k.isa.nr, k.lanes());
    let width = k.i(nr as i64);
    let panel = token.head.bytes(token.at.div(width) * key_panel_bytes(&k.isa, format, dim));
    let to = panel.words(token.at.rem(width));
    // Words of a token: a channel, or a pair of them. An odd last channel has a zero beside it.
    let per_word = if format == Format::F32 { 1 } else { 2 };
    let words = dim.div_ceil(per_word);
    let transpose_words = |word: I<'k>, count: usize, channels: usize| {
        let part = |row: usize, i: usize| {
            let at = x.words(word * per_word).words(row * ld + i * lanes);
            match channels.saturating_sub(i * lanes) {
                0 => k.fv(0.0),
                n => at.load_vec(k.span(n)),
            }
        };
        let row = |row: usize| {
            if per_word == 1 {
                return part(row, 0);
            }
            let [even, odd] = part(row, 0).unzip(part(row, 1));
            even.pair_bf16(odd).as_float()
        };
        let turned = F::transpose(&(0..lanes).map(row).collect::<Vec<_>>());
        for (i, x) in turned.into_iter().enumerate().take(count) {
            to.words(word * nr).words(i * nr).store(x);
        }
    };
    let whole = words / lanes * lanes;
    let whole = if whole * per_word > dim { whole - lanes } else { whole };
    k.each(0, whole, lanes, |word| transpose_words(word, lanes, lanes * per_word));
    if words > whole {
        transpose_words(k.i(whole as i64), words - whole, dim - whole * per_word);
    }
}

/// Stores one token of one head among the keys.
fn put_key<'k>(k: &'k Kb<'k>, format: Format, dim: usize, x: P<'k>, token: &Token<'k>) {
    let (nr, small) = (k.isa.nr, k.scratch());
    let width = k.i(nr as i64);
    let panel = token.head.bytes(token.at.div(width) * key_panel_bytes(&k.isa, format, dim));
    let t = token.at.rem(width);
    match format {
        Format::F32 => k.each(0, dim, 1, |c| panel.words(c * nr + t).store(x.words(c).load())),
        Format::Q5 | Format::Q4 => quantise(k, format, x, dim, |group, _, scale| {
            let panel = panel.bytes(group * panel_group_bytes(format, nr));
            panel.bytes(nr * format.block_bytes()).halves(t).store_halves(scale);
            let quads = quads(k);
            for (word, quads) in quads.iter().zip(&quads[4..]).map(|(a, b)| low_bits(*a, *b)).enumerate() {
                panel.words(t).words(word * nr).store_int(quads);
            }
            if format == Format::Q5 {
                let bits = (0..).zip(&quads).map(|(i, quad)| (quad.shr(4) & 0x0101_0101).shl(i));
                if let Some(bits) = bits.reduce(|a, b| a | b) {
                    panel.words(t).words(4 * nr).store_int(bits);
                }
            }
        }),
        Format::Q8 => quantise(k, format, x, dim, |group, _, scale| {
            let panel = panel.bytes(group * (nr * (GROUP + 2)));
            panel.bytes(nr * GROUP).halves(t).store_halves(scale);
            k.each(0, GROUP, 1, |c| small.bytes(c).copy_byte(panel.bytes(c * nr + t)));
        }),
        _ => {
            // An odd last channel has a zero beside it.
            k.round_row(x, small, dim);
            k.each(0, dim.div_ceil(2), 1, |c| panel.words(c * nr + t).store_int(small.words(c).load_word()));
        }
    }
}

/// Stores one head of as many tokens as a vector has lanes among the values, in bf16. They are in one block.
fn put_values<'k>(k: &'k Kb<'k>, dim: usize, (x, ld): Heads<'k>, token: &Token<'k>) {
    let (nr, lanes) = (k.isa.nr, k.lanes());
    let block = k.i(BLOCK as i64);
    let to = token.head.bytes(token.at.div(block) * value_block_bytes(&k.isa, Format::Bf16, dim));
    let to = to.words(token.at.rem(block).div(k.i(2)) * nr);
    k.columns(dim, |c, span| {
        let to = to.words(c.div(k.i(nr as i64)) * (nr * BLOCK / 2) + c.rem(k.i(nr as i64)));
        for pair in 0..lanes / 2 {
            let [even, odd] = [0, 1].map(|i| x.words((2 * pair + i) * ld).words(c).load_vec(span));
            to.words(pair * nr).store_vec(even.pair_bf16(odd).as_float(), span);
        }
    });
}

/// Stores one token of one head among the values.
fn put_value<'k>(k: &'k Kb<'k>, format: Format, dim: usize, x: P<'k>, token: &Token<'k>) {
    let (nr, small) = (k.isa.nr, k.scratch());
    let index = |n: usize| k.i(n as i64);
    let block = token.head.bytes(token.at.div(index(BLOCK)) * value_block_bytes(&k.isa, format, dim));
    let t = token.at.rem(index(BLOCK));
    // Tokens are in pairs, so that neighbours share a word: only the own half is written.
    let pair = t.div(index(2)) * (2 * nr) + t.rem(index(2));
    let place = |c: I<'k>| c.div(index(nr)) * (nr * BLOCK) + pair + c.rem(index(nr)) * 2;
    match format {
        Format::F32 => {
            let panel = |p: I<'k>, width| {
                k.copy(x.words(p * nr), block.words(p * (nr * BLOCK) + t * nr), width);
            };
            k.each(0, dim / nr, 1, |p| panel(p, nr));
            if !dim.is_multiple_of(nr) {
                panel(index(dim / nr), dim % nr);
            }
        }
        Format::Q5 | Format::Q4 => {
            let parts = Values::of(k, format, dim, block);
            quantise(k, format, x, dim, |group, width, scale| {
                parts.scales.halves(group * BLOCK + t).store_halves(scale);
                let quads = quads(k);
                // Panels of this group, one after the other.
                for (i, of_panel) in quads.chunks_exact(nr / 4).enumerate().take(width.div_ceil(nr)) {
                    let panel = parts.panel(k, group * (GROUP / nr) + i);
                    let to = panel.low.bytes(t * (nr / 2));
                    let (first, second) = of_panel.split_at(nr / 8);
                    for (word, (&a, &b)) in first.iter().zip(second).enumerate() {
                        to.words(word).store_int(low_bits(a, b));
                    }
                    if let Some(fifth) = panel.fifth {
                        let bits = (0..).zip(of_panel).map(|(i, &quad)| fifth_bits(quad).shl(4 * i));
                        if let Some(bits) = bits.reduce(|a, b| a | b) {
                            let (from, to) = (small.words(GROUP / 2), fifth.bytes(t * (nr / 8)));
                            from.store_int(bits);
                            k.each(0, nr / 8, 1, |byte| from.bytes(byte).copy_byte(to.bytes(byte)));
                        }
                    }
                }
            });
        }
        Format::Q8 => {
            let scales = block.bytes(dim.next_multiple_of(nr) * BLOCK);
            quantise(k, format, x, dim, |group, width, scale| {
                scales.halves(group * BLOCK + t).store_halves(scale);
                k.each(0, width, 1, |i| {
                    let c = group * GROUP + i;
                    let to = c.div(index(nr)) * (nr * BLOCK) + t * nr + c.rem(index(nr));
                    small.bytes(i).copy_byte(block.bytes(to));
                });
            });
        }
        _ => {
            k.round_row(x, small, dim);
            k.each(0, dim, 1, |c| small.halves(c).copy_half(block.halves(place(c))));
        }
    }
}

/// Whether heads of `dim` channels have whole blocks.
pub(super) fn rotation_rule(rotated: usize, dim: usize) -> Rule {
    let whole = rotated.is_power_of_two() && dim.is_multiple_of(rotated.max(1));
    (whole, "a rotation that is not of whole blocks")
}
