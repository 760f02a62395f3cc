//! Columns of rows copied to other columns.

use super::{GpuKernel, Kernel, ROWS, Rule};
use crate::dsl::Kb;
use crate::machine::Isa;
use crate::spec::Symbol;

/// `[in, out]`: columns `g·in_group ..+ cols` to columns `g·out_group ..+ cols`, for each group: what
/// slicing and joining whole rows (one group) or heads take.
#[derive(Clone, Debug, PartialEq)]
pub struct CopyColumns {
    /// Groups (heads).
    pub groups: usize,
    /// Columns copied per group.
    pub cols: usize,
    /// Columns from group to group of `in`.
    pub in_group: usize,
    /// Columns from group to group of `out`.
    pub out_group: usize,
    /// Row distance of `in`.
    pub in_ld: usize,
    /// Row distance of `out`.
    pub out_ld: usize,
}

impl Kernel for CopyColumns {
    fn kind(&self) -> &'static str {
        "copy"
    }

    fn name(&self, s: &mut Symbol, _isa: &Isa) {
        s.word("copy").num("g", self.groups).num("c", self.cols);
        s.num("ig", self.in_group).num("og", self.out_group).num("i", self.in_ld).num("o", self.out_ld);
    }

    fn args(&self) -> usize {
        2
    }

    fn rules(&self, _isa: &Isa) -> Vec<Rule> {
        let width = |group: usize| self.groups.saturating_sub(1) * group + self.cols;
        vec![
            (self.in_ld >= width(self.in_group) && self.out_ld >= width(self.out_group), "rows overlap"),
            (self.groups == 1 || self.out_group >= self.cols, "groups of the output overlap"),
        ]
    }

    fn on_gpu(&self) -> Option<&dyn GpuKernel> {
        Some(self)
    }

    fn write<'k>(&self, k: &'k Kb<'k>) {
        let &Self { groups, cols, in_group, out_group, in_ld, out_ld } = self;
        let (from, to) = (k.arg(0), k.arg(1));
        k.rows(ROWS, |row| {
            k.each(0, groups, 1, |g| {
                k.copy(from.words(row * in_ld + g * in_group), to.words(row * out_ld + g * out_group), cols);
            });
        });
    }
}
