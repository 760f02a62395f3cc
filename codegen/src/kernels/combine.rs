//! The weighted sum of the expert outputs of each token.

use crate::dsl::Kb;
use crate::spec::{KernelSpec, ROWS};

pub(super) fn write<'k>(k: &'k Kb<'k>, spec: &KernelSpec) {
    let KernelSpec::Combine { layout, hidden, out_ld, residual_ld, partial } = *spec else {
        return k.fail("not a combine");
    };
    let (y, dispatch, weights) = (k.arg(0), k.arg(1), k.arg(2));
    let residual = residual_ld.map(|ld| (k.arg(3), ld));
    let out = k.arg(3 + usize::from(residual.is_some()));
    k.rows(ROWS, |row| {
        let slots = dispatch.words(layout.slot()).words(row * layout.k);
        let terms: Vec<_> = (0..layout.k)
            .map(|j| {
                let weight = weights.words(row * layout.k).words(j).load().splat();
                let slot = slots.words(j).load_int();
                // A choice without a slot adds nothing; what lies in the first one may be no number.
                let there = partial.then(|| slot.ge(k.i(0)));
                (y.words(if partial { slot.max(k.i(0)) } else { slot } * hidden), weight, there)
            })
            .collect();
        let out = out.words(row * out_ld);
        k.columns(hidden, |c, span| {
            let sum = terms.iter().fold(k.fv(0.0), |sum, (y, w, there)| {
                let y = y.words(c).load_vec(span);
                there.map_or(y, |there| there.pick(y, k.fv(0.0))).fma(*w, sum)
            });
            // The residual comes last, as where another step adds it: experts may be combined in one place and added in another.
            let sum = residual.map_or(sum, |(r, ld)| sum + r.words(row * ld).words(c).load_vec(span));
            out.words(c).store_vec(sum, span);
        });
    });
}
