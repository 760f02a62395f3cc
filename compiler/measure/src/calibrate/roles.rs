//! The role of a node in the model, by its neighbours in the Graph.

use moec_base::error::{Error, Result};
use moec_ir::op::{Activation, Glu};
use moec_ir::{Graph, Module, Node, Op, Operand, Part, Role, ValueId};

/// Matrices of experts whose inputs have product sums of their own.
pub(super) fn experts_wide(module: &Module, graph: &Graph) -> usize {
    let of = |n: &Node| match (&n.op, n.inputs.get(2)) {
        (Op::ExpertFfn { .. }, Some(&Operand::Weight(id))) => module.weight(id).matrices(),
        _ => 0,
    };
    graph.nodes.iter().map(of).sum()
}

/// Whether the input of a node is that of a feed-forward network, the head or attention. Such rows show the
/// range of activations in what follows.
pub(super) fn begins_network(graph: &Graph, node: &Node) -> bool {
    let normed = || match node.inputs.first() {
        Some(&Operand::Value(v)) => {
            let from = graph.def(v).and_then(|id| graph.nodes.get(id.0 as usize));
            from.is_some_and(|n| matches!(n.op, Op::RmsNorm { .. } | Op::LayerNorm { .. }))
        }
        _ => false,
    };
    match node.scope.role() {
        Role::Network | Role::Head => gate_of(graph, node).is_none(),
        Role::Attention => normed(),
        // The rows of other mixers are not read by any graph of an accelerator.
        Role::Mixer | Role::Other => false,
    }
}

/// Whether a node adds the output of attention, or of another token mixer, to the residual stream. The first
/// operand must not come from a mixer of the same layer. A mixer may also add numbers of its own before.
pub(super) fn joins_stream(graph: &Graph, node: &Node) -> bool {
    let outside = |input: &Operand| match *input {
        Operand::Value(v) => {
            let from = graph.def(v).and_then(|id| graph.nodes.get(id.0 as usize));
            from.is_none_or(|n| n.scope.layer != node.scope.layer || !n.scope.role().mixes_tokens())
        }
        _ => false,
    };
    matches!(node.op, Op::Add) && node.scope.role().mixes_tokens() && node.inputs.first().is_some_and(outside)
}

/// The gate of the network whose down matrix is that of `node`; `None` for any other matrix. After lowering,
/// gate and up projections are separate matrices.
pub(super) fn gate_of(graph: &Graph, node: &Node) -> Option<Glu> {
    let def = |operand: &Operand| match *operand {
        Operand::Value(v) => graph.nodes.get(graph.def(v)?.0 as usize),
        _ => None,
    };
    let product = def(node.inputs.first()?).filter(|_| node.scope.role() == Role::Network)?;
    match product.op {
        Op::LinearGlu { glu, .. } | Op::Glu(glu) => Some(glu),
        Op::Mul => product.inputs.iter().filter_map(def).find_map(|n| match n.op {
            Op::Act(activation) => Some(Glu::Gated(activation)),
            _ => None,
        }),
        Op::Act(activation) => Some(Glu::Ungated(activation)),
        _ => None,
    }
}

/// Whether a node is the gate projection of a dense network with SiLU: nothing else reads its result, and the
/// layer has no experts.
pub(super) fn is_silu_gate(graph: &Graph, node: &Node) -> bool {
    let readers = |v: ValueId| graph.nodes.iter().filter(move |n| n.inputs.contains(&Operand::Value(v)));
    let sole = |n: &Node| {
        let mut all = readers(*n.outputs.first()?);
        all.next().filter(|_| all.next().is_none())
    };
    let activates = sole(node).filter(|n| n.op == Op::Act(Activation::Silu));
    let joins = activates.and_then(sole).is_some_and(|n| n.op == Op::Mul);
    let routes = |n: &Node| n.scope.layer == node.scope.layer && n.op.router().is_some();
    joins
        && node.scope.part == Part::FFN
        && matches!(node.op, Op::Linear { bias: false })
        && !graph.nodes.iter().any(routes)
}

pub(super) fn value(node: &Node, input: usize) -> Result<ValueId> {
    match node.inputs.get(input) {
        Some(&Operand::Value(v)) => Ok(v),
        _ => Err(Error::bug(format!("`{}` reads no value", node.op.name()))),
    }
}
