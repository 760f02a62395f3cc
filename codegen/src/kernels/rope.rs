//! Heads rotated by their positions, and normalised before.

use super::position::{self, HeadOperation, Rotation, RowNorm};
use super::{GpuKernel, Kernel, ROWS, Rule};
use crate::dsl::Kb;
use crate::machine::Isa;
use crate::spec::Symbol;

/// `[x, norm weight?, angles (cos[rotary/2], sin[rotary/2] per row), out]`: heads normalised, if so, and
/// rotated. Without a norm `out` may be `x`.
#[derive(Clone, Debug, PartialEq)]
pub struct Rope {
    /// Heads.
    pub heads: usize,
    /// Channels of a head.
    pub dim: usize,
    /// The norm before.
    pub norm: Option<RowNorm>,
    /// The rotation.
    pub rotation: Rotation,
    /// Row distance of `x`.
    pub x_ld: usize,
    /// Row distance of `out`.
    pub out_ld: usize,
}

impl Kernel for Rope {
    fn kind(&self) -> &'static str {
        "rope"
    }

    fn name(&self, s: &mut Symbol, _isa: &Isa) {
        s.rotation(self.rotation);
        s.norm(self.norm);
        s.num("h", self.heads).num("d", self.dim).num("x", self.x_ld).num("o", self.out_ld);
    }

    fn args(&self) -> usize {
        3 + RowNorm::args(self.norm)
    }

    fn rules(&self, _isa: &Isa) -> Vec<Rule> {
        let &Self { heads, dim, norm, rotation, x_ld, out_ld } = self;
        let mut rules = vec![(x_ld >= heads * dim && out_ld >= heads * dim, "rows overlap")];
        rules.extend(position::rules(heads, dim, norm, Some(rotation)));
        rules
    }

    fn on_gpu(&self) -> Option<&dyn GpuKernel> {
        Some(self)
    }

    fn write<'k>(&self, k: &'k Kb<'k>) {
        let &Self { heads, dim, norm, rotation, x_ld, out_ld } = self;
        let mut args = (0..).map(|i| k.arg(i));
        let mut arg = || args.next().unwrap_or(k.scratch());
        let x = arg();
        let operation = HeadOperation::new(dim, norm, Some(rotation), &mut arg);
        let out = arg();
        let moved = x.equals(out).not();
        k.rows(ROWS, |row| {
            let x = x.words(row * x_ld);
            let of_row = operation.of_row(k, x);
            k.each(0, heads, 1, |head| {
                operation.head(k, (x, row, head), of_row, out.words(row * out_ld + head * dim), Some(moved));
            });
        });
    }
}
