//! Neurons whose up and down come from flash: gates by themselves, then those whom they wake, wherever they lie (PowerInfer-2,
//! §4.3 and §4.4).
//!
//! The same sums as in [`super::up`], in the same order: the same bits. Between the two steps whoever holds neurons is told the
//! lists. Columns are [`super::down`]'s.

use super::{AHEAD, Call, LIST, Places, Rests, list};
use crate::dsl::Kb;
use crate::kernels::routed::expert;
use crate::spec::{KernelSpec, NEURONS};

pub(in crate::kernels) fn gate<'k>(k: &'k Kb<'k>, spec: &KernelSpec) {
    let (KernelSpec::NeuronGate { layout, inter, .. }, Some(call)) = (spec, Call::of(k, spec)) else {
        return k.fail("not the gates of neurons by themselves");
    };
    let (gates, awake) = (k.arg(2), k.arg(4));
    let blocks = inter.div_ceil(NEURONS);
    k.tiles_by_expert(blocks, |active, [from, end]| {
        let e = expert(k.arg(1), *layout, active);
        // Nobody asks for up and down here.
        let rests = Some(Rests { at: gates, first: k.i(0) });
        let places =
            Places { k, bundle: call.bundle, inter: *inter, matrix: gates.load_address(e.id), rests };
        let rows = call.rows(&e);
        k.each(from, end, 1, |block| {
            let first = block * NEURONS;
            let count = (k.i(*inter as i64) - first).min(k.i(NEURONS as i64));
            let to = awake.words((active * blocks + block) * LIST);
            list(
                k,
                count,
                to,
                |i| first + i,
                |_, neuron| call.wakes(&e, &places, &rows, neuron, Some(AHEAD)),
            );
        });
    });
}

pub(in crate::kernels) fn up<'k>(k: &'k Kb<'k>, spec: &KernelSpec) {
    let (KernelSpec::NeuronUpAt { layout, inter, .. }, Some(call)) = (spec, Call::of(k, spec)) else {
        return k.fail("not up of neurons");
    };
    let (rests, awake) = (k.arg(2), k.arg(4));
    let blocks = inter.div_ceil(NEURONS);
    k.tiles_by_expert(blocks, |active, [from, end]| {
        let e = expert(k.arg(1), *layout, active);
        // Nobody asks for gates here.
        let rests_of = Rests { at: rests, first: e.id * *inter };
        let places = Places { k, bundle: call.bundle, inter: *inter, matrix: rests, rests: Some(rests_of) };
        let rows = call.rows(&e);
        k.each(from, end, 1, |block| {
            let list = awake.words((active * blocks + block) * LIST);
            call.ups(&e, &places, &rows, list, list.load_int());
        });
    });
}
