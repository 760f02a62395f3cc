//! `x · wᵀ` with bias, residual or gate in the epilogue.

use super::amx;
use super::micro::Columns;
use super::multiply::{finish, multiply, on_tiles, panel_bytes};
use super::panel::{Matrix, PanelRows};
use crate::dsl::{I, Kb};
use crate::spec::{KernelSpec, RowForm, packed_words, panels};

pub(super) fn write<'k>(k: &'k Kb<'k>, spec: &KernelSpec) {
    let KernelSpec::Linear {
        k: depth,
        n,
        format,
        compute,
        groups,
        x_ld,
        out_ld,
        bias,
        residual_ld,
        glu,
        schedule,
    } = *spec
    else {
        return k.fail("not a linear");
    };
    let mut args = (0..).map(|i| k.arg(i));
    let mut arg = || args.next().unwrap_or(k.scratch());
    let (x, weights) = (arg(), arg());
    let bias = bias.then(&mut arg);
    let residual = residual_ld.map(|ld| (arg(), ld));
    let out = arg();

    let per_group = panels(&k.isa, n, glu.is_some());
    let columns_out = if glu.is_some() { n / 2 } else { n };
    let words = packed_words(depth, compute);
    let tiled = on_tiles(&k.isa, compute);
    let bytes = panel_bytes(&k.isa, depth, format);
    let matrix = Matrix { outputs: (n, glu.is_some()), depth, format, compute, schedule };
    let body = |tile: I<'k>, range, again: Option<I<'k>>| {
        let (group, p) = if groups == 1 {
            (k.i(0), tile)
        } else {
            let count = k.i(per_group as i64);
            (tile.div(count), tile.rem(count))
        };
        let at = if groups == 1 { weights } else { weights.bytes(group * matrix.bytes(k)) };
        let panel = matrix.panel(k, at, p);
        let columns = Columns::of(k, p, n, glu);
        let bias = bias.map(|b| b.words(group * n));
        let at = |row| x.words(row * x_ld + group * words);
        let results = columns.results(out.words(group * columns_out), RowForm::f32(out_ld));
        // In a block of rows the panels follow each other as in memory.
        let next = tiled.then(|| panel.weights.beyond(bytes));
        let rows = PanelRows { range, at: &at, apart: Some(x_ld), next, out: results };
        multiply(k, &panel, &rows, again, &|row, sums| {
            let bias = bias.map(|b| columns.bias(k, b));
            let residual = residual.map(|(r, ld)| r.words(row * ld + group * columns_out));
            columns.store(sums, bias, residual, out.words(row * out_ld + group * columns_out));
        });
    };
    if tiled {
        k.tiles_by_block(schedule.rows, amx::BLOCK, |tile, range| body(tile, range, None));
    } else {
        k.even_tiles_in_turn(schedule.rows, |tile, range, again| body(tile, range, Some(again)));
    }
    finish(k, compute);
}
