//! Follows the Graph from a result up to its operands, and notes the nodes that it passes.
#![expect(clippy::cast_possible_truncation, reason = "a node has the index of its id")]

use moec_ir::{Graph, Module, Node, NodeId, Op, Operand, Scope, ValueId, WeightClass, WeightId};
use std::collections::BTreeSet;

/// Result of a search; the error is the reason that nodes do not fit, for people.
pub type MatchResult<T> = Result<T, String>;

/// A projection of the Graph.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Linear {
    /// `[out, in]`
    pub weight: WeightId,
    /// `[out]`
    pub bias: Option<WeightId>,
}

/// A root mean square norm of the Graph.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Rms {
    /// `[C]`
    pub weight: Option<WeightId>,
    /// Number that is added to the mean square.
    pub eps: f32,
    /// Parts of a row that are normalised by themselves.
    pub groups: usize,
}

/// A walk through the nodes of one scope.
pub struct Walk<'a> {
    /// The Graph.
    pub graph: &'a Graph,
    scope: &'a Scope,
    passed: BTreeSet<usize>,
}

impl<'a> Walk<'a> {
    /// Begins a walk.
    pub fn new(graph: &'a Graph, scope: &'a Scope) -> Self {
        Self { graph, scope, passed: BTreeSet::new() }
    }

    /// Nodes of the scope.
    pub fn nodes(&self) -> impl Iterator<Item = &'a Node> + use<'a> {
        let scope = self.scope;
        self.graph.nodes.iter().filter(move |n| n.scope == *scope)
    }

    /// Steps to the node that gives an operand.
    pub fn node(&mut self, operand: Operand) -> MatchResult<&'a Node> {
        let Operand::Value(value) = operand else {
            return Err("expected a value, found a weight".into());
        };
        let id = self.graph.def(value).ok_or("it reads an input of the entry point")?.0 as usize;
        let node = &self.graph.nodes[id];
        if node.scope != *self.scope {
            return Err(format!("it reads a value outside of `{}`, in `{}`", self.scope, node.op.name()));
        }
        self.passed.insert(id);
        Ok(node)
    }

    /// Looks at the node that gives an operand, without stepping there.
    pub fn peek(&self, operand: Operand) -> Option<&'a Node> {
        let Operand::Value(value) = operand else { return None };
        let node = self.graph.nodes.get(self.graph.def(value)?.0 as usize)?;
        (node.scope == *self.scope).then_some(node)
    }

    /// Steps over a projection; gives it and its input.
    pub fn linear(&mut self, operand: Operand) -> MatchResult<(Linear, Operand)> {
        let node = self.node(operand)?;
        let Op::Linear { bias } = node.op else {
            return Err(format!("expected a projection, found `{}`", node.op.name()));
        };
        let bias = bias.then(|| weight(node, 2)).transpose()?;
        Ok((Linear { weight: weight(node, 1)?, bias }, input(node, 0)?))
    }

    /// Steps over a root mean square norm; gives it and its input.
    pub fn rms(&mut self, operand: Operand) -> MatchResult<(Rms, Operand)> {
        let node = self.node(operand)?;
        let Op::RmsNorm { eps, groups, weight: has } = node.op else {
            return Err(format!("expected a norm, found `{}`", node.op.name()));
        };
        let weight = has.then(|| weight(node, 1)).transpose()?;
        Ok((Rms { weight, eps, groups }, input(node, 0)?))
    }

    /// Nodes that read a value.
    pub fn readers(&self, of: ValueId) -> Vec<&'a Node> {
        self.nodes().filter(|n| n.inputs.contains(&Operand::Value(of))).collect()
    }

    /// The one projection that reads a value, which the walk then ends with. Gives it and its result.
    pub fn reader(&mut self, of: ValueId) -> MatchResult<(Linear, ValueId)> {
        let [node] = *self.readers(of) else {
            return Err("its result is not read by exactly one projection".into());
        };
        let y = result(node)?;
        let (linear, _) = self.linear(Operand::Value(y))?;
        Ok((linear, y))
    }

    /// Ends the walk at its result. Returns the passed nodes, in order; none of their other results may be
    /// read elsewhere.
    pub fn close(self, y: ValueId) -> MatchResult<Vec<NodeId>> {
        let inner: BTreeSet<ValueId> = self
            .passed
            .iter()
            .flat_map(|&i| &self.graph.nodes[i].outputs)
            .copied()
            .filter(|v| *v != y)
            .collect();
        let outside = self.graph.nodes.iter().enumerate().filter(|(i, _)| !self.passed.contains(i));
        let read = |o: &Operand| matches!(o, Operand::Value(v) if inner.contains(v));
        if let Some((_, node)) = outside.into_iter().find(|(_, n)| n.inputs.iter().any(read)) {
            return Err(format!("`{}` of `{}` reads inside of it", node.op.name(), node.scope));
        }
        Ok(self.passed.into_iter().map(|i| NodeId(i as u32)).collect())
    }
}

/// Operand `i` of a node.
pub fn input(node: &Node, i: usize) -> MatchResult<Operand> {
    node.inputs.get(i).copied().ok_or_else(|| format!("`{}` has no operand {i}", node.op.name()))
}

/// Operand `i` of a node, a weight.
pub fn weight(node: &Node, i: usize) -> MatchResult<WeightId> {
    match input(node, i)? {
        Operand::Weight(id) => Ok(id),
        _ => Err(format!("operand {i} of `{}` is not a weight", node.op.name())),
    }
}

/// Result of a projection.
pub fn result(node: &Node) -> MatchResult<ValueId> {
    node.outputs.first().copied().ok_or_else(|| "a projection has no result".into())
}

/// An operand that is a value.
pub fn value(operand: Operand) -> MatchResult<ValueId> {
    match operand {
        Operand::Value(v) => Ok(v),
        _ => Err("expected a value, found a weight".into()),
    }
}

/// Whether an operator is a projection of whole rows.
pub fn projects(op: &Op) -> bool {
    matches!(op, Op::Linear { .. })
}

/// Whether an operator is a projection head by head.
pub fn projects_heads(op: &Op, heads: usize) -> bool {
    *op == Op::HeadLinear { heads }
}

/// Whether a node is a projection that may be rounded to f16: not one that routes.
pub fn rounds(module: &Module, node: &Node) -> bool {
    projects(&node.op) && weight(node, 1).is_ok_and(|id| module.weight(id).class != WeightClass::Exact)
}
