//! Softmax over the columns of a row.

use super::{GpuKernel, Kernel, ROWS, Rule};
use crate::dsl::{F, Kb, P};
use crate::machine::Isa;
use crate::spec::Symbol;

/// `[x, out]`: softmax over the columns; `out` may be `x`.
#[derive(Clone, Debug, PartialEq)]
pub struct Softmax {
    /// Columns.
    pub cols: usize,
    /// Row distance of `x`.
    pub x_ld: usize,
    /// Row distance of `out`.
    pub out_ld: usize,
}

impl Kernel for Softmax {
    fn kind(&self) -> &'static str {
        "softmax"
    }

    fn name(&self, s: &mut Symbol, _isa: &Isa) {
        s.word("softmax").num("c", self.cols).num("x", self.x_ld).num("o", self.out_ld);
    }

    fn args(&self) -> usize {
        2
    }

    fn rules(&self, _isa: &Isa) -> Vec<Rule> {
        vec![
            (self.x_ld >= self.cols && self.out_ld >= self.cols, "rows overlap"),
            (self.cols > 0, "no columns"),
        ]
    }

    fn on_gpu(&self) -> Option<&dyn GpuKernel> {
        Some(self)
    }

    fn write<'k>(&self, k: &'k Kb<'k>) {
        let &Self { cols, x_ld, out_ld } = self;
        let (x, out) = (k.arg(0), k.arg(1));
        k.rows(ROWS, |row| {
            let (x, out) = (x.words(row * x_ld), out.words(row * out_ld));
            let sum = exponentials(k, x, out, cols);
            k.columns(cols, |c, span| {
                let at = out.words(c);
                at.store_vec(at.load_vec(span) / sum, span);
            });
        });
    }
}

/// Writes `e^(x − max x)` to `out`, which may be `x`, and returns the sum.
pub(super) fn exponentials<'k>(k: &'k Kb<'k>, x: P<'k>, out: P<'k>, cols: usize) -> F<'k> {
    let largest = |m: F<'k>, c, span| m.max(x.words(c).load_vec(span).within(span, f32::NEG_INFINITY));
    let max = k.fold_columns(cols, 2, k.fv(f32::NEG_INFINITY), largest, F::max).lanes_max();
    let add = |sum: F<'k>, c, span| {
        let e = (x.words(c).load_vec(span) - max).exp();
        out.words(c).store_vec(e, span);
        sum + e.within(span, 0.0)
    };
    k.fold_columns(cols, 1, k.fv(0.0), add, |a, b| a + b).sum()
}
