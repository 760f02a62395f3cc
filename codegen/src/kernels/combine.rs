//! The weighted sum of the expert outputs of each token.

use super::{GpuKernel, Kernel, ROWS, Rule};
use crate::dsl::Kb;
use crate::machine::Isa;
use crate::spec::Symbol;
use moec_ir::op::DispatchLayout;

/// `[y f32 [slots, H], dispatch i32, weights f32 [T, k], residual?, out]`: the weighted sum of each token's
/// slots. The residual is added last, so the bits are those of a sum and a separate addition. `out` may be
/// `residual`.
#[derive(Clone, Debug, PartialEq)]
pub struct Combine {
    /// Layout of the dispatch table.
    pub layout: DispatchLayout,
    /// Channels.
    pub hidden: usize,
    /// Row distance of `out`.
    pub out_ld: usize,
    /// Row distance of the residual, if there.
    pub residual_ld: Option<usize>,
    /// Whether a slot may be −1: its choice adds nothing.
    pub partial: bool,
}

impl Kernel for Combine {
    fn kind(&self) -> &'static str {
        "combine"
    }

    fn name(&self, s: &mut Symbol, _isa: &Isa) {
        s.word("combine").layout(self.layout).num("h", self.hidden).num("o", self.out_ld);
        s.option("r", self.residual_ld).flag("partial", self.partial);
    }

    fn args(&self) -> usize {
        4 + usize::from(self.residual_ld.is_some())
    }

    fn rules(&self, _isa: &Isa) -> Vec<Rule> {
        vec![(self.out_ld >= self.hidden, "rows overlap")]
    }

    fn on_gpu(&self) -> Option<&dyn GpuKernel> {
        Some(self)
    }

    fn write<'k>(&self, k: &'k Kb<'k>) {
        let &Self { layout, hidden, out_ld, residual_ld, partial } = self;
        let (y, dispatch, weights) = (k.arg(0), k.arg(1), k.arg(2));
        let residual = residual_ld.map(|ld| (k.arg(3), ld));
        let out = k.arg(3 + usize::from(residual.is_some()));
        k.rows(ROWS, |row| {
            let slots = dispatch.words(layout.slot()).words(row * layout.k);
            let terms: Vec<_> = (0..layout.k)
                .map(|j| {
                    let weight = weights.words(row * layout.k).words(j).load().splat();
                    let slot = slots.words(j).load_int();
                    // A choice without a slot adds nothing; the first slot may hold NaN.
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
                // The residual comes last, as where another step adds it: experts may be combined in one
                // place and added in another.
                let sum = residual.map_or(sum, |(r, ld)| sum + r.words(row * ld).words(c).load_vec(span));
                out.words(c).store_vec(sum, span);
            });
        });
    }
}
