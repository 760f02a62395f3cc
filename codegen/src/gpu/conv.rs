//! Each channel's own convolution over the last rows of its sequence. A block has as many channels as a warp
//! has lanes, and all rows: its warps take rows in turn, so a prompt is as parallel as any other operator.
//! The state, which the first rows of a sequence read, is replaced after all of them.
//!
//! A row reads its taps from the rows before it, which neighbouring warps have just read: memory gives each
//! row once. Decoding takes less time than a launch.

use super::GpuKernel;
use super::launch::{Extent, Launch};
use super::sequences::Rows;
use crate::dsl::{F, I, Kb, P, WARP};
use crate::kernels::Kernel as _;
use crate::spec::CausalConv;

/// Most warps of a block.
const WARPS: usize = 8;

impl CausalConv {
    /// Warps of a block.
    fn warps(&self) -> usize {
        self.rows.clamp(1, WARPS)
    }
}

impl GpuKernel for CausalConv {
    fn launch(&self) -> Option<Launch> {
        let grid = [Extent::fixed(self.channels.div_ceil(WARP)), Extent::fixed(1), Extent::fixed(1)];
        Some(Launch { grid, block: (self.warps() * WARP) as u32, shared: 0 })
    }

    fn write<'k>(&self, k: &'k Kb<'k>) {
        let &Self { channels, taps, act, bias, x_ld, out_ld, .. } = self;
        let at = self.args() - 3;
        let rows = Rows::new(k, [k.arg(at), k.arg(at + 1)]);
        let before = taps - 1;
        let channel = k.block_index(0) * WARP + k.lane_index();
        let inside = channel.lt(k.i(channels as i64));
        let c = channel.min(k.i(channels as i64 - 1));
        let (state, x, out) = (k.arg(0).words(c), k.arg(1).words(c), k.arg(at + 2).words(c));
        let (weight, bias) = (k.arg(2).words(c), bias.then(|| k.arg(3).words(c).load()));
        let of_slot = |slot: I<'k>, i: I<'k>| state.words((slot * before + i) * channels);
        // What a row's taps before its own see, the last first: rows of this call, then of the state.
        let taken = |row: I<'k>| -> Vec<P<'k>> {
            let slot = rows.slot(row);
            let zero = k.i(0);
            let nothing: Vec<I<'k>> = (0..taps).map(|_| zero).collect();
            // How many are found, and where each is.
            let more = |at: I<'k>, found: &[I<'k>]| at.ge(k.i(1)).and(found[0].lt(k.i(before as i64)));
            let (_, found) = k.fold_while(row, &nothing, more, |at, found| {
                let here = at - 1;
                let one = rows.is_of(here, slot);
                let places = (0..before).map(|m| {
                    let this = one.and(found[0].equals(k.i(m as i64)));
                    this.pick_int(here, found[m + 1])
                });
                let count = one.pick_int(found[0] + 1, found[0]);
                (here, std::iter::once(count).chain(places).collect())
            });
            let place = |m: usize| {
                let kept = of_slot(slot, found[0] + (before - 1 - m));
                k.i(m as i64).lt(found[0]).pick_address(x.words(found[m + 1] * x_ld), kept)
            };
            (0..before).map(place).collect()
        };
        k.each(k.warp_index(), rows.n, self.warps(), |row| {
            k.when(rows.is_there(row), || {
                let own = x.words(row * x_ld).load() * weight.words(before * channels).load();
                let sum = taken(row).into_iter().enumerate().fold(own, |sum, (m, at)| {
                    at.load().fma(weight.words((before - 1 - m) * channels).load(), sum)
                });
                let sum = bias.map_or(sum, |b| sum + b);
                let y = act.map_or(sum, |act| sum.activate(act));
                k.when(inside, || out.words(row * out_ld).store(y));
            });
        });
        if before == 0 {
            return;
        }
        k.barrier();
        // The last row of each sequence leaves what the next call's rows see.
        k.each(k.warp_index(), rows.n, self.warps(), |row| {
            k.when(rows.is_there(row), || {
                let slot = rows.slot(row);
                k.when(rows.next(row + 1, slot).equals(rows.n), || {
                    let own = x.words(row * x_ld).load();
                    let left = taken(row).into_iter().take(before - 1).map(P::load);
                    let left: Vec<F<'k>> = std::iter::once(own).chain(left).collect();
                    k.when(inside, || {
                        for (m, value) in left.into_iter().enumerate() {
                            of_slot(slot, k.i((before - 1 - m) as i64)).store(value);
                        }
                    });
                });
            });
        });
    }
}
