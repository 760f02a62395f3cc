//! Kernels that move rows: embedding, gathering, copying.

use crate::dsl::Kb;
use crate::spec::{EMBED_ROWS, KernelSpec, ROWS};

pub(super) fn embed<'k>(k: &'k Kb<'k>, spec: &KernelSpec) {
    let KernelSpec::Embed { hidden, format, out_ld, .. } = *spec else {
        return k.fail("not an embedding");
    };
    let (ids, table, out) = (k.arg(0), k.arg(1), k.arg(2));
    k.rows(EMBED_ROWS, |row| {
        let from = table.elements(ids.words(row).load_int() * hidden, format);
        let out = out.words(row * out_ld);
        k.columns(hidden, |c, span| {
            out.words(c).store_vec(from.elements(c, format).load_weights(format, span), span);
        });
    });
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
