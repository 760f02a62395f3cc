//! Kernels that move rows: embedding, gathering, copying.

use crate::dsl::{I, Kb, P};
use crate::spec::{EMBED_ROWS, KernelSpec, ROWS};
use moec_ir::types::{Coding, Format, GROUP};

pub(super) fn embed<'k>(k: &'k Kb<'k>, spec: &KernelSpec) {
    let KernelSpec::Embed { hidden, format, out_ld, .. } = *spec else {
        return k.fail("not an embedding");
    };
    let (ids, table, out) = (k.arg(0), k.arg(1), k.arg(2));
    k.rows(EMBED_ROWS, |row| {
        let id = ids.words(row).load_int();
        let out = out.words(row * out_ld);
        if format.is_grouped() {
            return grouped(k, format, table.bytes(id * format.row_bytes(hidden)), hidden, out);
        }
        let from = table.elements(id * hidden, format);
        k.columns(hidden, |c, span| {
            out.words(c).store_vec(from.elements(c, format).load_weights(format, span), span);
        });
    });
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
    let whole = hidden / GROUP;
    if whole > 0 {
        k.each(0, whole, 1, |g| group(g, GROUP));
    }
    if hidden > whole * GROUP {
        group(k.i(whole as i64), hidden - whole * GROUP);
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
