//! Parts of attention joined: the same softmax over parts as over tokens.

use super::LOWEST;
use crate::dsl::{F, Kb, P, Span};
use crate::kernels::{GpuKernel, Kernel, Rule};
use crate::machine::Isa;
use crate::spec::Symbol;
use moec_ir::plan::Grid;

const LOG2_E: f32 = std::f32::consts::LOG2_E;

/// `[parts f32 [T, heads, splits, 2 + v_dim], sinks? f32 [heads], out]`: parts of attention joined. A part
/// is its maximum (of scores times log2 e), its sum, and its sum of values.
#[derive(Clone, Debug, PartialEq)]
pub struct AttentionMerge {
    /// Query heads.
    pub heads: usize,
    /// Channels of a head's result.
    pub v_dim: usize,
    /// Parts.
    pub splits: usize,
    /// Whether the sinks are there.
    pub sinks: bool,
    /// Row distance of `out`.
    pub out_ld: usize,
}

impl Kernel for AttentionMerge {
    fn kind(&self) -> &'static str {
        "attention_merge"
    }

    fn name(&self, s: &mut Symbol, _isa: &Isa) {
        s.word("attention_merge").num("h", self.heads).num("v", self.v_dim).num("n", self.splits);
        s.flag("sinks", self.sinks).num("o", self.out_ld);
    }

    fn grid(&self, _isa: &Isa) -> Grid {
        Grid::Tiles { rows: 1, tiles: self.heads as u32 }
    }

    fn args(&self) -> usize {
        2 + usize::from(self.sinks)
    }

    fn scratch_bytes(&self, _isa: &Isa) -> usize {
        self.splits * 4
    }

    fn rules(&self, _isa: &Isa) -> Vec<Rule> {
        vec![
            (self.heads > 0 && self.v_dim > 0 && self.splits > 0, "an extent is zero"),
            (self.out_ld >= self.heads * self.v_dim, "rows overlap"),
        ]
    }

    fn on_gpu(&self) -> Option<&dyn GpuKernel> {
        Some(self)
    }

    fn write<'k>(&self, k: &'k Kb<'k>) {
        let &Self { heads, v_dim, splits, sinks, out_ld } = self;
        let parts = k.arg(0);
        let sinks = sinks.then(|| k.arg(1));
        let out = k.arg(1 + usize::from(sinks.is_some()));
        let (words, factors) = (v_dim + 2, k.scratch());
        let weight = |x: F<'k>| x.splat().exp2_down(false).lane(0);
        k.tiles(1, |head, row, _| {
            let parts = parts.words((row * heads + head) * (splits * words));
            let sink = sinks.map_or(k.f(LOWEST), |p| p.words(head).load() * LOG2_E);
            let max =
                k.fold(0, splits, 1, &[sink], |i, max| vec![max[0].max(parts.words(i * words).load())])[0];
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
}
