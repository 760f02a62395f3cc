//! The two halves of an expert's feed-forward network, over the rows that the dispatch table gives it. Matrices are
//! found by a table of addresses: an expert may lie anywhere, and move between two steps.

use super::amx;
use super::micro::Columns;
use super::multiply::{finish, multiply, on_tiles, panel_bytes, scratch_bytes};
use super::panel::{Panel, PanelRows};
use crate::dsl::{I, Kb, P};
use crate::machine::Isa;
use crate::spec::{Compute, KernelSpec, RowForm, packed_words, panels};
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
    let KernelSpec::ExpertGateUp {
        layout,
        hidden,
        inter,
        format,
        compute,
        x_ld,
        glu,
        bias,
        out: result,
        schedule,
    } = *spec
    else {
        return k.fail("not a gate and up");
    };
    let (x, dispatch, weights) = (k.arg(0), k.arg(1), k.arg(2));
    let bias = bias.then(|| k.arg(3));
    let out = k.arg(3 + usize::from(bias.is_some()));
    let tiles = panels(&k.isa, 2 * inter, true);
    let bytes = panel_bytes(&k.isa, hidden, format);
    let tokens = dispatch.words(layout.token());
    let lies = |slot| x.words(tokens.words(slot).load_int() * x_ld);
    let panel = |e: &Expert<'k>, p: I<'k>, rows: &PanelRows<'_, 'k>, columns: &Columns<'k>| {
        let weights = weights.load_address(e.id).bytes(p * bytes);
        let panel = Panel { weights, depth: hidden, format, compute, schedule };
        multiply(k, &panel, rows, None, &|slot, sums| {
            let bias = bias.map(|b| columns.bias(k, b.words(e.id * (2 * inter))));
            columns.store_as(result.form, sums, bias, None, out.words(slot * result.ld));
        });
    };
    let columns = |p| Columns::of(k, p, 2 * inter, Some(glu));
    if !on_tiles(&k.isa, compute) {
        // Rows are read where they lie: gathering them first costs more than their addresses do.
        return k.expert_tiles(tiles, |active, p| {
            let (e, columns) = (expert(dispatch, layout, active), columns(p));
            let next = Some(weights.load_address(e.id).bytes(p * bytes).beyond(bytes));
            let out = columns.results(out, result);
            panel(&e, p, &PanelRows { range: [e.first, e.end], at: &lies, apart: None, next, out }, &columns);
        });
    }
    // The rows of a tile must lie a fixed distance apart: those of a block are gathered once.
    let words = packed_words(hidden, compute);
    let (ld, to) =
        (gathered_ld(words), k.scratch().bytes(scratch_bytes(&k.isa, hidden, format, compute, schedule)));
    let path = Path { k, dispatch, layout, weights, tiles, bytes, rows: schedule.rows };
    path.walk(
        |[first, end]| k.each(first, end, 1, |slot| k.copy(lies(slot), to.words((slot - first) * ld), words)),
        |e, p, range, next| {
            let columns = columns(p);
            let at = |slot: I<'k>| to.words((slot - range[0]) * ld);
            let out = columns.results(out, result);
            panel(e, p, &PanelRows { range, at: &at, apart: Some(ld), next: Some(next), out }, &columns);
        },
    );
    finish(k, compute);
}

/// The order of a kernel on tile registers: experts, of an expert blocks of rows that the second-level cache holds, of a
/// block all panels.
struct Path<'k> {
    k: &'k Kb<'k>,
    dispatch: P<'k>,
    layout: DispatchLayout,
    /// Addresses of matrices.
    weights: P<'k>,
    /// Panels of a matrix, and bytes of each.
    tiles: usize,
    bytes: usize,
    /// Rows of a block, at most.
    rows: usize,
}

impl<'k> Path<'k> {
    /// `begin(rows)` at every block; `body(expert, panel, rows, the panel that follows)`.
    fn walk(&self, begin: impl FnOnce([I<'k>; 2]), body: impl FnOnce(&Expert<'k>, I<'k>, [I<'k>; 2], P<'k>)) {
        let k = self.k;
        k.tiles_by_expert(self.tiles, |active, [first, stop]| {
            let e = expert(self.dispatch, self.layout, active);
            let matrix = self.weights.load_address(e.id);
            // Behind the last panel of this expert's comes the first of the next one, if there is one for this call.
            let more = k.more_items((active + 1) * self.tiles);
            let other = expert(self.dispatch, self.layout, more.pick_int(active + 1, active));
            let after = self.weights.load_address(other.id);
            k.even_parts([e.first, e.end], self.rows, amx::BLOCK, |[row, end]| {
                begin([row, end]);
                let first_again = matrix.bytes(first * self.bytes);
                let last = end.ge(e.end).pick_address(after, first_again);
                k.each(first, stop, 1, |p| {
                    let next = (p + 1).lt(stop).pick_address(matrix.bytes((p + 1) * self.bytes), last);
                    body(&e, p, [row, end], next);
                });
            });
        });
    }
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
    let panel = |e: &Expert<'k>, p: I<'k>, range, next| {
        let weights = weights.load_address(e.id).bytes(p * bytes);
        let panel = Panel { weights, depth: inter, format, compute, schedule };
        let columns = Columns::of(k, p, hidden, None);
        let at = |slot| h.words(slot * h_ld);
        let results = columns.results(out, RowForm::f32(hidden));
        let rows = PanelRows { range, at: &at, apart: Some(h_ld), next: Some(next), out: results };
        multiply(k, &panel, &rows, None, &|slot, sums| {
            let bias = bias.map(|b| columns.bias(k, b.words(e.id * hidden)));
            columns.store(sums, bias, None, out.words(slot * hidden));
        });
    };
    if on_tiles(&k.isa, compute) {
        let path = Path { k, dispatch, layout, weights, tiles, bytes, rows: schedule.rows };
        path.walk(|_| {}, panel);
    } else {
        k.expert_tiles(tiles, |active, p| {
            let e = expert(dispatch, layout, active);
            panel(&e, p, [e.first, e.end], weights.load_address(e.id).bytes(p * bytes).beyond(bytes));
        });
    }
    finish(k, compute);
}
