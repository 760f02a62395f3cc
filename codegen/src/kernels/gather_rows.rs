//! Rows of a tensor in another order.

use super::{GpuKernel, Kernel, ROWS, Rule};
use crate::dsl::Kb;
use crate::machine::Isa;
use crate::spec::Symbol;

/// `[x, rows i32, out]`: row `rows[r]` of `x`, or zeros where that is negative.
#[derive(Clone, Debug, PartialEq)]
pub struct GatherRows {
    /// Columns.
    pub cols: usize,
    /// Row distance of `x`.
    pub x_ld: usize,
    /// Row distance of `out`.
    pub out_ld: usize,
}

impl Kernel for GatherRows {
    fn kind(&self) -> &'static str {
        "gather_rows"
    }

    fn name(&self, s: &mut Symbol, _isa: &Isa) {
        s.word("gather_rows").num("c", self.cols).num("x", self.x_ld).num("o", self.out_ld);
    }

    fn args(&self) -> usize {
        3
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
        let (x, rows, out) = (k.arg(0), k.arg(1), k.arg(2));
        k.rows(ROWS, |row| {
            let (from, out) = (rows.words(row).load_int(), out.words(row * out_ld));
            k.branch(from.lt(k.i(0)), || k.zero(out, cols), || k.copy(x.words(from * x_ld), out, cols));
        });
    }
}
