//! Rows of the tables of rules.

use super::language::{Attr, Facts, Moe};
use egg::{Applier, EGraph, Id, PatternAst, Rewrite, Subst, Symbol, Var};

pub(super) type Rule = Rewrite<Moe, Facts>;
pub(super) type Graph = EGraph<Moe, Facts>;

/// A rule with its equation.
pub struct Row {
    /// Rule.
    pub rule: Rule,
    /// The equation.
    pub equation: &'static str,
}

/// A row of a table.
pub(super) fn row(equation: &'static str, rule: Rule) -> Row {
    Row { rule, equation }
}

/// A variable of a rule.
pub(super) fn var(name: &str) -> Var {
    // Every name is a literal in the tables of rules.
    #[expect(clippy::unwrap_used, reason = "variable names are literals of the rule table")]
    name.parse().unwrap()
}

/// The right side of a rule, built by a function. Its arguments are the class of the left side and its
/// variables; it returns the equal node, or `None` if the rule does not apply.
pub(super) struct Build<F>(pub(super) F);

impl<F: Fn(&mut Graph, Id, &Subst) -> Option<Id>> Applier<Moe, Facts> for Build<F> {
    fn apply_one(
        &self,
        g: &mut Graph,
        class: Id,
        s: &Subst,
        _: Option<&PatternAst<Moe>>,
        rule: Symbol,
    ) -> Vec<Id> {
        let Some(node) = (self.0)(g, class, s) else { return Vec::new() };
        if g.union_trusted(class, node, rule) { vec![class] } else { Vec::new() }
    }
}

/// Channels `start .. start + len` of each head of `x`.
pub(super) fn add_slice(egraph: &mut Graph, heads: usize, start: usize, len: usize, x: Id) -> Id {
    let leaf = egraph.analysis.attr(Attr::Slice { heads, start, len });
    let attr = egraph.add(leaf);
    egraph.add(Moe::Slice([attr, x]))
}
