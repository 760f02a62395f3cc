//! The lowest number of the largest column of a row: a block for every row. NaN is passed over; where the
//! largest is not finite, or nothing is a number, it is −1.

use super::launch::{Extent, Launch};
use crate::dsl::{F, I, Kb, WARP};

const THREADS: usize = 512;
const WARPS: usize = THREADS / WARP;

pub(super) fn launch() -> Launch {
    let grid = [Extent::rows(1), Extent::fixed(1), Extent::fixed(1)];
    Launch { grid, block: THREADS as u32, shared: 8 * WARPS as u32 }
}

pub(super) fn write<'k>(k: &'k Kb<'k>, cols: usize, x_ld: usize) {
    let row = k.block_index(0);
    let (x, out) = (k.arg(0).words(row * x_ld), k.arg(1).words(row));
    let low = k.f(f32::NEG_INFINITY);
    let none = k.i32(i32::MAX);
    let first_lane = k.lane_index().equals(k.i(0));
    let best = k.fold(k.thread(), cols, THREADS, &[low], |c, best| vec![best[0].max(x.words(c).load())]);
    let warp = best[0].warp_max(WARP);
    k.when(first_lane, || k.shared(k.warp_index() * 4).store(warp));
    k.barrier();
    let max: F<'k> = (0..WARPS).fold(low, |max, w| max.max(k.shared(4 * w).load()));
    let first: Vec<I<'k>> = k.fold(k.thread(), cols, THREADS, &[none], |c, first| {
        vec![x.words(c).load().equals(max).pick_int(c.narrow(), none).min(first[0])]
    });
    let warp = first[0].warp_min(WARP);
    k.when(first_lane, || k.shared(k.warp_index() * 4 + 4 * WARPS).store_int(warp));
    k.barrier();
    let id = (0..WARPS).fold(none.wide(), |id, w| id.min(k.shared(4 * (WARPS + w)).load_int()));
    let finite = max.abs().lt(k.f(f32::INFINITY));
    k.when(k.thread().equals(k.i(0)), || out.store_int(finite.pick_int(id, k.i(-1)).narrow()));
}
