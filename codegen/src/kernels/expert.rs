//! The two halves of an expert's feed-forward network, over the rows that the dispatch table gives it. Matrices are
//! found by a table of addresses: an expert may lie anywhere, and move between two steps.

use super::micro::{Columns, Panel};
use super::multiply::{Rows, finish, multiply, on_tiles, panel_bytes, scratch_bytes};
use crate::dsl::{I, Kb, P};
use crate::machine::Isa;
use crate::spec::{Compute, KernelSpec, packed_words, panels};
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
    let gathered = on_tiles(&k.isa, compute).then(|| {
        let words = packed_words(hidden, compute);
        (
            k.scratch().bytes(scratch_bytes(&k.isa, hidden, format, compute, schedule)),
            words,
            gathered_ld(words),
        )
    });
    k.experts_in_turn(tiles, |active, p, again| {
        let e = expert(dispatch, layout, active);
        let weights = weights.load_address(e.id).bytes(p * bytes);
        let panel = Panel { weights, depth: hidden, format, compute, schedule };
        let columns = Columns::of(k, p, 2 * inter, Some(glu));
        let tokens = dispatch.words(layout.token());
        let lies = |slot| x.words(tokens.words(slot).load_int() * x_ld);
        let range = [e.first, e.end];
        let store = |slot: I<'k>, sums| {
            let bias = bias.map(|b| columns.bias(k, b.words(e.id * (2 * inter))));
            columns.store(sums, bias, None, out.words(slot * inter));
        };
        match gathered {
            // Rows are read where they lie: gathering them first costs more than their addresses do.
            None => {
                let rows = Rows { range, at: &lies, apart: None, all: range, onward: true };
                multiply(k, &panel, &rows, None, &store);
            }
            // The rows of a tile must lie a fixed distance apart: those of an expert are gathered once.
            Some((to, words, ld)) => {
                let at = |slot: I<'k>| to.words((slot - e.first) * ld);
                k.branch(
                    again,
                    || {},
                    || k.each(e.first, e.end, 1, |slot| k.copy(lies(slot), at(slot), words)),
                );
                multiply(
                    k,
                    &panel,
                    &Rows { range, at: &at, apart: Some(ld), all: range, onward: true },
                    None,
                    &store,
                );
            }
        }
    });
    finish(k, compute);
}

/// Words from one gathered row to the next: an odd number of cache lines, so that the rows of a tile do
/// not share the ways of one set.
fn gathered_ld(words: usize) -> usize {
    (words.div_ceil(16) | 1) * 16
}

/// Bytes of scratch of [`gate_up`], behind those of its products.
pub(crate) fn gathered_bytes(isa: &Isa, rows: usize, hidden: usize, compute: Compute) -> usize {
    if on_tiles(isa, compute) { rows * gathered_ld(packed_words(hidden, compute)) * 4 } else { 0 }
}

pub(super) fn down<'k>(k: &'k Kb<'k>, spec: &KernelSpec) {
    let KernelSpec::ExpertDown { layout, inter, hidden, format, compute, h_ld, bias, schedule } = *spec
    else {
        return k.fail("not a down projection");
    };
    let (h, dispatch, weights) = (k.arg(0), k.arg(1), k.arg(2));
    let bias = bias.then(|| k.arg(3));
    let out = k.arg(3 + usize::from(bias.is_some()));
    let tiles = panels(&k.isa, hidden, false);
    let bytes = panel_bytes(&k.isa, inter, format);
    k.expert_tiles(tiles, |active, p| {
        let e = expert(dispatch, layout, active);
        let weights = weights.load_address(e.id).bytes(p * bytes);
        let panel = Panel { weights, depth: inter, format, compute, schedule };
        let columns = Columns::of(k, p, hidden, None);
        let range = [e.first, e.end];
        let at = |slot| h.words(slot * h_ld);
        multiply(
            k,
            &panel,
            &Rows { range, at: &at, apart: Some(h_ld), all: range, onward: true },
            None,
            &|slot, sums| {
                let bias = bias.map(|b| columns.bias(k, b.words(e.id * hidden)));
                columns.store(sums, bias, None, out.words(slot * hidden));
            },
        );
    });
    finish(k, compute);
}
