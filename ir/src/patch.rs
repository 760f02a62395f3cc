//! Labelled changes of a Graph.
//!
//! A pass that adds or removes nodes of a Graph describes this in a [`Patch`], which is applied whole or not
//! at all. Every use still finds its definition before it, every value is defined once, and none is left
//! over. Otherwise the error has the label of the patch, and the Graph stays unchanged. Types are checked by
//! the verifier ([`crate::verify::module`]), which runs after every pass.

use crate::graph::{Graph, INPUTS, Node, NodeId, Operand, ValueId};
use crate::types::Type;
use std::collections::{BTreeSet, HashMap};
use thiserror::Error;

/// A change of one Graph: nodes to remove, nodes and values to add, and uses to replace.
#[derive(Clone, Debug)]
pub struct Patch {
    label: String,
    /// Values of the Graph that it is for.
    known: usize,
    values: Vec<Type>,
    removed: BTreeSet<usize>,
    /// Nodes, each with the node of the Graph before which it is inserted.
    added: Vec<(usize, Node)>,
    redirected: HashMap<ValueId, ValueId>,
    retyped: HashMap<ValueId, Type>,
}

/// Reason that a patch does not fit its Graph.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error("patch `{label}`: {why}")]
pub struct PatchError {
    /// The patch.
    pub label: String,
    /// The fault that the Graph would have.
    pub why: String,
}

impl Patch {
    /// A patch for a Graph that changes nothing yet. The label says what it is for: `split the experts of
    /// layer 3`.
    pub fn new(label: impl Into<String>, graph: &Graph) -> Self {
        Self {
            label: label.into(),
            known: graph.values.len(),
            values: Vec::new(),
            removed: BTreeSet::new(),
            added: Vec::new(),
            redirected: HashMap::new(),
            retyped: HashMap::new(),
        }
    }

    /// Gives a value of the Graph another type: a node that is added defines it now.
    pub fn retype(&mut self, value: ValueId, ty: Type) {
        self.retyped.insert(value, ty);
    }

    /// A new value, which a node that is added must define.
    pub fn value(&mut self, ty: Type) -> ValueId {
        self.values.push(ty);
        ValueId((self.known + self.values.len() - 1) as u32)
    }

    /// Takes a node out. Nodes that are added may define its results in its place.
    pub fn remove(&mut self, node: NodeId) {
        self.removed.insert(node.0 as usize);
    }

    /// Inserts a node before one that the Graph has, removed or not, after all that was inserted there
    /// already. The number past the last means the end.
    pub fn add(&mut self, before: NodeId, node: Node) {
        self.added.push((before.0 as usize, node));
    }

    /// Lets every node that the Graph keeps, and its result, read `to` where it read `from`. Nodes that are
    /// added read what they say.
    pub fn redirect(&mut self, from: ValueId, to: ValueId) {
        self.redirected.insert(from, to);
    }

    /// Changes the Graph.
    ///
    /// # Errors
    /// The Graph would not be well-formed, and stays unchanged: a value that is used before it is defined,
    /// defined twice, or never; an unknown node; a patch for another Graph.
    pub fn apply(self, graph: &mut Graph) -> Result<(), PatchError> {
        let order = self.check(graph).map_err(|why| PatchError { label: self.label.clone(), why })?;
        let Self { values, added, redirected, retyped, .. } = self;
        let mut old: Vec<Option<Node>> = std::mem::take(&mut graph.nodes).into_iter().map(Some).collect();
        let mut new: Vec<Option<Node>> = added.into_iter().map(|(_, node)| Some(node)).collect();
        let taken = order.into_iter().filter_map(|place| match place {
            NodeSource::Added(i) => new.get_mut(i)?.take(),
            NodeSource::Original(i) => {
                let mut node = old.get_mut(i)?.take()?;
                for input in &mut node.inputs {
                    *input = redirect(&redirected, *input);
                }
                Some(node)
            }
        });
        graph.nodes = taken.collect();
        for (value, ty) in retyped {
            if let Some(of) = graph.values.get_mut(value.0 as usize) {
                *of = ty;
            }
        }
        graph.values.extend(values);
        graph.output = redirected.get(&graph.output).copied().unwrap_or(graph.output);
        Ok(())
    }

    /// The nodes of the changed Graph in order, if it is well-formed.
    fn check(&self, graph: &Graph) -> Result<Vec<NodeSource>, String> {
        if graph.values.len() != self.known {
            return Err(format!("it is for a Graph of {} values, not of {}", self.known, graph.values.len()));
        }
        let nodes = graph.nodes.len();
        let mut named = self.removed.iter().copied();
        if let Some(missing) =
            named.find(|&i| i >= nodes).or(self.added.iter().map(|a| a.0).find(|&i| i > nodes))
        {
            return Err(format!("there is no node {missing}"));
        }
        let mut added_before: Vec<Vec<usize>> = vec![Vec::new(); nodes + 1];
        self.added.iter().enumerate().for_each(|(i, (before, _))| added_before[*before].push(i));
        let mut defined = vec![false; self.known + self.values.len()];
        defined.iter_mut().take(INPUTS).for_each(|d| *d = true);
        let mut order = Vec::with_capacity(nodes + self.added.len());
        for (at, added) in added_before.into_iter().enumerate() {
            for i in added {
                define(&mut defined, &self.added[i].1, &HashMap::new())?;
                order.push(NodeSource::Added(i));
            }
            if let Some(node) = graph.nodes.get(at).filter(|_| !self.removed.contains(&at)) {
                define(&mut defined, node, &self.redirected)?;
                order.push(NodeSource::Original(at));
            }
        }
        match defined.iter().position(|d| !d) {
            Some(v) => Err(format!("%{v} is never defined")),
            None => Ok(order),
        }
    }
}

/// A node of the changed Graph.
enum NodeSource {
    Original(usize),
    Added(usize),
}

fn redirect(redirected: &HashMap<ValueId, ValueId>, input: Operand) -> Operand {
    match input {
        Operand::Value(v) => Operand::Value(redirected.get(&v).copied().unwrap_or(v)),
        other => other,
    }
}

/// Takes note of what a node defines, if all that it uses is defined.
fn define(defined: &mut [bool], node: &Node, redirected: &HashMap<ValueId, ValueId>) -> Result<(), String> {
    let place = || format!("`{}` in `{}`", node.op.name(), node.scope);
    for input in &node.inputs {
        if let Operand::Value(v) = redirect(redirected, *input)
            && defined.get(v.0 as usize) != Some(&true)
        {
            return Err(format!("{} uses %{} before it is defined", place(), v.0));
        }
    }
    for v in &node.outputs {
        match defined.get_mut(v.0 as usize) {
            Some(known) if !*known => *known = true,
            Some(_) => return Err(format!("{} defines %{}, which is defined already", place(), v.0)),
            None => return Err(format!("{} defines %{}, which is not a value", place(), v.0)),
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::graph::EntryKind;
    use crate::op::{Activation, Op};
    use crate::scope::Scope;

    fn node(op: Op, input: u32, output: u32) -> Node {
        Node {
            op,
            inputs: vec![ValueId(input).into()],
            outputs: vec![ValueId(output)],
            scope: Scope::default(),
        }
    }

    fn act(input: u32, output: u32) -> Node {
        node(Op::Act(Activation::Silu), input, output)
    }

    /// `%4 = silu(%0)`, `%5 = silu(%4)`, `%6 = silu(%5)`; types do not matter here.
    fn chain() -> Graph {
        Graph {
            kind: EntryKind::Prefill(4),
            values: vec![Type::f32([4, 8]); 7],
            nodes: vec![act(0, 4), act(4, 5), act(5, 6)],
            output: ValueId(6),
        }
    }

    /// Applies a patch to the chain; returns the inputs and outputs of each node, and the result.
    fn applied(make: impl FnOnce(&mut Patch)) -> Result<(Vec<(u32, u32)>, u32), String> {
        let mut graph = chain();
        let mut patch = Patch::new("here", &graph);
        make(&mut patch);
        if let Err(e) = patch.apply(&mut graph) {
            assert_eq!(graph, chain(), "the Graph stays what it was");
            return Err(e.to_string());
        }
        let ends = |n: &Node| match (n.inputs.as_slice(), n.outputs.as_slice()) {
            (&[Operand::Value(a)], &[b]) => (a.0, b.0),
            other => panic!("{other:?}"),
        };
        Ok((graph.nodes.iter().map(ends).collect(), graph.output.0))
    }

    #[test]
    fn node_is_inserted_before_another_and_its_result_used() {
        let found = applied(|p| {
            let v = p.value(Type::f32([4, 8]));
            p.add(NodeId(2), act(5, v.0));
            p.redirect(ValueId(5), v);
        });
        assert_eq!(found, Ok((vec![(0, 4), (4, 5), (5, 7), (7, 6)], 6)));
    }

    #[test]
    fn node_replaces_others() {
        let found = applied(|p| {
            p.remove(NodeId(1));
            p.add(NodeId(1), act(0, 5));
        });
        assert_eq!(found, Ok((vec![(0, 4), (0, 5), (5, 6)], 6)));
        let end = applied(|p| {
            let v = p.value(Type::f32([4, 8]));
            p.add(NodeId(3), act(6, v.0));
            p.redirect(ValueId(6), v);
        });
        assert_eq!(end, Ok((vec![(0, 4), (4, 5), (5, 6), (6, 7)], 7)), "the result is redirected, too");
    }

    #[test]
    fn invalid_patches_are_refused_by_label() {
        let wrong = |why: &str, make: fn(&mut Patch)| {
            assert_eq!(applied(make), Err(format!("patch `here`: {why}")));
        };
        wrong("`silu` in `` uses %5 before it is defined", |p| {
            p.remove(NodeId(1));
        });
        wrong("%7 is never defined", |p| {
            p.value(Type::f32([1]));
        });
        wrong("`silu` in `` defines %4, which is defined already", |p| p.add(NodeId(3), act(0, 4)));
        wrong("`silu` in `` defines %9, which is not a value", |p| p.add(NodeId(3), act(0, 9)));
        wrong("`silu` in `` uses %9 before it is defined", |p| p.add(NodeId(3), act(9, 6)));
        wrong("there is no node 3", |p| p.remove(NodeId(3)));
        wrong("there is no node 4", |p| p.add(NodeId(4), act(0, 6)));
        let mut other = chain();
        let patch = Patch::new("here", &other);
        other.values.push(Type::f32([1]));
        assert_eq!(
            patch.apply(&mut other).unwrap_err().to_string(),
            "patch `here`: it is for a Graph of 7 values, not of 8"
        );
    }
}
