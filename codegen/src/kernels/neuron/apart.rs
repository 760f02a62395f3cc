//! Neurons whose up and down come from flash: gates by themselves, then those whom they wake, wherever they lie (PowerInfer-2,
//! §4.3 and §4.4).
//!
//! The same sums as in [`super::up`] and [`super::down`], in the same order: the same bits. Between the two steps whoever holds
//! neurons is told the lists.

use super::numbers::dot;
use super::{COLUMNS_AHEAD, LIST, Places, gather, list, silent};
use crate::dsl::{I, Kb};
use crate::kernels::routed::{Expert, expert};
use crate::spec::{KernelSpec, NEURONS, neuron_columns};
use moec_ir::bundle::{Bundle, Part};
use moec_ir::types::GROUP;

/// Bytes of gates that are asked for ahead, at least.
const AHEAD: usize = 2560;

pub(in crate::kernels) fn gate<'k>(k: &'k Kb<'k>, spec: &KernelSpec) {
    let KernelSpec::NeuronGate { layout, hidden, inter, format, x_ld, glu } = *spec else {
        return k.fail("not the gates of neurons by themselves");
    };
    let [x, dispatch, gates, h, awake] = [0, 1, 2, 3, 4].map(|i| k.arg(i));
    let bundle = Bundle { format, hidden, sketch: false };
    let blocks = inter.div_ceil(NEURONS);
    let tokens = dispatch.words(layout.token());
    k.expert_tiles(blocks, |active, block| {
        let e = expert(dispatch, layout, active);
        // Nobody asks for up and down here.
        let matrix = gates.load_address(e.id);
        let places = Places { k, bundle, matrix, rests: Some(gates), first: k.i(0) };
        let first = block * NEURONS;
        let count = (k.i(inter as i64) - first).min(k.i(NEURONS as i64));
        let ahead = AHEAD.div_ceil(bundle.part_bytes()).max(1);
        let to = awake.words((active * blocks + block) * LIST);
        let wakes = |_, neuron: I<'k>| {
            let gate = places.row(Part::Gate, neuron);
            let next = matrix.bytes((neuron + ahead) * bundle.part_bytes());
            let awake = k.fold(e.first, e.end, 1, &[k.i(0)], |slot, awake| {
                let row = x.words(tokens.words(slot).load_int() * x_ld);
                let g = dot(k, &gate, row, Some(next));
                h.words(slot * inter).words(neuron).store(g);
                vec![silent(k, g, glu).pick_int(awake[0], k.i(1))]
            });
            k.i(0).lt(awake[0])
        };
        list(k, count, to, |i| first + i, wakes);
    });
}

/// The neurons of an expert.
fn neurons<'k>(
    k: &'k Kb<'k>,
    bundle: Bundle,
    rests: crate::dsl::P<'k>,
    e: &Expert<'k>,
    inter: usize,
) -> Places<'k> {
    // Nobody asks for gates here.
    Places { k, bundle, matrix: rests, rests: Some(rests), first: e.id * inter }
}

pub(in crate::kernels) fn up<'k>(k: &'k Kb<'k>, spec: &KernelSpec) {
    let KernelSpec::NeuronUpAt { layout, hidden, inter, format, x_ld, glu } = *spec else {
        return k.fail("not up of neurons");
    };
    let [x, dispatch, rests, h, awake] = [0, 1, 2, 3, 4].map(|i| k.arg(i));
    let bundle = Bundle { format, hidden, sketch: false };
    let blocks = inter.div_ceil(NEURONS);
    let tokens = dispatch.words(layout.token());
    k.expert_tiles(blocks, |active, block| {
        let e = expert(dispatch, layout, active);
        let places = neurons(k, bundle, rests, &e, inter);
        let list = awake.words((active * blocks + block) * LIST);
        k.each(0, list.load_int(), 1, |i| {
            let neuron = list.words(i + 1).load_int();
            let up = places.row(Part::Up, neuron);
            k.each(e.first, e.end, 1, |slot| {
                let row = x.words(tokens.words(slot).load_int() * x_ld);
                let cell = h.words(slot * inter).words(neuron);
                let g = cell.load();
                k.branch(
                    silent(k, g, glu),
                    || cell.store(k.f(0.0)),
                    || cell.store(g.glu(dot(k, &up, row, None), glu)),
                );
            });
        });
    });
}

pub(in crate::kernels) fn down<'k>(k: &'k Kb<'k>, spec: &KernelSpec) {
    let KernelSpec::NeuronDownAt { layout, hidden, inter, format } = *spec else {
        return k.fail("not down of neurons");
    };
    let [h, dispatch, rests, awake, out] = [0, 1, 2, 3, 4].map(|i| k.arg(i));
    let bundle = Bundle { format, hidden, sketch: false };
    let (blocks, width) = (inter.div_ceil(NEURONS), neuron_columns(&k.isa));
    let (whole, rest) = (hidden / width, hidden % width);
    k.expert_tiles(hidden.div_ceil(width), |active, tile| {
        let e = expert(dispatch, layout, active);
        let places = neurons(k, bundle, rests, &e, inter);
        let ids = k.scratch();
        let count = gather(k, awake.words(active * (blocks * LIST)), blocks, ids);
        let first = tile * (width / GROUP);
        let part = |columns: usize| {
            k.each(e.first, e.end, 1, |slot| {
                let h = h.words(slot * inter);
                let sums = vec![k.fv(0.0); columns.next_multiple_of(GROUP) / k.lanes()];
                let sums = k.fold(0, count, 1, &sums, |i, sums| {
                    // Behind the last one stands that one again: its address is known.
                    let later = ids.words(i + COLUMNS_AHEAD).load_int();
                    places.row(Part::Down, later).fetch(first, columns.div_ceil(GROUP));
                    let neuron = ids.words(i).load_int();
                    places.row(Part::Down, neuron).add(k, h.words(neuron).load(), first, sums)
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
