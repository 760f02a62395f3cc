//! Parts of attention joined: the same softmax over parts as over tokens.

use super::LOWEST;
use crate::dsl::{F, Kb, P, Span};
use crate::spec::KernelSpec;

const LOG2_E: f32 = std::f32::consts::LOG2_E;

pub(crate) fn write<'k>(k: &'k Kb<'k>, spec: &KernelSpec) {
    let KernelSpec::AttentionMerge { heads, v_dim, splits, sinks, out_ld } = *spec else {
        return k.fail("not a merge");
    };
    let parts = k.arg(0);
    let sinks = sinks.then(|| k.arg(1));
    let out = k.arg(1 + usize::from(sinks.is_some()));
    let (words, factors) = (v_dim + 2, k.scratch());
    let weight = |x: F<'k>| x.splat().exp2_down(false).lane(0);
    k.tiles(1, |head, row, _| {
        let parts = parts.words((row * heads + head) * (splits * words));
        let sink = sinks.map_or(k.f(LOWEST), |p| p.words(head).load() * LOG2_E);
        let max = k.fold(0, splits, 1, &[sink], |i, max| vec![max[0].max(parts.words(i * words).load())])[0];
        let start = if sinks.is_some() { weight(sink - max) } else { k.f(0.0) };
        let sum = k.fold(0, splits, 1, &[start], |i, sum| {
            let part = parts.words(i * words);
            let factor = weight(part.load() - max);
            factors.words(i).store(factor);
            vec![part.words(1).load().fma(factor, sum[0])]
        })[0];
        let factor = sum.gt(k.f(0.0)).pick(k.f(1.0) / sum, k.f(0.0)).splat();
        let to: P<'k> = out.words(row * out_ld + head * v_dim);
        k.columns(v_dim, |c, span: Span<'k>| {
            let total = k.fold(0, splits, 1, &[k.fv(0.0)], |i, total| {
                let value = parts.words(i * words + 2).words(c).load_vec(span);
                vec![value.fma(factors.words(i).load(), total[0])]
            })[0];
            to.words(c).store_vec(total * factor, span);
        });
    });
}
