//! Follows the Graph from a result up to what it is made of, and notes the nodes on the way.
//!
//! A projection is a linear layer where the processor computes it, and a 1×1 convolution where the unit does. Where rows
//! become channels-first and back is passed over: both forms are the same numbers.
#![expect(clippy::cast_possible_truncation, reason = "a node has the index of its id")]

use moec_ir::{Graph, Module, Node, NodeId, Op, Operand, Scope, ValueId, WeightClass, WeightId};
use std::collections::BTreeSet;

/// Why nodes are not what is looked for, for people.
pub type Found<T> = Result<T, String>;

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
    /// What is added to the mean square.
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

    /// What gives the rows of an operand, in whichever form, and the changes of form between.
    fn skip(&self, mut operand: Operand) -> (Operand, Vec<usize>) {
        let mut between = Vec::new();
        while let Operand::Value(value) = operand
            && let Some(id) = self.graph.def(value)
            && let Some(node) = self.graph.nodes.get(id.0 as usize).filter(|n| n.scope == *self.scope)
            && matches!(node.op, Op::ToNchw | Op::FromNchw)
            && let Some(&before) = node.inputs.first()
        {
            between.push(id.0 as usize);
            operand = before;
        }
        (operand, between)
    }

    /// Steps over changes of form.
    pub fn origin(&mut self, operand: Operand) -> Operand {
        let (operand, between) = self.skip(operand);
        self.passed.extend(between);
        operand
    }

    /// Steps to the node that gives an operand.
    pub fn node(&mut self, operand: Operand) -> Found<&'a Node> {
        let Operand::Value(value) = self.origin(operand) else {
            return Err("a weight stands where a value is wanted".into());
        };
        let id = self.graph.def(value).ok_or("it reads an input of the entry point")?.0 as usize;
        let node = &self.graph.nodes[id];
        if node.scope != *self.scope {
            return Err(format!("it reaches out of `{}`, to `{}`", self.scope, node.op.name()));
        }
        self.passed.insert(id);
        Ok(node)
    }

    /// Looks at the node that gives an operand, without stepping there.
    pub fn peek(&self, operand: Operand) -> Option<&'a Node> {
        let (Operand::Value(value), _) = self.skip(operand) else { return None };
        let node = self.graph.nodes.get(self.graph.def(value)?.0 as usize)?;
        (node.scope == *self.scope).then_some(node)
    }

    /// Steps over a projection; gives it and what it reads.
    pub fn linear(&mut self, operand: Operand) -> Found<(Linear, Operand)> {
        let node = self.node(operand)?;
        let (Op::Linear { bias } | Op::Conv1x1 { groups: 1, bias }) = node.op else {
            return Err(format!("`{}` stands where a projection is wanted", node.op.name()));
        };
        let bias = bias.then(|| weight(node, 2)).transpose()?;
        let x = self.origin(input(node, 0)?);
        Ok((Linear { weight: weight(node, 1)?, bias }, x))
    }

    /// Steps over a root mean square norm; gives it and what it reads.
    pub fn rms(&mut self, operand: Operand) -> Found<(Rms, Operand)> {
        let node = self.node(operand)?;
        let Op::RmsNorm { eps, groups, weight: has } = node.op else {
            return Err(format!("`{}` stands where a norm is wanted", node.op.name()));
        };
        let weight = has.then(|| weight(node, 1)).transpose()?;
        Ok((Rms { weight, eps, groups }, input(node, 0)?))
    }

    /// Nodes that read a value, in whichever form.
    pub fn readers(&self, of: ValueId) -> Vec<&'a Node> {
        let reads = |o: &Operand| self.skip(*o).0 == Operand::Value(of);
        let changes = |n: &Node| matches!(n.op, Op::ToNchw | Op::FromNchw);
        self.nodes().filter(|n| !changes(n) && n.inputs.iter().any(reads)).collect()
    }

    /// The rows that a projection gives, which the walk then ends with.
    pub fn result(&mut self, node: &Node) -> Found<ValueId> {
        let y = *node.outputs.first().ok_or("a projection gives nothing")?;
        if !matches!(node.op, Op::Conv1x1 { .. }) {
            return Ok(y);
        }
        let rows = |n: &Node| n.op == Op::FromNchw && n.inputs == [Operand::Value(y)];
        let at = self.graph.nodes.iter().position(|n| n.scope == *self.scope && rows(n));
        let at = at.ok_or("what a convolution gives does not become rows")?;
        self.passed.insert(at);
        self.graph.nodes[at].outputs.first().copied().ok_or_else(|| "rows are nothing".into())
    }

    /// The one projection that reads a value, which the walk then ends with. Gives it and its result.
    pub fn reader(&mut self, of: ValueId) -> Found<(Linear, ValueId)> {
        let [node] = *self.readers(of) else {
            return Err("what it gives is not read by one projection".into());
        };
        let y = self.result(node)?;
        let (linear, _) = self.linear(Operand::Value(y))?;
        Ok((linear, y))
    }

    /// Ends the walk at its result: the nodes passed, in order, none of whose other results is read from elsewhere.
    pub fn close(self, y: ValueId) -> Found<Vec<NodeId>> {
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
pub fn input(node: &Node, i: usize) -> Found<Operand> {
    node.inputs.get(i).copied().ok_or_else(|| format!("`{}` has no operand {i}", node.op.name()))
}

/// Operand `i` of a node, a weight.
pub fn weight(node: &Node, i: usize) -> Found<WeightId> {
    match input(node, i)? {
        Operand::Weight(id) => Ok(id),
        _ => Err(format!("operand {i} of `{}` is no weight", node.op.name())),
    }
}

/// An operand that is a value.
pub fn value(operand: Operand) -> Found<ValueId> {
    match operand {
        Operand::Value(v) => Ok(v),
        _ => Err("a weight stands where a value is wanted".into()),
    }
}

/// Whether an operator is a projection of whole rows.
pub fn projects(op: &Op) -> bool {
    matches!(op, Op::Linear { .. } | Op::Conv1x1 { groups: 1, .. })
}

/// Whether an operator is a projection head by head.
pub fn projects_heads(op: &Op, heads: usize) -> bool {
    *op == Op::HeadLinear { heads } || *op == Op::Conv1x1 { groups: heads, bias: false }
}

/// Whether a node is a projection that may be rounded to f16: not one that routes.
pub fn rounds(module: &Module, node: &Node) -> bool {
    projects(&node.op) && weight(node, 1).is_ok_and(|id| module.weight(id).class != WeightClass::Exact)
}
