//! Removal of zero-computation experts from a routing.

use super::{Kernel, ROWS, Rule};
use crate::dsl::Kb;
use crate::machine::Isa;
use crate::spec::Symbol;
use moec_ir::plan::Results;

/// `[ids i32, weights, ids i32, sum]`: choices of the `zero` experts after the first `experts` as −1, and the
/// sum of their weights.
#[derive(Clone, Debug, PartialEq)]
pub struct ZeroExperts {
    /// Experts that compute.
    pub experts: usize,
    /// Experts that do not, numbered after them.
    pub zero: usize,
    /// Choices of a row.
    pub k: usize,
}

impl Kernel for ZeroExperts {
    fn kind(&self) -> &'static str {
        "zero_experts"
    }

    fn name(&self, s: &mut Symbol, _isa: &Isa) {
        s.word("zero_experts").num("e", self.experts).num("z", self.zero).num("k", self.k);
    }

    fn args(&self) -> usize {
        4
    }

    fn results(&self) -> Results {
        Results::last(2, self.args())
    }

    fn rules(&self, _isa: &Isa) -> Vec<Rule> {
        let all = self.experts.checked_add(self.zero).and_then(|n| i32::try_from(n).ok());
        vec![(self.k > 0, "no choices"), (all.is_some(), "more experts than ids")]
    }

    fn write<'k>(&self, k: &'k Kb<'k>) {
        let &Self { experts, zero, k: choices } = self;
        let [ids, weights, served, sum] = [0, 1, 2, 3].map(|i| k.arg(i));
        k.rows(ROWS, |row| {
            let at = row * choices;
            let total = k.fold(0, choices, 1, &[k.f(0.0)], |choice, total| {
                let id = ids.words(at + choice).load_int();
                let is_zero = id.ge(k.i(experts as i64)).and(id.lt(k.i((experts + zero) as i64)));
                served.words(at + choice).store_int(is_zero.pick_int(k.i(-1), id).narrow());
                let weight = weights.words(at + choice).load();
                vec![total[0] + is_zero.pick(weight, k.f(0.0))]
            });
            sum.words(row).store(total[0]);
        });
    }
}
