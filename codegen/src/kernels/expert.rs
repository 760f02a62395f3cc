//! The two halves of an expert's feed-forward network, over the rows that the dispatch table gives it.

use super::micro::{Columns, Panel};
use super::multiply::{multiply, panel_bytes};
use crate::dsl::{I, Kb, P};
use crate::spec::{KernelSpec, packed_words, panels};
use moec_ir::op::DispatchLayout;

/// An active expert: its id and its slots.
struct Expert<'k> {
    id: I<'k>,
    first: I<'k>,
    end: I<'k>,
}

fn expert<'k>(dispatch: P<'k>, layout: DispatchLayout, active: I<'k>) -> Expert<'k> {
    let start = dispatch.words(layout.start()).words(active);
    Expert {
        id: dispatch.words(layout.expert()).words(active).load_int(),
        first: start.load_int(),
        end: start.words(1).load_int(),
    }
}

pub(super) fn gate_up<'k>(k: &'k Kb<'k>, spec: &KernelSpec) {
    let KernelSpec::ExpertGateUp { layout, hidden, inter, format, compute, x_ld, glu, bias, schedule } =
        *spec
    else {
        return k.fail("not a gate and up");
    };
    let (x, dispatch, weights) = (k.arg(0), k.arg(1), k.arg(2));
    let bias = bias.then(|| k.arg(3));
    let out = k.arg(3 + usize::from(bias.is_some()));
    let tiles = panels(&k.isa, 2 * inter, true);
    let bytes = panel_bytes(&k.isa, hidden, format);
    k.expert_tiles(tiles, |active, p| {
        let e = expert(dispatch, layout, active);
        let weights = weights.bytes(e.id * (tiles * bytes) + p * bytes);
        let panel = Panel { weights, depth: hidden, format, compute, schedule };
        let columns = Columns::of(k, p, 2 * inter, Some(glu));
        let tokens = dispatch.words(layout.token());
        // Rows are read where they lie: gathering them first costs more than their addresses do.
        let row = |slot| x.words(tokens.words(slot).load_int() * x_ld);
        multiply(k, &panel, e.first, e.end, &row, &|slot, sums| {
            let bias = bias.map(|b| columns.bias(k, b.words(e.id * (2 * inter))));
            columns.store(sums, bias, None, out.words(slot * inter));
        });
    });
}

pub(super) fn down<'k>(k: &'k Kb<'k>, spec: &KernelSpec) {
    let KernelSpec::ExpertDown { layout, inter, hidden, format, compute, bias, schedule } = *spec else {
        return k.fail("not a down projection");
    };
    let (h, dispatch, weights) = (k.arg(0), k.arg(1), k.arg(2));
    let bias = bias.then(|| k.arg(3));
    let out = k.arg(3 + usize::from(bias.is_some()));
    let tiles = panels(&k.isa, hidden, false);
    let bytes = panel_bytes(&k.isa, inter, format);
    let words = packed_words(inter, compute);
    k.expert_tiles(tiles, |active, p| {
        let e = expert(dispatch, layout, active);
        let weights = weights.bytes(e.id * (tiles * bytes) + p * bytes);
        let panel = Panel { weights, depth: inter, format, compute, schedule };
        let columns = Columns::of(k, p, hidden, None);
        multiply(k, &panel, e.first, e.end, &|slot| h.words(slot * words), &|slot, sums| {
            let bias = bias.map(|b| columns.bias(k, b.words(e.id * hidden)));
            columns.store(sums, bias, None, out.words(slot * hidden));
        });
    });
}
