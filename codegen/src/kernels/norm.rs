//! Root mean square norm and layer norm.

use crate::dsl::Kb;
use crate::spec::{KernelSpec, NormKind, ROWS};

/// Sums that take turns, to hide the latency of additions.
const SUMS: usize = 4;

pub(super) fn write<'k>(k: &'k Kb<'k>, spec: &KernelSpec) {
    let KernelSpec::Norm { kind, width, groups, x_ld, out_ld, eps, weight } = *spec else {
        return k.fail("not a norm");
    };
    let x = k.arg(0);
    let weight = weight.then(|| k.arg(1));
    let at = 1 + usize::from(weight.is_some());
    let bias = (kind == NormKind::Layer).then(|| k.arg(at));
    let out = k.arg(at + usize::from(bias.is_some()));
    k.rows(ROWS, |row| {
        k.each(0, groups, 1, |group| {
            let x = x.words(row * x_ld + group * width);
            let out = out.words(row * out_ld + group * width);
            let zero = k.fv(0.0);
            let mean = match kind {
                NormKind::Rms => k.f(0.0),
                NormKind::Layer => {
                    let add = |sum, c, span| x.words(c).load_vec(span) + sum;
                    k.fold_columns(width, SUMS, zero, add, |a, b| a + b).sum() / width as f32
                }
            };
            let squares = |sum, c, span| {
                let x = x.words(c).load_vec(span);
                let x = match kind {
                    NormKind::Rms => x,
                    NormKind::Layer => (x - mean).within(span, 0.0),
                };
                x.fma(x, sum)
            };
            let square = k.fold_columns(width, SUMS, zero, squares, |a, b| a + b).sum() / width as f32;
            let factor = (k.f(1.0) / (square + eps).sqrt()).splat();
            k.columns(width, |c, span| {
                let x = x.words(c).load_vec(span);
                let x = match kind {
                    NormKind::Rms => x * factor,
                    NormKind::Layer => (x - mean) * factor,
                };
                let x = weight.map_or(x, |w| x * w.words(c).load_vec(span));
                let x = bias.map_or(x, |b| x + b.words(c).load_vec(span));
                out.words(c).store_vec(x, span);
            });
        });
    });
}
