//! Heads normalised and rotated where they are read, and keys and values that go on into the cache: a warp
//! for every head of a row.

use super::GpuKernel;
use super::attention::head_bytes;
use super::launch::{Extent, Launch};
use crate::dsl::{F, I, Kb, P, WARP};
use crate::spec::{CacheWrite, Rope, Rotation, RowNorm};
use moec_ir::op::RopeStyle;
use moec_ir::types::Format;

fn by_head(heads: usize) -> Launch {
    let grid = [Extent::rows(1), Extent::fixed(heads), Extent::fixed(1)];
    Launch { grid, block: WARP as u32, shared: 0 }
}

/// Operation on a head, with the operands for it.
struct HeadOperation<'k> {
    dim: usize,
    norm: Option<(RowNorm, Option<P<'k>>)>,
    rotation: Option<(Rotation, P<'k>)>,
}

impl<'k> HeadOperation<'k> {
    fn new(
        dim: usize,
        norm: Option<RowNorm>,
        rotation: Option<Rotation>,
        arg: &mut dyn FnMut() -> P<'k>,
    ) -> Self {
        let norm = norm.map(|n| (n, n.weight.then(&mut *arg)));
        Self { dim, norm, rotation: rotation.map(|r| (r, arg())) }
    }

    /// Gives every channel of head `head` of the row at `x` to `put`. A lane reads whatever it gives before
    /// it gives it.
    fn head(&self, k: &'k Kb<'k>, x: P<'k>, [row, head]: [I<'k>; 2], put: &dyn Fn(I<'k>, F<'k>)) {
        let lane = k.lane_index();
        let own = x.words(head * self.dim);
        let norm = self.norm.map(|(n, weight)| {
            let of_row = n.width != self.dim;
            let from = if of_row { x } else { own };
            let squares = k.fold(lane, n.width, WARP, &[k.f(0.0)], |c, sum| {
                let x = from.words(c).load();
                vec![x.fma(x, sum[0])]
            });
            let mean = squares[0].warp_sum(WARP) / n.width as f32;
            let weight = weight.map(|w| if of_row { w.words(head * self.dim) } else { w });
            (k.f(1.0) / (mean + n.eps).sqrt(), weight)
        });
        let read = |c: I<'k>| {
            let x = own.words(c).load();
            match norm {
                Some((factor, Some(w))) => x * factor * w.words(c).load(),
                Some((factor, None)) => x * factor,
                None => x,
            }
        };
        let keep = |from: usize, to: usize| k.each(lane + from, to, WARP, |c| put(c, read(c)));
        let Some((r, angles)) = self.rotation else { return keep(0, self.dim) };
        let half = r.rotary / 2;
        let angles = angles.words(row * r.angles_ld);
        k.each(lane, half, WARP, |i| {
            let (cos, sin) = (angles.words(i).load(), angles.words(i + half).load());
            let [first, second] = match r.style {
                RopeStyle::Half => [i + r.offset, i + (half + r.offset)],
                RopeStyle::Interleaved => [i * 2 + r.offset, i * 2 + (r.offset + 1)],
            };
            let (a, b) = (read(first), read(second));
            put(first, a * cos - b * sin);
            put(second, b * cos + a * sin);
        });
        keep(0, r.offset);
        keep(r.offset + r.rotary, self.dim);
    }
}

impl GpuKernel for Rope {
    fn launch(&self) -> Option<Launch> {
        Some(by_head(self.heads))
    }

    fn write<'k>(&self, k: &'k Kb<'k>) {
        let &Self { dim, norm, rotation, x_ld, out_ld, .. } = self;
        let mut args = (0..).map(|i| k.arg(i));
        let mut arg = || args.next().unwrap_or(k.shared(0));
        let x = arg();
        let operation = HeadOperation::new(dim, norm, Some(rotation), &mut arg);
        let out = arg();
        let (row, head) = (k.block_index(0), k.block_index(1));
        let to = out.words(row * out_ld + head * dim);
        operation.head(k, x.words(row * x_ld), [row, head], &|c, value| to.words(c).store(value));
    }
}

impl GpuKernel for CacheWrite {
    fn launch(&self) -> Option<Launch> {
        let fits = head_bytes(self.cache, self.ctx, self.dim).filter(|_| self.rotated == 1);
        fits.map(|_| by_head(self.heads))
    }

    fn write<'k>(&self, k: &'k Kb<'k>) {
        let &Self { heads, dim, ctx, ring, cache, norm, rotation, x_ld, .. } = self;
        let mut args = (0..).map(|i| k.arg(i));
        let mut arg = || args.next().unwrap_or(k.shared(0));
        let (state, x) = (arg(), arg());
        let operation = HeadOperation::new(dim, norm, rotation, &mut arg);
        let (pos, slot) = (arg(), arg());
        let (row, head) = (k.block_index(0), k.block_index(1));
        let at = pos.words(row).load_int();
        let at = if ring { at.lt(k.i(0)).pick_int(at, at.rem(k.i(ctx as i64))) } else { at };
        k.when(at.ge(k.i(0)).and(at.lt(k.i(ctx as i64))), || {
            let place = slot.words(row).load_int() * heads + head;
            let state = state.bytes(place * head_bytes(cache, ctx, dim).unwrap_or(0));
            let put = |c: I<'k>, value: F<'k>| {
                if cache == Format::F32 {
                    state.words(at * dim).words(c).store(value);
                } else {
                    state.halves(at * dim).halves(c).store_halves(value.both_halves(k.f(0.0)));
                }
            };
            operation.head(k, x.words(row * x_ld), [row, head], &put);
        });
    }
}
