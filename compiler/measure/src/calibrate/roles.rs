//! What a node is to the model, by what stands around it in the Graph.

use moec_base::error::{Error, Result};
use moec_ir::op::Glu;
use moec_ir::{Graph, Module, Node, Op, Operand, Role, ValueId};

/// Matrices of experts whose inputs have products of their own.
pub(super) fn experts_wide(module: &Module, graph: &Graph) -> usize {
    let of = |n: &Node| match (&n.op, n.inputs.get(2)) {
        (Op::ExpertFfn { .. }, Some(&Operand::Weight(id))) => module.weight(id).matrices(),
        _ => 0,
    };
    graph.nodes.iter().map(of).sum()
}

/// Whether what a node reads goes into a feed-forward network, the head or attention: such rows say how wide activations after them
/// are.
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
        // No graph of a unit reads the rows of other mixers.
        Role::Mixer | Role::Other => false,
    }
}

/// Whether a node adds the output of attention, or of another mixer of tokens, to the residual stream, which no mixer of the layer
/// gives. A mixer may add numbers of its own before.
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

/// The gate of the network whose down matrix `node` multiplies by; `None` of any other matrix. As lowered, gate and up
/// projections are matrices of their own.
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

pub(super) fn value(node: &Node, input: usize) -> Result<ValueId> {
    match node.inputs.get(input) {
        Some(&Operand::Value(v)) => Ok(v),
        _ => Err(Error::bug(format!("`{}` reads no value", node.op.name()))),
    }
}
