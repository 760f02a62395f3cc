//! Analyses of the readers of values: additions that become part of a producer's epilogue, tensors of the KV
//! cache that are values, and weights that are matrices of linear layers.

use crate::outline_graphs::Statics;
use moec_ir::state::rotated_channels;
use moec_ir::{Graph, Module, Node, NodeId, Op, Operand, StateDecl, StateId, ValueId, WeightId};
use std::collections::{HashMap, HashSet};

/// Tensors of the KV cache that attention reads as values.
pub(super) fn values(module: &Module) -> HashSet<StateId> {
    let mut found = HashSet::new();
    for graph in &module.entries {
        for node in &graph.nodes {
            let Op::Attention(desc) = &node.op else { continue };
            found.extend(state_of(graph, node, 2).filter(|_| !desc.v_from_k));
        }
    }
    found
}

/// Channels of each tensor of the KV cache that can be rotated together: all of a head's that a power of two allows. Of keys that are values, too, blocks end where values do.
pub(super) fn rotations(module: &Module) -> Vec<usize> {
    let own = |state: &StateDecl| state.ty.shape.last().copied().unwrap_or(0);
    let mut extents: Vec<Vec<usize>> = module.states.iter().map(|s| vec![own(s)]).collect();
    for graph in &module.entries {
        for node in &graph.nodes {
            let Op::Attention(desc) = &node.op else { continue };
            if let Some(of_keys) = state_of(graph, node, 1).and_then(|s| extents.get_mut(s.0 as usize))
                && desc.v_from_k
            {
                of_keys.push(desc.v_dim);
            }
        }
    }
    let channels = |(state, extents): (&StateDecl, &Vec<usize>)| {
        if state.kind.needs_snapshots() { 1 } else { rotated_channels(extents) }
    };
    module.states.iter().zip(&extents).map(channels).collect()
}

/// The state that an operand is, or whose writes it is the result of.
fn state_of(graph: &Graph, node: &Node, operand: usize) -> Option<StateId> {
    let mut operand = node.inputs.get(operand).copied();
    while let Some(Operand::Value(v)) = operand {
        operand = graph.def(v).and_then(|n| graph.nodes[n.0 as usize].inputs.first().copied());
    }
    match operand {
        Some(Operand::State(s)) => Some(s),
        _ => None,
    }
}

/// Weights that kernels of the CPU multiply by in a linear layer, outside of static graphs. Linear layers
/// that `elsewhere` gives to a unit with kernels of its own do not count.
pub(super) fn matrices(
    module: &Module,
    statics: &Statics,
    elsewhere: impl Fn(&Node) -> bool,
) -> HashSet<WeightId> {
    let mut found = HashSet::new();
    for graph in &module.entries {
        let calls = statics.calls.iter().filter(|c| c.boundary.entry == graph.kind);
        let inside: HashSet<NodeId> = calls.flat_map(|c| &c.boundary.nodes).copied().collect();
        for (at, node) in (0..).map(NodeId).zip(&graph.nodes) {
            if let (Op::Linear { .. }, Some(&Operand::Weight(w))) = (&node.op, node.inputs.get(1))
                && !inside.contains(&at)
                && !elsewhere(node)
            {
                found.insert(w);
            }
        }
    }
    found
}

/// By node, the times that it, and what it depends on, wait for other units: an exchange is between a node that is
/// `elsewhere` and one that is not.
pub(super) fn exchanges(graph: &Graph, elsewhere: impl Fn(&Node) -> bool) -> Vec<usize> {
    let mut found: Vec<usize> = Vec::with_capacity(graph.nodes.len());
    let mut defined: HashMap<ValueId, usize> = HashMap::new();
    for (at, node) in graph.nodes.iter().enumerate() {
        let here = !elsewhere(node);
        let before = node.inputs.iter().filter_map(|input| match input {
            Operand::Value(v) => defined.get(v),
            Operand::Weight(_) | Operand::State(_) => None,
        });
        let after = |&before: &usize| found[before] + usize::from(here && elsewhere(&graph.nodes[before]));
        let own = before.map(after).max().unwrap_or(0);
        found.push(own);
        defined.extend(node.outputs.iter().map(|&v| (v, at)));
    }
    found
}

/// Additions that become part of the epilogue of one operand's producer: add node → (producer, other
/// operand). Nodes `inside` a subgraph have no epilogue. No producer waits for an operand that comes from another
/// unit later, by the [`exchanges`] of the nodes.
pub(super) fn residuals(
    graph: &Graph,
    inside: &HashSet<usize>,
    exchanges: &[usize],
) -> HashMap<usize, (usize, ValueId)> {
    let mut readers: HashMap<ValueId, usize> = HashMap::new();
    let mut definition: HashMap<ValueId, usize> = HashMap::new();
    for (at, node) in graph.nodes.iter().enumerate() {
        for input in &node.inputs {
            if let Operand::Value(v) = input {
                *readers.entry(*v).or_default() += 1;
            }
        }
        definition.extend(node.outputs.iter().map(|&v| (v, at)));
    }
    let fuses = |v: ValueId| {
        let at = *definition.get(&v)?;
        let op = &graph.nodes[at].op;
        let able = matches!(op, Op::Linear { .. } | Op::Combine { .. }) && !inside.contains(&at);
        (able && readers.get(&v) == Some(&1) && v != graph.output).then_some(at)
    };
    let mut found = HashMap::new();
    for (at, node) in graph.nodes.iter().enumerate() {
        if let (Op::Add, &[Operand::Value(a), Operand::Value(b)]) = (&node.op, node.inputs.as_slice())
            && !inside.contains(&at)
        {
            // Taking the later producer frees its inputs earlier.
            let options = [(fuses(a), b), (fuses(b), a)];
            let waits = |&(p, other): &(usize, ValueId)| {
                definition.get(&other).is_some_and(|&d| exchanges[d] > exchanges[p])
            };
            let options = options.into_iter().filter_map(|(p, other)| Some((p?, other)));
            let best = options.filter(|option| !waits(option)).max_by_key(|(p, _)| *p);
            if let Some((producer, other)) = best.filter(|_| a != b) {
                found.insert(at, (producer, other));
            }
        }
    }
    found
}
