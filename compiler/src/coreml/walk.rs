//! Follows the Graph from a result up to what it is made of, and notes the nodes on the way.

use moec_ir::{Graph, Module, Node, NodeId, Op, Operand, ValueId, WeightClass, WeightId};
use std::collections::BTreeSet;

/// Why nodes are not what is looked for, for people.
pub(super) type Found<T> = Result<T, String>;

/// A linear layer of the Graph.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Linear {
    /// `[out, in]`
    pub(super) weight: WeightId,
    /// `[out]`
    pub(super) bias: Option<WeightId>,
}

/// A root mean square norm of the Graph.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Rms {
    /// `[C]`
    pub(super) weight: Option<WeightId>,
    pub(super) eps: f32,
    pub(super) groups: usize,
}

/// A walk through the nodes of one scope.
pub(super) struct Walk<'a> {
    pub(super) graph: &'a Graph,
    scope: &'a str,
    passed: BTreeSet<usize>,
}

impl<'a> Walk<'a> {
    pub(super) fn new(graph: &'a Graph, scope: &'a str) -> Self {
        Self { graph, scope, passed: BTreeSet::new() }
    }

    /// Nodes of the scope.
    pub(super) fn nodes(&self) -> impl Iterator<Item = &'a Node> + use<'a> {
        let scope = self.scope;
        self.graph.nodes.iter().filter(move |n| n.scope == scope)
    }

    /// Steps to the node that gives an operand.
    pub(super) fn node(&mut self, operand: Operand) -> Found<&'a Node> {
        let Operand::Value(value) = operand else {
            return Err("a weight stands where a value is wanted".into());
        };
        let id = self.graph.def(value).ok_or("it reads an input of the entry point")?.0 as usize;
        let node = &self.graph.nodes[id];
        if node.scope != self.scope {
            return Err(format!("it reaches out of `{}`, to `{}`", self.scope, node.op.name()));
        }
        self.passed.insert(id);
        Ok(node)
    }

    /// Looks at the node that gives an operand, without stepping there.
    pub(super) fn peek(&self, operand: Operand) -> Option<&'a Node> {
        let Operand::Value(value) = operand else { return None };
        let node = self.graph.nodes.get(self.graph.def(value)?.0 as usize)?;
        (node.scope == self.scope).then_some(node)
    }

    /// Steps over a linear layer; gives it and what it reads.
    pub(super) fn linear(&mut self, operand: Operand) -> Found<(Linear, Operand)> {
        let node = self.node(operand)?;
        let Op::Linear { bias } = node.op else {
            return Err(format!("`{}` stands where a projection is wanted", node.op.name()));
        };
        let bias = bias.then(|| weight(node, 2)).transpose()?;
        Ok((Linear { weight: weight(node, 1)?, bias }, input(node, 0)?))
    }

    /// Steps over a root mean square norm; gives it and what it reads.
    pub(super) fn rms(&mut self, operand: Operand) -> Found<(Rms, Operand)> {
        let node = self.node(operand)?;
        let Op::RmsNorm { eps, groups, weight: has } = node.op else {
            return Err(format!("`{}` stands where a norm is wanted", node.op.name()));
        };
        let weight = has.then(|| weight(node, 1)).transpose()?;
        Ok((Rms { weight, eps, groups }, input(node, 0)?))
    }

    /// The one linear layer that reads a value, which the walk then ends with. Gives it and its result.
    pub(super) fn reader(&mut self, of: ValueId) -> Found<(Linear, ValueId)> {
        let mut readers = self.nodes().filter(|n| n.inputs.contains(&Operand::Value(of)));
        let (Some(node), None) = (readers.next(), readers.next()) else {
            return Err("what it gives is not read by one projection".into());
        };
        let y = *node.outputs.first().ok_or("a projection gives nothing")?;
        let (linear, _) = self.linear(Operand::Value(y))?;
        Ok((linear, y))
    }

    /// Ends the walk at its result: the nodes passed, in order, none of whose other results is read from elsewhere.
    pub(super) fn close(self, y: ValueId) -> Found<Vec<NodeId>> {
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
pub(super) fn input(node: &Node, i: usize) -> Found<Operand> {
    node.inputs.get(i).copied().ok_or_else(|| format!("`{}` has no operand {i}", node.op.name()))
}

/// Operand `i` of a node, a weight.
pub(super) fn weight(node: &Node, i: usize) -> Found<WeightId> {
    match input(node, i)? {
        Operand::Weight(id) => Ok(id),
        _ => Err(format!("operand {i} of `{}` is no weight", node.op.name())),
    }
}

/// An operand that is a value.
pub(super) fn value(operand: Operand) -> Found<ValueId> {
    match operand {
        Operand::Value(v) => Ok(v),
        _ => Err("a weight stands where a value is wanted".into()),
    }
}

/// Whether a node is a linear layer that may be rounded to f16: not one that routes.
pub(super) fn rounds(module: &Module, node: &Node) -> bool {
    matches!(node.op, Op::Linear { .. })
        && weight(node, 1).is_ok_and(|id| module.weight(id).class != WeightClass::Exact)
}
