//! Root mean square norm and layer norm, in the forms that their readers multiply.

use super::quantise::write_row;
use crate::dsl::{F, I, Kb, P, Span};
use crate::spec::{KernelSpec, NormKind, ROWS, packed_words};

/// Sums that take turns, to hide the latency of additions.
const SUMS: usize = 4;

pub(super) fn write<'k>(k: &'k Kb<'k>, spec: &KernelSpec) {
    let KernelSpec::Norm { kind, width, groups, x_ld, ref outs, eps, weight } = *spec else {
        return k.fail("not a norm");
    };
    let x = k.arg(0);
    let weight = weight.then(|| k.arg(1));
    let at = 1 + usize::from(weight.is_some());
    let bias = (kind == NormKind::Layer).then(|| k.arg(at));
    let first = at + usize::from(bias.is_some());
    let results: Vec<_> = outs.iter().enumerate().map(|(i, &out)| (k.arg(first + i), out)).collect();
    k.rows(ROWS, |row| {
        k.each(0, groups, 1, |group| {
            let x = x.words(row * x_ld + group * width);
            let mean = match kind {
                NormKind::Rms => None,
                NormKind::Layer => Some(mean(k, x, width)),
            };
            let factor = factor(k, x, width, eps, mean).splat();
            let read = |c: I<'k>, span: Span<'k>| {
                let x = x.words(c).load_vec(span);
                let x = mean.map_or(x, |mean| x - mean) * factor;
                let x = weight.map_or(x, |w| x * w.words(c).load_vec(span));
                bias.map_or(x, |b| x + b.words(c).load_vec(span))
            };
            for &(to, out) in &results {
                let words = packed_words(width, out.form);
                write_row(k, out.form, width, &read, to.words(row * out.ld + group * words));
            }
        });
    });
}

fn mean<'k>(k: &'k Kb<'k>, x: P<'k>, width: usize) -> F<'k> {
    let add = |sum, c, span| x.words(c).load_vec(span) + sum;
    k.fold_columns(width, SUMS, k.fv(0.0), add, |a, b| a + b).sum() / width as f32
}

/// What `width` numbers, less their mean if there is one, are multiplied by.
pub(super) fn factor<'k>(k: &'k Kb<'k>, x: P<'k>, width: usize, eps: f32, mean: Option<F<'k>>) -> F<'k> {
    let squares = |sum, c, span| {
        let x = x.words(c).load_vec(span);
        let x = mean.map_or(x, |mean| (x - mean).within(span, 0.0));
        x.fma(x, sum)
    };
    let square = k.fold_columns(width, SUMS, k.fv(0.0), squares, |a, b| a + b).sum() / width as f32;
    k.f(1.0) / (square + eps).sqrt()
}
