//! Token rows grouped by expert: the table that [`DispatchLayout`] describes, by one block. A warp has some
//! experts and counts the choices of each, thirty-two at a time. A thread orders the experts, the busiest
//! first. Then each warp assigns its slots in the order of rows.
//!
//! A choice that is not an expert has no slot.

use super::launch::{Extent, Launch};
use crate::dsl::{I, Kb, P, WARP};
use moec_ir::op::DispatchLayout;

/// The largest possible block: of 128 experts a warp then has four, and every warp reads all choices for
/// each.
const THREADS: usize = 1024;
const WARPS: usize = THREADS / WARP;
/// Most experts: their counts and first slots in shared memory.
const MOST: usize = 4096;

pub(super) fn launch(layout: DispatchLayout) -> Option<Launch> {
    let grid = [Extent::fixed(1); 3];
    let fits = layout.experts > 0 && layout.experts <= MOST && layout.k > 0;
    fits.then_some(Launch { grid, block: THREADS as u32, shared: 8 * layout.experts as u32 })
}

pub(super) fn write<'k>(k: &'k Kb<'k>, layout: DispatchLayout) {
    let (ids, out) = (k.arg(0), k.arg(1));
    let experts = layout.experts;
    let slots = k.row_count().min(k.i(layout.rows as i64)) * layout.k;
    let count = |expert: I<'k>| -> P<'k> { k.shared(expert * 4) };
    let first = |expert: I<'k>| -> P<'k> { k.shared(expert * 4 + 4 * experts) };
    let one = |yes: I<'k>| yes.pick_int(k.i(1), k.i(0));
    let first_lane = k.lane_index().equals(k.i(0));
    // The lanes of a warp whose choices, from `at` on, are the expert; and whether this lane's is.
    let choosing = |at: I<'k>, expert: I<'k>| {
        let choice = at + k.lane_index();
        let there = choice.lt(slots);
        let id = ids.words(there.pick_int(choice, k.i(0))).load_int();
        let mine = there.and(id.equals(expert));
        (k.ballot(mine), mine, choice)
    };
    // Entries that the layout leaves open are −1.
    k.each(k.thread(), layout.words(), THREADS, |word| {
        let header = word.lt(k.i(layout.expert() as i64));
        out.words(word).store_int(header.pick_int(k.i32(0), k.i32(-1)));
    });
    k.each(k.warp_index(), experts, WARPS, |expert| {
        let own = k.fold(0, slots, WARP, &[k.i32(0)], |at, own| vec![own[0] + choosing(at, expert).0.ones()]);
        k.when(first_lane, || count(expert).store_int(own[0]));
    });
    k.barrier();
    k.each(k.thread(), experts, THREADS, |expert| {
        let own = count(expert).load_int();
        k.when(own.equals(k.i(0)).not(), || {
            let place = k.fold(0, experts, 1, &[k.i(0), k.i(0)], |other, place| {
                let theirs = count(other).load_int();
                // Ties stay in the order of ids.
                let tie = theirs.equals(own).and(other.lt(expert));
                let before = own.lt(theirs).or(tie);
                vec![place[0] + one(before), place[1] + before.pick_int(theirs, k.i(0))]
            });
            let [rank, start] = [place[0], place[1]];
            out.words(layout.expert()).words(rank).store_int(expert.narrow());
            out.words(layout.start()).words(rank).store_int(start.narrow());
            first(expert).store_int(start.narrow());
        });
    });
    k.barrier();
    k.each(k.warp_index(), experts, WARPS, |expert| {
        k.when(count(expert).load_int().equals(k.i(0)).not(), || {
            k.fold(0, slots, WARP, &[first(expert).load_int()], |at, next| {
                let (lanes, mine, choice) = choosing(at, expert);
                k.when(mine, || {
                    let slot = next[0] + (lanes & k.lanes_before()).ones().wide();
                    let row = choice.div(k.i(layout.k as i64));
                    out.words(layout.token()).words(slot).store_int(row.narrow());
                    out.words(layout.slot()).words(choice).store_int(slot.narrow());
                });
                vec![next[0] + lanes.ones().wide()]
            });
        });
    });
    k.when(k.thread().equals(k.i(0)), || {
        let all = k.fold(0, experts, 1, &[k.i(0), k.i(0)], |expert, all| {
            let own = count(expert).load_int();
            vec![all[0] + one(own.equals(k.i(0)).not()), all[1] + own]
        });
        out.store_int(all[0].narrow());
        out.words(1).store_int(slots.narrow());
        out.words(layout.start()).words(all[0]).store_int(all[1].narrow());
    });
}
