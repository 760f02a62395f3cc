//! Dense networks by neurons: an expert that every row chooses.
//!
//! A router with one expert has no choice at any logit, so that a channel of the embedding is sufficient as
//! its logits. No weighting and no sum follows: slots are in the order of rows.
//!
//! ```text
//! h = linear_glu(x, gate_up)     →   table = dispatch(router(slice(embedding)))
//! y = linear(h, down)                y = neuron_ffn(x, table, neurons)
//! ```

use super::ExpertWeights;
use moec_base::error::{Error, Result};
use moec_ir::op::{DispatchLayout, Renorm, RouterDesc, Score, WeightFrom};
use moec_ir::{Glu, Graph, Module, Node, NodeId, Op, Operand, Patch, Type, ValueId};

/// A gated network that computes every token.
#[derive(Clone, Copy, Debug)]
pub(super) struct Network {
    /// The node that joins gate and up, and the node that multiplies by down.
    nodes: [usize; 2],
    pub(super) glu: Glu,
    pub(super) halves: ExpertWeights,
    pub(super) layer: u32,
}

/// Networks whose gates leave exact zeros, in layers without experts.
pub(super) fn networks(module: &Module, graph: &Graph) -> Vec<Network> {
    (0..graph.nodes.len()).filter_map(|at| network(module, graph, at)).collect()
}

fn network(module: &Module, graph: &Graph, at: usize) -> Option<Network> {
    let node = graph.nodes.get(at)?;
    let Op::LinearGlu { glu, bias: false } = node.op else { return None };
    let (&[Operand::Value(_), Operand::Weight(gate_up)], &[h]) =
        (node.inputs.as_slice(), node.outputs.as_slice())
    else {
        return None;
    };
    let layer = node.scope.layer.filter(|_| glu.skips())?;
    let experts = |n: &Node| matches!(n.op, Op::ExpertFfn { .. } | Op::NeuronFfn { .. });
    if graph.nodes.iter().any(|n| n.scope.layer == Some(layer) && experts(n)) {
        return None;
    }
    let mut readers = graph.nodes.iter().enumerate().filter(|(_, n)| n.inputs.contains(&Operand::Value(h)));
    let (reader, joins) = readers.next().filter(|_| graph.output != h)?;
    let &[_, Operand::Weight(down)] = joins.inputs.as_slice() else { return None };
    let alone = matches!(joins.op, Op::Linear { bias: false }) && readers.next().is_none();
    let format = module.weight(gate_up).format;
    let fits = format == module.weight(down).format && format.holds_neurons();
    (alone && fits).then_some(Network { nodes: [at, reader], glu, halves: [gate_up, down], layer })
}

/// Adds a router with one expert after the embedding. Returns its choices: ids of all rows.
///
/// # Errors
/// A bug of the compiler: a Graph without an embedding.
pub(super) fn choices(graph: &mut Graph) -> Result<ValueId> {
    let found = graph.nodes.iter().position(|n| matches!(n.op, Op::Embed));
    let embed = found.and_then(|at| Some((at, graph.nodes.get(at)?)));
    let (at, node) = embed.ok_or_else(|| Error::bug("a model without an embedding"))?;
    let (&[x], scope) = (node.outputs.as_slice(), node.scope.clone()) else {
        return Err(Error::bug("an embedding of nothing"));
    };
    let rows = graph.kind.rows();
    let mut patch = Patch::new("every row chooses", graph);
    let [logits, ids, weights] =
        [Type::f32([rows, 1]), Type::i32([rows, 1]), Type::f32([rows, 1])].map(|ty| patch.value(ty));
    let router = RouterDesc {
        experts: 1,
        zero: None,
        k: 1,
        score: Score::Softmax,
        select_bias: false,
        groups: None,
        weight_from: WeightFrom::Score,
        renorm: Renorm::None,
        scale: 1.0,
    };
    let after = NodeId(at as u32 + 1);
    let mut add = |op, from: ValueId, outputs| {
        patch.add(after, Node { op, inputs: vec![from.into()], outputs, scope: scope.clone() });
    };
    add(Op::Slice { heads: 1, start: 0, len: 1 }, x, vec![logits]);
    add(Op::Router(router), logits, vec![ids, weights]);
    patch.apply(graph).map_err(|e| Error::bug(e.to_string()))?;
    Ok(ids)
}

/// Replaces a network by neurons of `bundles`, for the rows with these ids.
pub(super) fn replace(graph: &mut Graph, network: Network, ids: ValueId, bundles: Operand) {
    let [gate, down] = network.nodes;
    let rows = graph.kind.rows();
    let (Some(x), Some(&table)) = (
        graph.nodes.get(gate).and_then(|n| n.inputs.first()).copied(),
        graph.nodes.get(gate).and_then(|n| n.outputs.first()),
    ) else {
        return;
    };
    if let Some(ty) = graph.values.get_mut(table.0 as usize) {
        *ty = Type::i32([DispatchLayout { rows, k: 1, experts: 1 }.words()]);
    }
    if let Some(node) = graph.nodes.get_mut(gate) {
        node.op = Op::Dispatch { experts: 1, partial: false };
        node.inputs = vec![ids.into()];
    }
    if let Some(node) = graph.nodes.get_mut(down) {
        node.op = Op::NeuronFfn { glu: network.glu, paged: None, hot: None, predict: None };
        node.inputs = vec![x, table.into(), bundles];
    }
}
