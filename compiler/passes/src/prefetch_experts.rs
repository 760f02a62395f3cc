//! Pass `prefetch_experts`: requests the experts of a layer before the layer reads them.
//!
//! If experts stay on disk, the pass inserts a `request_experts` between the router's choice and the experts.
//! Its operands are the router's scores, which rank the experts of its own layer for the cache (HybriMoE, eq.
//! 3), and the scores that the gates of the next layers compute from this layer's hidden state. The residual
//! stream changes little from layer to layer, so that these predict their choices (HybriMoE, §IV-C). Frames
//! of a GPU are filled ahead in every step; from disk, where the rows of a step request most experts anyway,
//! only when one token is decoded. No result changes.
//!
//! Layers of other hosts are left out: a host gets the choice of its experts with their rows, and reads them then.

use crate::assign_units::UnitAssignment;
use moec_base::error::{Error, Result};
use moec_ir::graph::EntryKind;
use moec_ir::plan::MAX_REQUEST_SCORES;
use moec_ir::{Graph, Module, Node, NodeId, Op, Operand, Patch, ValueId};

/// A layer with routed experts.
struct Routed {
    /// Its `dispatch`.
    dispatch: usize,
    logits: ValueId,
    /// Operand that the logits are computed from, and the node that computes them; `None` if that takes more
    /// than a matrix.
    gate: Option<(Operand, Node)>,
}

/// Layers that are predicted ahead, by the rows of a step.
#[derive(Clone, Copy, Debug)]
pub struct Ahead {
    /// Layers if one token is decoded.
    pub token: usize,
    /// Layers in prompts and batches.
    pub rows: usize,
}

/// Inserts a `request_experts` after every `dispatch`. As many next layers are predicted as `ahead` says,
/// fewer at the end.
///
/// # Errors
/// A bug of the compiler: a layer that is not of the form that `lower` makes.
pub fn prefetch_experts(module: &mut Module, ahead: Ahead, assignment: &UnitAssignment) -> Result<()> {
    for graph in &mut module.entries {
        let mut layers = routed(graph)?;
        layers.retain(|layer| {
            assignment.of_host(&graph.nodes[layer.dispatch]).is_none_or(|unit| !assignment.is_host(unit))
        });
        let alone = matches!(graph.kind, EntryKind::Decode(1) | EntryKind::Little(1));
        let ahead = if alone { ahead.token } else { ahead.rows }.min(MAX_REQUEST_SCORES - 1);
        // From the last layer on, so that earlier indices stay valid.
        for (i, layer) in layers.iter().enumerate().rev() {
            let next = layers.get(i + 1..).unwrap_or_default();
            let patch = request_layer(graph, i, layer, &next[..ahead.min(next.len())]);
            patch.apply(graph).map_err(|e| Error::bug(e.to_string()))?;
        }
    }
    Ok(())
}

/// Layers with routed experts, in order. If static graphs have some of the experts, the `dispatch` of those
/// that the CPU computes is taken: only their weights stay on disk.
fn routed(graph: &Graph) -> Result<Vec<Routed>> {
    let mut found = Vec::new();
    let here = |node: &Node| {
        let table = node.outputs.first().map(|&v| Operand::Value(v));
        let fixed = |n: &Node| matches!(n.op, Op::ExpertFfn { fixed: true, .. });
        !graph.nodes.iter().any(|n| fixed(n) && n.inputs.get(1).copied() == table)
    };
    let dispatches = graph.nodes.iter().enumerate().filter(|(_, n)| matches!(n.op, Op::Dispatch { .. }));
    for (at, node) in dispatches.filter(|(_, n)| here(n)) {
        let producer = |operand: Option<&Operand>| match operand {
            Some(&Operand::Value(v)) => graph.def(v).map(|n| (v, &graph.nodes[n.0 as usize])),
            _ => None,
        };
        // Rows of static graphs are no longer among the choices.
        let chosen = producer(node.inputs.first());
        let chosen = match chosen {
            Some((_, limit)) if matches!(limit.op, Op::LimitCapacity(_)) => producer(limit.inputs.first()),
            chosen => chosen,
        };
        if chosen.is_some_and(|(_, node)| matches!(node.op, Op::ZeroExperts { .. })) {
            return Err(Error::limit(format!(
                "`{}` has zero-computation experts; their experts cannot be read from disk",
                node.scope
            ))
            .hint("remove `budget` under `[memory]`"));
        }
        let logits = chosen
            .filter(|(_, n)| matches!(n.op, Op::Router(_)))
            .and_then(|(_, router)| producer(router.inputs.first()));
        let (logits, gate) =
            logits.ok_or_else(|| Error::bug(format!("`{}` dispatches without a router", node.scope)))?;
        let x = gate.inputs.first().copied().filter(|_| matches!(gate.op, Op::Linear { .. }));
        found.push(Routed { dispatch: at, logits, gate: x.map(|x| (x, gate.clone())) });
    }
    Ok(found)
}

/// Inserts the `request_experts` of layer `i`, and the gates of the `next` layers on its hidden state.
fn request_layer(graph: &Graph, i: usize, layer: &Routed, next: &[Routed]) -> Patch {
    let mut patch = Patch::new(format!("request_experts {i}"), graph);
    let node = &graph.nodes[layer.dispatch];
    let (table, scope) = (node.outputs[0], &node.scope);
    let after = NodeId(layer.dispatch as u32 + 1);
    let mut inputs = vec![Operand::Value(table), Operand::Value(layer.logits)];
    let gates = next.iter().map_while(|l| l.gate.as_ref().map(|(_, gate)| (l, gate)));
    for (next, gate) in gates.take_while(|_| layer.gate.is_some()) {
        let Some((x, _)) = &layer.gate else { break };
        let scores = patch.value(graph.ty(next.logits).clone());
        let mut operands = gate.inputs.clone();
        operands[0] = *x;
        let (op, outputs) = (gate.op.clone(), vec![scores]);
        patch.add(after, Node { op, inputs: operands, outputs, scope: scope.clone() });
        inputs.push(Operand::Value(scores));
    }
    let requested = patch.value(graph.ty(table).clone());
    patch.redirect(table, requested);
    let op = Op::RequestExperts { layer: i, scores: inputs.len() - 1 };
    patch.add(after, Node { op, inputs, outputs: vec![requested], scope: scope.clone() });
    patch
}
