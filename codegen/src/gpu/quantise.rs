//! Rows brought to the compute type of a matrix kernel: f32 at another distance, or pairs of bf16. A thread
//! for every word; rows of bytes are the CPU's.

use super::GpuKernel;
use super::launch::{Extent, Launch};
use super::map::THREADS;
use crate::dsl::Kb;
use crate::spec::{ComputeType, Quantise, packed_words};

impl GpuKernel for Quantise {
    fn launch(&self) -> Option<Launch> {
        let &Self { cols, groups, per_row, to, .. } = self;
        let words = groups * packed_words(cols, to);
        let grid = [Extent::rows(1), Extent::fixed(words.div_ceil(THREADS)), Extent::fixed(per_row)];
        matches!(to, ComputeType::F32 | ComputeType::Bf16).then_some(Launch {
            grid,
            block: THREADS as u32,
            shared: 0,
        })
    }

    fn write<'k>(&self, k: &'k Kb<'k>) {
        let &Self { cols, groups, per_row, x_ld, out_ld, to } = self;
        let words = packed_words(cols, to);
        let row = k.block_index(0) * per_row + k.block_index(2);
        let at = k.block_index(1) * THREADS + k.thread();
        k.when(at.lt(k.i((groups * words) as i64)), || {
            let (group, word) = (at.div(k.i(words as i64)), at.rem(k.i(words as i64)));
            let x = k.arg(0).words(row * x_ld + group * cols);
            let out = k.arg(1).words(row * out_ld).words(at);
            if to == ComputeType::F32 {
                out.store(x.words(word).load());
                return;
            }
            // The missing half of a pair is zero.
            let there = (word * 2 + 1).lt(k.i(cols as i64));
            let upper = x.words((word * 2 + 1).min(k.i(cols as i64 - 1))).load();
            out.store_int(x.words(word * 2).load().both_halves(there.pick(upper, k.f(0.0))));
        });
    }
}
