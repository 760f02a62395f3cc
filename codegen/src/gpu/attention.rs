//! Attention over a cache with an online softmax (Milakov and Gimelshein, *Online normalizer calculation for
//! softmax*, 2018). A block has a row, some query heads of a key-value head, and a part of the tokens.
//!
//! Some lanes of a warp, a team, share a token: each lane reads 16 bytes of its key at a time, and the
//! queries stay in registers. Every team goes through its own tokens with its own maximum, sum and result. At
//! the end the teams of the block are joined as parts are.

use super::GpuKernel;
use super::launch::{Extent, Launch};
use crate::dsl::{F, HalfType, I, Kb, P, WARP};
use crate::kernels::attention::first;
use crate::spec::{Attention, AttentionMerge};
use moec_ir::op::AttentionDesc;
use moec_ir::state::CacheHead;
use moec_ir::types::Format;

const LOG2_E: f32 = std::f32::consts::LOG2_E;
/// A maximum below every score: not infinite, so that differences of two are numbers.
const LOWEST: f32 = -1e30;
/// Warps of a block.
const WARPS: usize = 4;
/// Numbers of queries and results that a lane holds, about.
const HELD: usize = 96;
/// Parts have a multiple of this many tokens.
const BLOCK: usize = 32;

/// Shape, fixed at build time.
struct Shape<'a> {
    d: &'a AttentionDesc,
    cache: Format,
    ctx: usize,
    splits: usize,
    q_ld: usize,
    out_ld: usize,
}

impl<'a> Shape<'a> {
    fn of(spec: &'a Attention) -> Option<Self> {
        let &Attention { ref desc, cache, rotated, ctx, splits, q_ld, out_ld, .. } = spec;
        let shape = Self { d: desc, cache, ctx, splits, q_ld, out_ld };
        let fits = matches!(cache, Format::F32 | Format::Bf16)
            && rotated == [1; 2]
            && desc.qk_dim.max(desc.v_dim) <= 1024;
        (fits && shape.chunk() > 0).then_some(shape)
    }

    /// Channels that a lane reads at once: 16 bytes, fewer where heads are no multiple of that.
    fn chunk(&self) -> usize {
        let most = if self.cache == Format::F32 { 4 } else { 8 };
        let all = self.d.qk_dim | self.d.v_dim;
        let least = if self.cache == Format::F32 { 1 } else { 2 };
        [8, 4, 2, 1].into_iter().find(|c| *c <= most && *c >= least && all.is_multiple_of(*c)).unwrap_or(0)
    }

    /// Lanes that share a token.
    fn team(&self) -> usize {
        let chunks = self.d.qk_dim.max(self.d.v_dim).div_ceil(self.chunk());
        chunks.next_power_of_two().min(WARP)
    }

    /// Chunks of a lane.
    fn rounds(&self, dim: usize) -> usize {
        dim.div_ceil(self.chunk() * self.team())
    }

    /// Query heads of a block: as many as registers hold.
    fn heads(&self) -> usize {
        let shared = self.d.heads / self.d.kv_heads;
        let each = (self.rounds(self.d.qk_dim) + self.rounds(self.d.v_dim)) * self.chunk();
        (1..=shared).rev().find(|h| shared.is_multiple_of(*h) && h * each <= HELD).unwrap_or(1)
    }

    /// Teams of a block.
    fn teams(&self) -> usize {
        WARPS * WARP / self.team()
    }

    /// Words of a team's result of a head: maximum, sum, values.
    fn words(&self) -> usize {
        self.d.v_dim + 2
    }

    /// Words of a team's results, warp by warp: teams of a warp join by shuffles.
    fn shared(&self) -> usize {
        WARPS * self.heads() * self.words()
    }

    fn head_bytes(&self, dim: usize) -> usize {
        head_bytes(self.cache, self.ctx, dim).unwrap_or(0)
    }
}

/// Bytes of a (slot, head); `None` where the cache has another format.
pub(super) fn head_bytes(format: Format, ctx: usize, dim: usize) -> Option<usize> {
    let order = super::CACHE_ORDER;
    let whole = matches!(format, Format::F32) || format == Format::Bf16 && dim.is_multiple_of(2);
    CacheHead { format, order, ctx, dim }.bytes().filter(|_| whole)
}

impl GpuKernel for Attention {
    fn launch(&self) -> Option<Launch> {
        let s = Shape::of(self)?;
        let shared = (s.shared() * 4) as u32;
        let grid = [Extent::rows(1), Extent::fixed(s.d.heads / s.heads()), Extent::fixed(s.splits)];
        (shared <= 48 << 10).then_some(Launch { grid, block: (WARPS * WARP) as u32, shared })
    }

    fn write<'k>(&self, k: &'k Kb<'k>) {
        let Some(s) = Shape::of(self) else {
            return k.fail("no such attention");
        };
        let d = s.d;
        let mut args = (0..).map(|i| k.arg(i));
        let mut arg = || args.next().unwrap_or(k.shared(0));
        let (q, keys) = (arg(), arg());
        let values = (!d.v_from_k).then(&mut arg);
        let (pos, slot) = (arg(), arg());
        let sinks = (d.sinks && s.splits == 1).then(&mut arg);
        let out = arg();

        let (row, part) = (k.block_index(0), k.block_index(2));
        let heads = s.heads();
        let first_head = k.block_index(1) * heads;
        let kv_head = first_head.div(k.i((d.heads / d.kv_heads) as i64));
        let [first, end] = range(k, &s, pos.words(row).load_int(), part);
        let at = slot.words(row).load_int() * d.kv_heads + kv_head;
        let keys = keys.bytes(at * s.head_bytes(d.qk_dim));
        let values = values.map(|v| v.bytes(at * s.head_bytes(d.v_dim)));

        let team = s.team();
        let lane = k.lane_index() & (team - 1);
        let own = k.thread().div(k.i(team as i64));
        let queries: Vec<Vec<F<'k>>> = (0..heads)
            .map(|h| {
                let q = q.words(row * s.q_ld + (first_head + h) * d.qk_dim);
                let numbers = read(k, &s, (q, Format::F32, s.q_ld | d.qk_dim), d.qk_dim, lane);
                numbers.into_iter().map(|x| x * (d.scale * LOG2_E)).collect()
            })
            .collect();
        let held = s.rounds(d.v_dim) * s.chunk();
        let start: Vec<F<'k>> = (0..heads).flat_map(|_| Running::new(k, held).to_vec()).collect();
        // All teams take as many steps: lanes of a warp stay together.
        let states = k.fold(first, end, s.teams(), &start, |token, states| {
            let token = token + own;
            let there = token.lt(end);
            let token = token.min(end - 1);
            let token = if d.window.is_some() { token.rem(k.i(s.ctx as i64)) } else { token };
            let size = if s.cache == Format::F32 { 4 } else { 2 };
            let key = keys.bytes(token * (d.qk_dim * size));
            let key = read(k, &s, (key, s.cache, s.chunk()), d.qk_dim, lane);
            let value = values.map(|v| {
                let v = v.bytes(token * (d.v_dim * size));
                read(k, &s, (v, s.cache, s.chunk()), d.v_dim, lane)
            });
            let mut next = Vec::with_capacity(states.len());
            for (q, state) in queries.iter().zip(states.chunks(held + 2)) {
                let dot = q.iter().zip(&key).fold(k.f(0.0), |sum, (&q, &x)| q.fma(x, sum)).warp_sum(team);
                let state = Running::from(state);
                let max = there.pick(state.max.max(dot), state.max);
                let fade = (state.max - max).exp2_down(false);
                let weight = there.pick((dot - max).exp2_down(false), k.f(0.0));
                let value = value.as_ref().unwrap_or(&key);
                let values = state.values.iter().zip(value).map(|(&sum, &x)| weight.fma(x, sum * fade));
                next.extend(
                    Running { max, sum: state.sum.fma(fade, weight), values: values.collect() }.to_vec(),
                );
            }
            next
        });
        let joined = join_warp(&s, &states, held);
        finish(k, &s, &joined, lane, (row, first_head, part), sinks, out);
    }
}

/// A softmax that goes along, of one head.
#[derive(Clone)]
struct Running<'k> {
    max: F<'k>,
    sum: F<'k>,
    values: Vec<F<'k>>,
}

impl<'k> Running<'k> {
    fn new(k: &'k Kb<'k>, values: usize) -> Self {
        Self { max: k.f(LOWEST), sum: k.f(0.0), values: vec![k.f(0.0); values] }
    }

    fn to_vec(&self) -> Vec<F<'k>> {
        [self.max, self.sum].into_iter().chain(self.values.iter().copied()).collect()
    }

    fn from(all: &[F<'k>]) -> Self {
        Self { max: all[0], sum: all[1], values: all[2..].to_vec() }
    }

    /// With another one joined.
    fn join(&self, other: &Self) -> Self {
        let max = self.max.max(other.max);
        let (a, b) = ((self.max - max).exp2_down(false), (other.max - max).exp2_down(false));
        let values = self.values.iter().zip(&other.values).map(|(&x, &y)| x.fma(a, y * b)).collect();
        Self { max, sum: self.sum.fma(a, other.sum * b), values }
    }
}

/// Tokens that a row attends to in a part: first, and one past the last. Empty for a padding row.
fn range<'k>(k: &'k Kb<'k>, s: &Shape<'_>, pos: I<'k>, part: I<'k>) -> [I<'k>; 2] {
    let pos = if s.d.window.is_some() { pos } else { pos.min(k.i(s.ctx as i64 - 1)) };
    let end = (pos + 1).max(k.i(0));
    let first = first(k, s.d, s.ctx, end);
    if s.splits == 1 {
        return [first, end];
    }
    let block = k.i(BLOCK as i64);
    let (from, to) = (first.div(block), (end + (BLOCK - 1)).div(block));
    let border = |part: I<'k>| (from + ((to - from) * part).div(k.i(s.splits as i64))) * BLOCK;
    [first.max(border(part)), end.min(border(part + 1))]
}

/// The channels of a lane of a team: chunk `lane`, then chunks at a distance of the team's lanes; zeros past
/// the end. Rows of f32 begin at multiples of `aligned` of them.
fn read<'k>(
    k: &'k Kb<'k>,
    s: &Shape<'_>,
    (at, format, aligned): (P<'k>, Format, usize),
    dim: usize,
    lane: I<'k>,
) -> Vec<F<'k>> {
    let (chunk, team) = (s.chunk(), s.team());
    let mut all = Vec::new();
    for round in 0..s.rounds(dim) {
        let channel = (lane + round * team) * chunk;
        let whole = (round + 1) * team * chunk <= dim;
        let channel = if whole { channel } else { channel.min(k.i((dim - chunk) as i64)) };
        let numbers: Vec<F<'k>> = if format == Format::F32 {
            at.words(channel).load_floats(chunk, aligned)
        } else {
            let words = at.bytes(channel * 2).load_words(chunk / 2);
            words.into_iter().flat_map(|w| w.unpack(HalfType::Bf16)).collect()
        };
        let inside = ((lane + round * team) * chunk).lt(k.i(dim as i64));
        all.extend(numbers.into_iter().map(|x| if whole { x } else { inside.pick(x, k.f(0.0)) }));
    }
    all
}

/// The teams of a warp joined, in all of them.
fn join_warp<'k>(s: &Shape<'_>, states: &[F<'k>], held: usize) -> Vec<Running<'k>> {
    let mut by = s.team();
    let mut heads: Vec<_> = states.chunks(held + 2).map(Running::from).collect();
    while by < WARP {
        for state in &mut heads {
            let other: Vec<_> = state.to_vec().into_iter().map(|x| x.lane_xor(by)).collect();
            *state = state.join(&Running::from(&other));
        }
        by *= 2;
    }
    heads
}

/// Joins the warps of the block and stores the result, of the whole softmax or as a part.
fn finish<'k>(
    k: &'k Kb<'k>,
    s: &Shape<'_>,
    states: &[Running<'k>],
    lane: I<'k>,
    (row, first_head, part): (I<'k>, I<'k>, I<'k>),
    sinks: Option<P<'k>>,
    out: P<'k>,
) {
    let (d, words, heads) = (s.d, s.words(), s.heads());
    let place = |warp: I<'k>, head: usize| k.shared((warp * heads + head) * (words * 4));
    // The first team of each warp writes what it holds.
    k.when(k.lane_index().lt(k.i(s.team() as i64)), || {
        for (h, state) in states.iter().enumerate() {
            let to = place(k.warp_index(), h);
            k.when(lane.equals(k.i(0)), || {
                to.store(state.max);
                to.words(1).store(state.sum);
            });
            for (i, &x) in state.values.iter().enumerate() {
                let channel = (lane + i / s.chunk() * s.team()) * s.chunk() + i % s.chunk();
                k.when(channel.lt(k.i(d.v_dim as i64)), || to.words(channel + 2).store(x));
            }
        }
    });
    k.barrier();
    for h in 0..heads {
        let head = first_head + h;
        let parts: Vec<_> = (0..WARPS).map(|w| place(k.i(w as i64), h)).collect();
        // A sink is a key without a value.
        let sink = sinks.map(|p| p.words(head).load() * LOG2_E);
        let max = parts.iter().fold(sink.unwrap_or(k.f(LOWEST)), |max, p| max.max(p.load()));
        let factors: Vec<_> = parts.iter().map(|p| (p.load() - max).exp2_down(false)).collect();
        let start = sink.map_or(k.f(0.0), |sink| (sink - max).exp2_down(false));
        let terms = parts.iter().zip(&factors);
        let sum = terms.clone().fold(start, |sum, (p, &f)| p.words(1).load().fma(f, sum));
        let value =
            |c: I<'k>| terms.clone().fold(k.f(0.0), |total, (p, &f)| p.words(c + 2).load().fma(f, total));
        if s.splits > 1 {
            let at = row * s.out_ld + (head * s.splits + part) * words;
            let to = out.words(at);
            k.when(k.thread().equals(k.i(0)), || {
                to.store(max);
                to.words(1).store(sum);
            });
            k.each(k.thread(), d.v_dim, WARPS * WARP, |c| to.words(c + 2).store(value(c)));
        } else {
            let factor = sum.gt(k.f(0.0)).pick(k.f(1.0) / sum, k.f(0.0));
            let to = out.words(row * s.out_ld + head * d.v_dim);
            k.each(k.thread(), d.v_dim, WARPS * WARP, |c| to.words(c).store(value(c) * factor));
        }
    }
}

/// Threads that join parts.
const MERGERS: usize = 64;

/// Parts of attention joined: the same softmax over parts as over tokens. A block has a row and a head.
impl GpuKernel for AttentionMerge {
    fn launch(&self) -> Option<Launch> {
        let grid = [Extent::rows(1), Extent::fixed(self.heads), Extent::fixed(1)];
        Some(Launch { grid, block: MERGERS as u32, shared: 0 })
    }

    fn write<'k>(&self, k: &'k Kb<'k>) {
        let &Self { heads, v_dim, splits, sinks, out_ld } = self;
        let parts = k.arg(0);
        let sinks = sinks.then(|| k.arg(1));
        let out = k.arg(1 + usize::from(sinks.is_some()));
        let (row, head) = (k.block_index(0), k.block_index(1));
        let words = v_dim + 2;
        let parts = parts.words((row * heads + head) * (splits * words));
        let part = |i: I<'k>| parts.words(i * words);
        let sink = sinks.map(|p| p.words(head).load() * LOG2_E);
        let lowest = sink.unwrap_or(k.f(LOWEST));
        let max = k.fold(0, splits, 1, &[lowest], |i, max| vec![max[0].max(part(i).load())])[0];
        let factor = |i: I<'k>| (part(i).load() - max).exp2_down(false);
        let start = sink.map_or(k.f(0.0), |sink| (sink - max).exp2_down(false));
        let sum =
            k.fold(0, splits, 1, &[start], |i, sum| vec![part(i).words(1).load().fma(factor(i), sum[0])])[0];
        let whole = sum.gt(k.f(0.0)).pick(k.f(1.0) / sum, k.f(0.0));
        let to = out.words(row * out_ld + head * v_dim);
        k.each(k.thread(), v_dim, MERGERS, |c| {
            let total = k.fold(0, splits, 1, &[k.f(0.0)], |i, total| {
                vec![part(i).words(c + 2).load().fma(factor(i), total[0])]
            });
            to.words(c).store(total[0] * whole);
        });
    }
}
