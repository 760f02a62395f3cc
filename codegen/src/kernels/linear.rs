//! `x · wᵀ` with bias, residual or gate in the epilogue.

use super::amx;
use super::micro::{Columns, Panel};
use super::multiply::{Rows, finish, multiply, on_tiles, panel_bytes};
use crate::dsl::Kb;
use crate::spec::{KernelSpec, packed_words, panels};

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
    let whole = if on_tiles(&k.isa, compute) { amx::BLOCK } else { 1 };
    k.even_tiles_in_turn(schedule.rows, whole, |tile, range, again| {
        let (group, p) = if groups == 1 {
            (k.i(0), tile)
        } else {
            let count = k.i(per_group as i64);
            (tile.div(count), tile.rem(count))
        };
        let weights = weights.bytes(tile * panel_bytes(&k.isa, depth, format));
        let panel = Panel { weights, depth, format, compute, schedule };
        let columns = Columns::of(k, p, n, glu);
        let bias = bias.map(|b| b.words(group * n));
        let at = |row| x.words(row * x_ld + group * words);
        let rows = Rows { range, at: &at, apart: Some(x_ld), all: [k.i(0), k.row_count()], onward: false };
        multiply(k, &panel, &rows, Some(again), &|row, sums| {
            let bias = bias.map(|b| columns.bias(k, b));
            let residual = residual.map(|(r, ld)| r.words(row * ld + group * columns_out));
            columns.store(sums, bias, residual, out.words(row * out_ld + group * columns_out));
        });
    });
    finish(k, compute);
}
