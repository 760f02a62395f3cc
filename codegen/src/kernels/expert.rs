//! The two halves of an expert's feed-forward network, over the rows that the dispatch table gives it. Matrices are
//! found by a table of addresses: an expert may lie anywhere, and move between two steps.

use super::micro::Columns;
use super::multiply::{self, finish, multiply, on_tiles, panel_bytes};
use super::panel::{Matrix, Panel, PanelRows};
use super::routed::{Expert, expert};
use super::{amx, neuron, unpack};
use crate::dsl::{I, Kb, LINE, P};
use crate::machine::Isa;
use crate::schedule::Schedule;
use crate::spec::{Compute, KernelSpec, RowForm, WeightOrder, packed_words, panels};
use moec_ir::Bundle;
use moec_ir::op::DispatchLayout;
use moec_ir::types::Format;

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
        order,
        schedule,
    } = *spec
    else {
        return k.fail("not a gate and up");
    };
    let (x, dispatch, weights) = (k.arg(0), k.arg(1), k.arg(2));
    let bias = bias.then(|| k.arg(3));
    let rests = (order == WeightOrder::Apart).then(|| k.arg(3));
    let out = k.arg(3 + usize::from(bias.or(rests).is_some()));
    let (both, gated) = (glu.projections() * inter, glu.is_gated());
    let tiles = panels(&k.isa, both, gated);
    let bytes = panel_bytes(&k.isa, hidden, format);
    let tokens = dispatch.words(layout.token());
    let lies = |slot| x.words(tokens.words(slot).load_int() * x_ld);
    let (products, _) = scratch_bytes(&k.isa, hidden, format, compute, order, schedule);
    let gathered = k.scratch().bytes(products);
    let written = gathered.bytes(gathered_bytes(&k.isa, layout.rows, hidden, compute));
    let stored = Matrix { outputs: (both, gated), depth: hidden, format, compute, schedule };
    let panel = |e: &Expert<'k>, p: I<'k>, rows: PanelRows<'_, 'k>, columns: &Columns<'k>| {
        let matrix = weights.load_address(e.id);
        let panel = by_panels(stored.panel(k, matrix, p), order, written, |sketch, to| {
            let bundle = Bundle { format, hidden, sketch };
            let rests = rests.map(|at| neuron::Rests { at, first: e.id * inter });
            let places = neuron::Places { k, bundle, inter, matrix, rests };
            neuron::panels::gate_up(k, &places, inter, written, p, to);
        });
        let next = if order == WeightOrder::Panels { rows.next } else { Some(written) };
        multiply(k, &panel, &PanelRows { next, ..rows }, None, &|slot, sums| {
            let bias = bias.map(|b| columns.bias(k, b.words(e.id * both)));
            columns.store_as(result.form, sums, bias, None, out.words(slot * result.ld));
        });
    };
    let columns = |p| Columns::of(k, p, both, Some(glu));
    if !on_tiles(&k.isa, compute) {
        // Rows are read where they lie: gathering them first costs more than their addresses do.
        return k.expert_tiles(tiles, |active, p| {
            let (e, columns) = (expert(dispatch, layout, active), columns(p));
            let next = Some(weights.load_address(e.id).bytes(p * bytes).beyond(bytes));
            let out = columns.results(out, result);
            panel(&e, p, PanelRows { range: [e.first, e.end], at: &lies, apart: None, next, out }, &columns);
        });
    }
    // The rows of a tile must lie a fixed distance apart: those of a block are gathered once.
    let words = packed_words(hidden, compute);
    let (ld, to) = (gathered_ld(words), gathered);
    let path = Path { k, dispatch, layout, weights, tiles, bytes, rows: schedule.rows };
    path.walk(
        |[first, end]| k.each(first, end, 1, |slot| k.copy(lies(slot), to.words((slot - first) * ld), words)),
        |e, p, range, next| {
            let columns = columns(p);
            let at = |slot: I<'k>| to.words((slot - range[0]) * ld);
            let out = columns.results(out, result);
            panel(e, p, PanelRows { range, at: &at, apart: Some(ld), next: Some(next), out }, &columns);
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

/// Bytes of scratch of products, and of a panel that is written behind them out of neurons.
pub(crate) fn scratch_bytes(
    isa: &Isa,
    depth: usize,
    format: Format,
    compute: Compute,
    order: WeightOrder,
    schedule: Schedule,
) -> (usize, usize) {
    match order {
        WeightOrder::Panels => (multiply::scratch_bytes(isa, depth, format, compute, schedule), 0),
        WeightOrder::Neurons { .. } | WeightOrder::Apart => {
            let format = unpack::format(compute);
            let products = multiply::scratch_bytes(isa, depth, format, compute, schedule);
            (products.next_multiple_of(LINE), panel_bytes(isa, unpack::depth(depth), format))
        }
    }
}

/// The panel that is multiplied: the stored one, or one that `write(whether bundles have sketches, its format)` writes.
fn by_panels<'k>(
    panel: Panel<'k>,
    order: WeightOrder,
    written: P<'k>,
    write: impl FnOnce(bool, Format),
) -> Panel<'k> {
    match order {
        WeightOrder::Panels => panel,
        WeightOrder::Neurons { .. } | WeightOrder::Apart => {
            let format = unpack::format(panel.compute);
            write(order.sketch(), format);
            // What was just written needs no fetching.
            Panel { weights: written, format, schedule: Schedule { ahead: 0, ..panel.schedule }, ..panel }
        }
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
    let KernelSpec::ExpertDown { layout, inter, hidden, format, compute, h_ld, bias, order, schedule } =
        *spec
    else {
        return k.fail("not a down projection");
    };
    let (h, dispatch, weights) = (k.arg(0), k.arg(1), k.arg(2));
    let bias = bias.then(|| k.arg(3));
    let out = k.arg(3 + usize::from(bias.is_some()));
    let tiles = panels(&k.isa, hidden, false);
    let bytes = panel_bytes(&k.isa, inter, format);
    let (products, _) = scratch_bytes(&k.isa, inter, format, compute, order, schedule);
    let written = k.scratch().bytes(products);
    let stored = Matrix { outputs: (hidden, false), depth: inter, format, compute, schedule };
    let panel = |e: &Expert<'k>, p: I<'k>, range, next| {
        let matrix = weights.load_address(e.id);
        let panel = by_panels(stored.panel(k, matrix, p), order, written, |sketch, to| {
            let bundle = Bundle { format, hidden, sketch };
            let rests = neuron::Rests { at: weights, first: e.id * inter };
            let rests = (order == WeightOrder::Apart).then_some(rests);
            let places = neuron::Places { k, bundle, inter, matrix, rests };
            neuron::panels::down(k, &places, inter, written, p, to);
        });
        let next = if order == WeightOrder::Panels { next } else { written };
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
