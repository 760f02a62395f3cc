//! Pass `fetch`: layers say which experts they will read before they read them.
//!
//! Where experts stay on flash, a `fetch` stands between the router's choice and the experts. It gets the router's scores,
//! which rank the experts of its own layer for the cache (HybriMoE, eq. 3). Where one token is decoded, it also gets what
//! the gates of the next layers say of this layer's hidden state: the residual stream changes little from layer to layer,
//! so that their choices can be foreseen (HybriMoE, §IV-C). No result changes.

use crate::error::{Error, Result};
use moec_ir::graph::EntryKind;
use moec_ir::plan::FETCHED;
use moec_ir::{Graph, Module, Node, Op, Operand, ValueId};

/// A layer with routed experts.
struct Routed {
    /// Its `dispatch`.
    dispatch: usize,
    logits: ValueId,
    /// What the logits are computed from, and weights that give them; `None` where more than a matrix does.
    gate: Option<(Operand, Node)>,
}

/// Puts a `fetch` behind every `dispatch`. Up to `ahead` next layers are foreseen, fewer at the end.
///
/// # Errors
/// A layer that is not of the form that `lower` gives: our bug.
pub fn fetch(module: &mut Module, ahead: usize) -> Result<()> {
    for graph in &mut module.entries {
        let layers = routed(graph)?;
        let alone = matches!(graph.kind, EntryKind::Decode(1) | EntryKind::Little(1));
        let ahead = if alone { ahead.min(FETCHED - 1) } else { 0 };
        // From the last layer on, so that places in front stay what they are.
        for (i, layer) in layers.iter().enumerate().rev() {
            let next = layers.get(i + 1..).unwrap_or_default();
            foresee(graph, i, layer, &next[..ahead.min(next.len())]);
        }
    }
    Ok(())
}

/// Layers with routed experts, in order.
fn routed(graph: &Graph) -> Result<Vec<Routed>> {
    let mut found = Vec::new();
    for (at, node) in graph.nodes.iter().enumerate().filter(|(_, n)| matches!(n.op, Op::Dispatch { .. })) {
        let producer = |operand: Option<&Operand>| match operand {
            Some(&Operand::Value(v)) => graph.def(v).map(|n| (v, &graph.nodes[n.0 as usize])),
            _ => None,
        };
        let logits = producer(node.inputs.first())
            .filter(|(_, n)| matches!(n.op, Op::Router(_)))
            .and_then(|(_, router)| producer(router.inputs.first()));
        let (logits, gate) =
            logits.ok_or_else(|| Error::bug(format!("`{}` dispatches without a router", node.scope)))?;
        let x = gate.inputs.first().copied().filter(|_| matches!(gate.op, Op::Linear { .. }));
        found.push(Routed { dispatch: at, logits, gate: x.map(|x| (x, gate.clone())) });
    }
    Ok(found)
}

/// Inserts the `fetch` of layer `i`, and the gates of the `next` layers on its hidden state.
fn foresee(graph: &mut Graph, i: usize, layer: &Routed, next: &[Routed]) {
    let (table, scope) = {
        let node = &graph.nodes[layer.dispatch];
        (node.outputs[0], node.scope.clone())
    };
    let mut inputs = vec![Operand::Value(table), Operand::Value(layer.logits)];
    let mut nodes = Vec::new();
    let gates = next.iter().map_while(|l| l.gate.as_ref().map(|(_, gate)| (l, gate)));
    for (next, gate) in gates.take_while(|_| layer.gate.is_some()) {
        let Some((x, _)) = &layer.gate else { break };
        graph.values.push(graph.ty(next.logits).clone());
        let scores = ValueId(graph.values.len() as u32 - 1);
        let mut operands = gate.inputs.clone();
        operands[0] = *x;
        nodes.push(Node {
            op: gate.op.clone(),
            inputs: operands,
            outputs: vec![scores],
            scope: scope.clone(),
        });
        inputs.push(Operand::Value(scores));
    }
    graph.values.push(graph.ty(table).clone());
    let fetched = ValueId(graph.values.len() as u32 - 1);
    for node in &mut graph.nodes[layer.dispatch + 1..] {
        for input in node.inputs.iter_mut().filter(|v| **v == Operand::Value(table)) {
            *input = Operand::Value(fetched);
        }
    }
    let scores = inputs.len() - 1;
    nodes.push(Node { op: Op::Fetch { layer: i, scores }, inputs, outputs: vec![fetched], scope });
    let at = layer.dispatch + 1;
    graph.nodes.splice(at..at, nodes);
}
