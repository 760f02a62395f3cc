//! Experts by neurons, for few rows: gates first, then only what is read of the neurons that these wake (PowerInfer-2, §4.1.2).
//!
//! Decoding waits for memory, so what counts is which bytes are read. [`up`] reads the gates of a block of neurons, writes
//! down whom any row wakes, and reads the up rows of these alone. [`down`] reads their columns. Where bundles have sketches,
//! a gate is read only where its sketch does not prove it to be 0: the same bits come out.
//!
//! Sums over neurons are taken in their order, and a neuron that a row does not wake adds an exact 0 to it: a row's bits
//! depend neither on the other rows nor on how work is split.

pub(super) mod apart;
mod numbers;
pub(crate) mod panels;
mod places;

pub(super) use places::Places;

use super::routed::{Expert, expert};
use crate::dsl::{F, I, Kb, LINE, P};
use crate::spec::{KernelSpec, NEURONS, neuron_columns};
use moec_ir::bundle::{Bundle, Part};
use moec_ir::op::{Activation, Glu};
use moec_ir::types::{Format, GROUP};
use numbers::{Row, dot, norm};

/// Bytes of gates that are asked for ahead, at least: what memory takes for one access, at the rate of a core.
const AHEAD: usize = 2560;

/// Neurons whose down columns are asked for ahead.
const COLUMNS_AHEAD: usize = 12;

/// Bytes of scratch of [`up`]: the neurons of a block whose sketches prove nothing.
pub(crate) const UP_SCRATCH: usize = (NEURONS + 1) * 4;

/// Bytes of scratch of [`down`]: the neurons of an expert that are awake.
pub(crate) const fn down_scratch(inter: usize) -> usize {
    (inter + COLUMNS_AHEAD + 1) * 4
}

/// Words of the list of a block: how many, then who.
pub(crate) const LIST: usize = NEURONS + 1;

/// Whether a gate that is at most `most` makes a neuron 0. NaN does not.
fn silent<'k>(k: &'k Kb<'k>, most: F<'k>, glu: Glu) -> I<'k> {
    match glu {
        Glu::Gated(Activation::Relu) | Glu::DRelu => most.lt(k.f(0.0)).or(most.equals(k.f(0.0))),
        Glu::FatRelu { threshold } => most.lt(k.f(threshold)),
        Glu::Gated(_) | Glu::Clamped { .. } => {
            k.fail("a gate that makes no neuron 0");
            k.f(0.0).lt(k.f(0.0))
        }
    }
}

/// Asks for whole lines.
fn fetch_lines<'k>(k: &'k Kb<'k>, from: P<'k>, bytes: usize) {
    const TURN: usize = 8 * LINE;
    let whole = bytes / TURN * TURN;
    if whole > 0 {
        k.each(0, whole, TURN, |at| (0..8).for_each(|line| from.bytes(at).beyond(line * LINE).prefetch()));
    }
    (whole..bytes).step_by(LINE).for_each(|at| from.beyond(at).prefetch());
}

/// Goes through neurons, and lists those of whom `awake` is true: how many, in front of who. `who(i)` is the neuron of number
/// `i`.
fn list<'k>(
    k: &'k Kb<'k>,
    count: I<'k>,
    to: P<'k>,
    who: impl Fn(I<'k>) -> I<'k>,
    awake: impl FnOnce(I<'k>, I<'k>) -> I<'k>,
) -> I<'k> {
    let found = k.fold(0, count, 1, &[k.i(0)], |i, found| {
        let neuron = who(i);
        let awake = awake(i, neuron);
        // Who is not awake is overwritten by who comes next.
        to.words(found[0] + 1).store_int(neuron.narrow());
        vec![found[0] + awake.pick_int(k.i(1), k.i(0))]
    });
    to.store_int(found[0].narrow());
    found[0]
}

pub(super) fn up<'k>(k: &'k Kb<'k>, spec: &KernelSpec) {
    let KernelSpec::NeuronUp { layout, hidden, inter, format, sketch, x_ld, glu } = *spec else {
        return k.fail("not the gates of neurons");
    };
    let [x, dispatch, weights, h, awake] = [0, 1, 2, 3, 4].map(|i| k.arg(i));
    let bundle = Bundle { format, hidden, sketch };
    let blocks = inter.div_ceil(NEURONS);
    let tokens = dispatch.words(layout.token());
    k.expert_tiles(blocks, |active, block| {
        let e = expert(dispatch, layout, active);
        let matrix = weights.load_address(e.id);
        let at = |neuron: I<'k>| matrix.bytes(neuron * bundle.bytes());
        let row = |slot: I<'k>| x.words(tokens.words(slot).load_int() * x_ld);
        let first = block * NEURONS;
        let count = (k.i(inter as i64) - first).min(k.i(NEURONS as i64));
        let hidden_at = |slot: I<'k>, neuron: I<'k>| h.words(slot * inter).words(neuron);
        let gates = Row::part(k, bundle, Part::Gate);
        let ahead = AHEAD.div_ceil(bundle.part_bytes()).max(1);
        // Whether any row wakes a neuron; what the gates give stays where the result will be.
        let wakes = |neuron: I<'k>, next: Option<P<'k>>| {
            let gate = gates.of(at(neuron));
            let awake = k.fold(e.first, e.end, 1, &[k.i(0)], |slot, awake| {
                let g = dot(k, &gate, row(slot), next);
                hidden_at(slot, neuron).store(g);
                vec![silent(k, g, glu).pick_int(awake[0], k.i(1))]
            });
            let awake = k.i(0).lt(awake[0]);
            k.when(awake, || fetch_lines(k, at(neuron).bytes(bundle.part(Part::Up)), bundle.part_bytes()));
            awake
        };
        let to = awake.words((active * blocks + block) * LIST);
        let found = if sketch {
            let maybe = k.scratch();
            let unsure = unproven(k, &e, bundle, [first, count], maybe, glu, &at, &row);
            // The lines of gates were asked for when their sketches proved nothing.
            list(k, unsure, to, |i| maybe.words(i + 1).load_int(), |_, neuron| wakes(neuron, None))
        } else {
            let next = |neuron: I<'k>| at(neuron + ahead).bytes(bundle.part(Part::Gate));
            list(k, count, to, |i| first + i, |_, neuron| wakes(neuron, Some(next(neuron))))
        };
        let ups = Row::part(k, bundle, Part::Up);
        k.each(0, found, 1, |i| {
            let neuron = to.words(i + 1).load_int();
            let up = ups.of(at(neuron));
            k.each(e.first, e.end, 1, |slot| {
                let cell = hidden_at(slot, neuron);
                let g = cell.load();
                k.branch(
                    silent(k, g, glu),
                    || cell.store(k.f(0.0)),
                    || cell.store(g.glu(dot(k, &up, row(slot), None), glu)),
                );
            });
        });
    });
}

/// Lists the neurons of a block whose sketches do not prove that every row leaves them 0.
#[expect(clippy::too_many_arguments, reason = "a step of the loop above")]
fn unproven<'k>(
    k: &'k Kb<'k>,
    e: &Expert<'k>,
    bundle: Bundle,
    [first, count]: [I<'k>; 2],
    to: P<'k>,
    glu: Glu,
    at: &dyn Fn(I<'k>) -> P<'k>,
    row: &dyn Fn(I<'k>) -> P<'k>,
) -> I<'k> {
    let sketches = Row::codes(k, bundle);
    let ahead = AHEAD.div_ceil(bundle.sketch_bytes()).max(1);
    let norms = k.scratch().bytes(UP_SCRATCH);
    k.each(e.first, e.end, 1, |slot| norms.words(slot - e.first).store(norm(k, row(slot), bundle.hidden)));
    list(
        k,
        count,
        to,
        |i| first + i,
        |_, neuron| {
            let sketch = sketches.of(at(neuron));
            let facts = at(neuron).bytes(bundle.codes_bytes());
            let (scale, bound) = (facts.load(), facts.words(1).load());
            let unsure = k.fold(e.first, e.end, 1, &[k.i(0)], |slot, unsure| {
                let said = dot(k, &sketch, row(slot), Some(at(neuron + ahead))) * scale;
                let most = said + bound * norms.words(slot - e.first).load();
                vec![silent(k, most, glu).pick_int(unsure[0], k.i(1))]
            });
            let unsure = k.i(0).lt(unsure[0]);
            k.when(unsure, || fetch_lines(k, at(neuron).bytes(bundle.part(Part::Gate)), bundle.part_bytes()));
            unsure
        },
    )
}

pub(super) fn down<'k>(k: &'k Kb<'k>, spec: &KernelSpec) {
    let KernelSpec::NeuronDown { layout, hidden, inter, format, sketch } = *spec else {
        return k.fail("not the columns of neurons");
    };
    let [h, dispatch, weights, awake, out] = [0, 1, 2, 3, 4].map(|i| k.arg(i));
    let bundle = Bundle { format, hidden, sketch };
    let (blocks, width) = (inter.div_ceil(NEURONS), neuron_columns(&k.isa));
    let (whole, rest) = (hidden / width, hidden % width);
    let downs = Row::part(k, bundle, Part::Down);
    k.expert_tiles(hidden.div_ceil(width), |active, tile| {
        let e = expert(dispatch, layout, active);
        let matrix = weights.load_address(e.id);
        let ids = k.scratch();
        let count = gather(k, awake.words(active * (blocks * LIST)), blocks, ids);
        let part = |columns: usize| {
            k.each(e.first, e.end, 1, |slot| {
                let h = h.words(slot * inter);
                let sums = vec![k.fv(0.0); columns.next_multiple_of(GROUP) / k.lanes()];
                let sums = k.fold(0, count, 1, &sums, |i, sums| {
                    let later = matrix.bytes(ids.words(i + COLUMNS_AHEAD).load_int() * bundle.bytes());
                    downs.of(later).fetch(tile * (width / GROUP), columns.div_ceil(GROUP));
                    let neuron = ids.words(i).load_int();
                    let row = downs.of(matrix.bytes(neuron * bundle.bytes()));
                    row.add(k, h.words(neuron).load(), tile * (width / GROUP), sums)
                });
                let out = out.words(slot * hidden).words(tile * width);
                for (v, sum) in sums.into_iter().enumerate().filter(|(v, _)| v * k.lanes() < columns) {
                    out.words(v * k.lanes()).store_vec(sum, k.span(columns - v * k.lanes()));
                }
            });
        };
        match (whole, rest) {
            (0, rest) => part(rest),
            (_, 0) => part(width),
            _ => k.branch(tile.lt(k.i(whole as i64)), || part(width), || part(rest)),
        }
    });
}

/// Joins the lists of an expert's blocks; behind the last comes that one again, as often as somebody looks ahead.
fn gather<'k>(k: &'k Kb<'k>, lists: P<'k>, blocks: usize, to: P<'k>) -> I<'k> {
    to.store_int(k.i32(0));
    let count = k.fold(0, blocks, 1, &[k.i(0)], |block, count| {
        let list = lists.words(block * LIST);
        let more = list.load_int();
        k.each(0, more, 1, |i| to.words(count[0] + i).store_int(list.words(i + 1).load_word()));
        vec![count[0] + more]
    })[0];
    let last = to.words((count - k.i(1)).max(k.i(0))).load_word();
    k.each(0, COLUMNS_AHEAD, 1, |i| to.words(count + i).store_int(last));
    count
}

/// Whether bundles of a format have sketches: those of bytes and less would be no smaller.
pub(crate) const fn sketches(format: Format) -> bool {
    !format.is_grouped()
}
