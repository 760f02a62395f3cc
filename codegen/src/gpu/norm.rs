//! Root mean square norm and layer norm: a block for every row and group of channels.

use super::GpuKernel;
use super::launch::{Extent, Launch};
use crate::dsl::{F, I, Kb, P, WARP};
use crate::spec::{ComputeType, Norm, NormKind, packed_words};

/// Threads of a block: whole warps, with eight channels for each thread where the row has enough.
fn threads(width: usize) -> usize {
    width.div_ceil(8).next_multiple_of(WARP).min(512)
}

impl GpuKernel for Norm {
    fn launch(&self) -> Option<Launch> {
        if self.outs.iter().any(|out| out.compute == ComputeType::I8) {
            return None;
        }
        let block = threads(self.width) as u32;
        let grid = [Extent::rows(1), Extent::fixed(self.groups), Extent::fixed(1)];
        Some(Launch { grid, block, shared: 2 * 4 * block / WARP as u32 })
    }

    fn write<'k>(&self, k: &'k Kb<'k>) {
        let &Self { kind, width, x_ld, ref outs, eps, weight, .. } = self;
        let mut args = (0..).map(|i| k.arg(i));
        let mut arg = || args.next().unwrap_or(k.shared(0));
        let x = arg();
        let weight = weight.then(&mut arg);
        let bias = (kind == NormKind::Layer).then(&mut arg);
        let outs: Vec<_> = outs.iter().map(|out| (arg(), *out)).collect();
        let threads = threads(width);
        let (row, group) = (k.block_index(0), k.block_index(1));
        let x = x.words(row * x_ld + group * width);
        let sum = |value: &dyn Fn(I<'k>) -> F<'k>, at: usize| {
            let own = k.fold(k.thread(), width, threads, &[k.f(0.0)], |c, sum| vec![sum[0] + value(c)]);
            block_sum(k, own[0], threads, k.shared(at))
        };
        let mean = match kind {
            NormKind::Rms => None,
            NormKind::Layer => Some(sum(&|c| x.words(c).load(), 0) / width as f32),
        };
        let centred = |c: I<'k>| {
            let x = x.words(c).load();
            mean.map_or(x, |mean| x - mean)
        };
        let squares = sum(&|c| centred(c) * centred(c), 4 * threads / WARP);
        let factor = k.f(1.0) / (squares / width as f32 + eps).sqrt();
        let normal = |c: I<'k>| {
            let x = centred(c) * factor;
            let x = weight.map_or(x, |w| x * w.words(c).load());
            bias.map_or(x, |b| x + b.words(c).load())
        };
        // Every thread reads the elements that it writes, and no others, so a result may be the operand.
        let (pairs, floats): (Vec<_>, Vec<_>) =
            outs.into_iter().partition(|(_, out)| out.compute == ComputeType::Bf16);
        for (to, out) in pairs {
            let to = to.words(row * out.ld + group * packed_words(width, out.compute));
            k.each(k.thread(), width.div_ceil(2), threads, |pair| {
                let (lower, upper) = (pair * 2, (pair * 2 + 1).min(k.i(width as i64 - 1)));
                let there = (pair * 2 + 1).lt(k.i(width as i64));
                let word = normal(lower).both_halves(there.pick(normal(upper), k.f(0.0)));
                to.words(pair).store_int(word);
            });
        }
        for (to, out) in floats {
            let to = to.words(row * out.ld + group * width);
            k.each(k.thread(), width, threads, |c| to.words(c).store(normal(c)));
        }
    }
}

/// Sum over the threads of a block, which all get it; `at` is shared memory of a word per warp, not used
/// otherwise.
pub(super) fn block_sum<'k>(k: &'k Kb<'k>, own: F<'k>, threads: usize, at: P<'k>) -> F<'k> {
    let warp = own.warp_sum(WARP);
    k.when(k.lane_index().equals(k.i(0)), || at.words(k.warp_index()).store(warp));
    k.barrier();
    (1..threads / WARP).fold(at.load(), |sum, w| sum + at.words(w).load())
}
