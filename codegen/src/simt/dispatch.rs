//! Token rows grouped by expert: the table that [`DispatchLayout`] describes, by one block. A thread has some experts: it
//! counts the choices of each, places it among the others, the busiest first, and gives its slots in the order of rows.
//!
//! A choice that is no expert has no slot.

use super::launch::{Extent, Launch};
use crate::dsl::{I, Kb, P};
use moec_ir::op::DispatchLayout;

const THREADS: usize = 256;
/// Most experts: counts in shared memory.
const MOST: usize = 8192;

pub(super) fn launch(layout: DispatchLayout) -> Option<Launch> {
    let grid = [Extent::fixed(1); 3];
    let fits = layout.experts > 0 && layout.experts <= MOST && layout.k > 0;
    fits.then_some(Launch { grid, block: THREADS as u32, shared: 4 * layout.experts as u32 })
}

pub(super) fn write<'k>(k: &'k Kb<'k>, layout: DispatchLayout) {
    let (ids, out) = (k.arg(0), k.arg(1));
    let experts = layout.experts;
    let slots = k.row_count().min(k.i(layout.rows as i64)) * layout.k;
    let id = |choice: I<'k>| ids.words(choice).load_int();
    let count = |expert: I<'k>| -> P<'k> { k.shared(expert * 4) };
    let one = |yes: I<'k>| yes.pick_int(k.i(1), k.i(0));
    // What the layout leaves open is −1.
    k.each(k.thread(), layout.words(), THREADS, |word| {
        let header = word.lt(k.i(layout.expert() as i64));
        out.words(word).store_int(header.pick_int(k.i32(0), k.i32(-1)));
    });
    k.each(k.thread(), experts, THREADS, |expert| {
        let own = k.fold(0, slots, 1, &[k.i(0)], |choice, own| vec![own[0] + one(id(choice).equals(expert))]);
        count(expert).store_int(own[0].narrow());
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
            k.fold(0, slots, 1, &[start], |choice, next| {
                let mine = id(choice).equals(expert);
                k.when(mine, || {
                    let row = choice.div(k.i(layout.k as i64));
                    out.words(layout.token()).words(next[0]).store_int(row.narrow());
                    out.words(layout.slot()).words(choice).store_int(next[0].narrow());
                });
                vec![next[0] + one(mine)]
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
