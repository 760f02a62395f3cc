//! Rotary embedding.

use crate::dsl::{Kb, P};
use crate::spec::{KernelSpec, ROWS};
use moec_ir::op::RopeStyle;

pub(super) fn rope<'k>(k: &'k Kb<'k>, spec: &KernelSpec) {
    let KernelSpec::Rope { heads, dim, rotary, offset, style, x_ld, out_ld, angles_ld } = *spec else {
        return k.fail("not a rotation");
    };
    let (x, angles, out) = (k.arg(0), k.arg(1), k.arg(2));
    let elsewhere = x.equals(out).not();
    k.rows(ROWS, |row| {
        let angles = angles.words(row * angles_ld);
        k.each(0, heads, 1, |head| {
            let (x, out) = (x.words(row * x_ld + head * dim), out.words(row * out_ld + head * dim));
            rotate(k, x.words(offset), out.words(offset), angles, rotary, style);
            if rotary < dim {
                k.when(elsewhere, || {
                    let after = offset + rotary;
                    k.copy(x, out, offset);
                    k.copy(x.words(after), out.words(after), dim - after);
                });
            }
        });
    });
}

/// Rotates one head. Every pair is read before it is written, so `out` may be `x`.
fn rotate<'k>(k: &'k Kb<'k>, x: P<'k>, out: P<'k>, angles: P<'k>, rotary: usize, style: RopeStyle) {
    let half = rotary / 2;
    let lanes = k.lanes();
    match style {
        RopeStyle::Half => k.columns(half, |i, span| {
            let (cos, sin) = (angles.words(i).load_vec(span), angles.words(half).words(i).load_vec(span));
            let (a, b) = (x.words(i).load_vec(span), x.words(half).words(i).load_vec(span));
            out.words(i).store_vec(a * cos - b * sin, span);
            out.words(half).words(i).store_vec(b * cos + a * sin, span);
        }),
        RopeStyle::Interleaved => {
            let pairs = |i, count: usize| {
                let span = k.span(count);
                let (lo, hi) = (k.span(2 * count), k.span((2 * count).saturating_sub(lanes)));
                let (cos, sin) = (angles.words(i).load_vec(span), angles.words(half).words(i).load_vec(span));
                let (x, out) = (x.words(i * 2), out.words(i * 2));
                let [a, b] = x.load_vec(lo).unzip(x.words(lanes).load_vec(hi));
                let [first, second] = (a * cos - b * sin).zip(b * cos + a * sin);
                out.store_vec(first, lo);
                out.words(lanes).store_vec(second, hi);
            };
            let whole = half / lanes * lanes;
            k.each(0, whole, lanes, |i| pairs(i, lanes));
            if half > whole {
                pairs(k.i(whole as i64), half - whole);
            }
        }
    }
}
