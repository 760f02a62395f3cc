//! Kernels that move rows: embedding, gathering, copying.

use super::panel::panel_bytes;
use crate::dsl::{I, Kb, P};
use crate::spec::{EMBED_ROWS, KernelSpec, ROWS};
use moec_ir::types::{Coding, Format, GROUP};

pub(super) fn embed<'k>(k: &'k Kb<'k>, spec: &KernelSpec) {
    let KernelSpec::Embed { hidden, format, panels, out_ld, .. } = *spec else {
        return k.fail("not an embedding");
    };
    let (ids, table, out) = (k.arg(0), k.arg(1), k.arg(2));
    k.rows(EMBED_ROWS, |row| {
        let id = ids.words(row).load_int();
        let out = out.words(row * out_ld);
        if panels {
            return column(k, format, table, id, hidden, out);
        }
        if format.is_grouped() {
            return grouped(k, format, table.bytes(id * format.row_bytes(hidden)), hidden, out);
        }
        let from = table.elements(id * hidden, format);
        k.columns(hidden, |c, span| {
            out.words(c).store_vec(from.elements(c, format).load_weights(format, span), span);
        });
    });
}

/// Row `id` of a table in panels, as f32: a column of one of them.
fn column<'k>(k: &'k Kb<'k>, format: Format, table: P<'k>, id: I<'k>, hidden: usize, out: P<'k>) {
    let nr = k.isa.nr;
    let (panel, column) = (id.div(k.i(nr as i64)), id.rem(k.i(nr as i64)));
    let panel = table.bytes(panel * panel_bytes(&k.isa, hidden, format));
    if format.is_grouped() {
        return column_of_codes(k, format, panel, column, hidden, out);
    }
    k.each(0, hidden, 1, |c| {
        let value = match format {
            Format::F32 => panel.words(c * nr + column).load(),
            Format::F16 => panel.halves(c * nr + column).load_f16(),
            // Pairs of channels lie side by side.
            _ => {
                let upper = c & 1;
                panel.halves((c - upper) * nr + column * 2 + upper).load_bf16()
            }
        };
        out.words(c).store(value);
    });
}

/// As [`column`], of codes: a word holds four of them, and of nibbles four more, 16 channels on.
fn column_of_codes<'k>(
    k: &'k Kb<'k>,
    format: Format,
    panel: P<'k>,
    column: I<'k>,
    hidden: usize,
    out: P<'k>,
) {
    let (nr, kind) = (k.isa.nr, format.coding());
    let words = (format.row_bytes(GROUP) - 2) / 4;
    let halves = if kind == Some(Coding::Bytes) { 1 } else { 2 };
    let group = |g: I<'k>, count: usize| {
        let (from, out) = (panel.bytes(g * panel_bytes(&k.isa, GROUP, format)), out.words(g * GROUP));
        let scale = from.words(words * nr).halves(column).load_scale(format);
        for (i, half) in (0..words).flat_map(|i| (0..halves).map(move |half| (i, half))) {
            let word = from.words(column + i * nr).load_int().narrow();
            for j in 0..4 {
                let nibble = || word.logical_shr(8 * j as i64 + 4 * half as i64) & 15;
                let code = match kind {
                    Some(Coding::Nibbles) => nibble() - 8,
                    Some(Coding::E2m1) => nibble().e2m1().signed_byte(0),
                    _ => word.signed_byte(j),
                };
                let at = half * GROUP / 2 + 4 * i + j;
                if at < count {
                    out.words(at).store(code.to_float() * scale);
                }
            }
        }
    };
    each_group(k, hidden, group);
}

/// A row of codes, then of scales, as f32. Vectors of codes are read whole: the last group is padded.
fn grouped<'k>(k: &'k Kb<'k>, format: Format, from: P<'k>, hidden: usize, out: P<'k>) {
    let (bytes, kind) = (format.row_bytes(GROUP) - 2, format.coding());
    let scales = from.bytes(hidden.div_ceil(GROUP) * bytes);
    let group = |g: I<'k>, count: usize| {
        let (scale, from, out) =
            (scales.bytes(g * 2).load_scale(format), from.bytes(g * bytes), out.words(g * GROUP));
        for at in (0..count).step_by(k.lanes()) {
            let codes = from.bytes(at % bytes).load_bytes();
            let nibble = |codes: I<'k>| if at < bytes { codes & 15 } else { codes.shr(4) };
            // The sign of a byte, in all of its lane.
            let signed = |codes: I<'k>| codes.shl(24).shr(24);
            let codes = match kind {
                Some(Coding::Nibbles) => nibble(codes) - 8,
                Some(Coding::E2m1) => signed(nibble(codes).e2m1()),
                _ => signed(codes),
            };
            out.words(at).store_vec(codes.to_float() * scale, k.span(count - at));
        }
    };
    each_group(k, hidden, group);
}

/// `body(group, numbers in it)` for each group of a row.
fn each_group<'k>(k: &'k Kb<'k>, cols: usize, body: impl Fn(I<'k>, usize)) {
    let whole = cols / GROUP;
    if whole > 0 {
        k.each(0, whole, 1, |g| body(g, GROUP));
    }
    if cols > whole * GROUP {
        body(k.i(whole as i64), cols - whole * GROUP);
    }
}

pub(super) fn gather<'k>(k: &'k Kb<'k>, spec: &KernelSpec) {
    let KernelSpec::GatherRows { cols, x_ld, out_ld } = *spec else {
        return k.fail("not a gather");
    };
    let (x, rows, out) = (k.arg(0), k.arg(1), k.arg(2));
    k.rows(ROWS, |row| {
        let (from, out) = (rows.words(row).load_int(), out.words(row * out_ld));
        k.branch(from.lt(k.i(0)), || k.zero(out, cols), || k.copy(x.words(from * x_ld), out, cols));
    });
}

pub(super) fn copy<'k>(k: &'k Kb<'k>, spec: &KernelSpec) {
    let KernelSpec::Copy { groups, cols, in_group, out_group, in_ld, out_ld } = *spec else {
        return k.fail("not a copy");
    };
    let (from, to) = (k.arg(0), k.arg(1));
    k.rows(ROWS, |row| {
        k.each(0, groups, 1, |g| {
            k.copy(from.words(row * in_ld + g * in_group), to.words(row * out_ld + g * out_group), cols);
        });
    });
}

pub(super) fn zero_experts<'k>(k: &'k Kb<'k>, spec: &KernelSpec) {
    let KernelSpec::ZeroExperts { experts, zero, k: choices } = *spec else {
        return k.fail("not of zero experts");
    };
    let [ids, weights, served, sum] = [0, 1, 2, 3].map(|i| k.arg(i));
    k.rows(ROWS, |row| {
        let at = row * choices;
        let total = k.fold(0, choices, 1, &[k.f(0.0)], |choice, total| {
            let id = ids.words(at + choice).load_int();
            let is_zero = id.ge(k.i(experts as i64)).and(id.lt(k.i((experts + zero) as i64)));
            served.words(at + choice).store_int(is_zero.pick_int(k.i(-1), id).narrow());
            let weight = weights.words(at + choice).load();
            vec![total[0] + is_zero.pick(weight, k.f(0.0))]
        });
        sum.words(row).store(total[0]);
    });
}
