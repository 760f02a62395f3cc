//! The two halves of an expert's feed-forward network, over the rows that the dispatch table gives it.

use super::micro::{Columns, Panel, product, row_groups};
use crate::dsl::{I, Kb, P};
use crate::spec::{KernelSpec, panels};
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
    let KernelSpec::ExpertGateUp { layout, hidden, inter, format, x_ld, glu, bias } = *spec else {
        return k.fail("not a gate and up");
    };
    let (x, dispatch, weights) = (k.arg(0), k.arg(1), k.arg(2));
    let bias = bias.then(|| k.arg(3));
    let out = k.arg(3 + usize::from(bias.is_some()));
    let tiles = panels(&k.isa, 2 * inter, true);
    let panel_words = hidden * k.isa.nr;
    k.expert_tiles(tiles, |active, p| {
        let e = expert(dispatch, layout, active);
        let weights = weights.elements(e.id * (tiles * panel_words) + p * panel_words, format);
        let panel = Panel { weights, depth: hidden, format, compute: crate::spec::Compute::F32 };
        let columns = Columns::of(k, p, 2 * inter, Some(glu));
        row_groups(k, e.first, e.end, |slot, m| {
            let tokens = dispatch.words(layout.token()).words(slot);
            // Rows are read where they lie: gathering them first costs more than their addresses do.
            let rows: Vec<_> = (0..m).map(|i| x.words(tokens.words(i).load_int() * x_ld)).collect();
            let sums = product(k, &rows, &panel);
            let bias = bias.map(|b| columns.bias(k, b.words(e.id * (2 * inter))));
            for (i, sums) in sums.into_iter().enumerate() {
                columns.store(sums, bias, None, out.words(slot * inter).words(i * inter));
            }
        });
    });
}

pub(super) fn down<'k>(k: &'k Kb<'k>, spec: &KernelSpec) {
    let KernelSpec::ExpertDown { layout, inter, hidden, format, bias } = *spec else {
        return k.fail("not a down projection");
    };
    let (h, dispatch, weights) = (k.arg(0), k.arg(1), k.arg(2));
    let bias = bias.then(|| k.arg(3));
    let out = k.arg(3 + usize::from(bias.is_some()));
    let tiles = panels(&k.isa, hidden, false);
    let panel_words = inter * k.isa.nr;
    k.expert_tiles(tiles, |active, p| {
        let e = expert(dispatch, layout, active);
        let weights = weights.elements(e.id * (tiles * panel_words) + p * panel_words, format);
        let panel = Panel { weights, depth: inter, format, compute: crate::spec::Compute::F32 };
        let columns = Columns::of(k, p, hidden, None);
        row_groups(k, e.first, e.end, |slot, m| {
            let at = h.words(slot * inter);
            let rows: Vec<_> = (0..m).map(|i| at.words(i * inter)).collect();
            let sums = product(k, &rows, &panel);
            let bias = bias.map(|b| columns.bias(k, b.words(e.id * hidden)));
            for (i, sums) in sums.into_iter().enumerate() {
                columns.store(sums, bias, None, out.words(slot * hidden).words(i * hidden));
            }
        });
    });
}
