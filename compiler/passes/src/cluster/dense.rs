//! Dense networks as experts: one expert that every row takes with weight 1.
//!
//! A router with one expert has no choice at any logit, so that a channel of the rows is sufficient as its
//! logits. What follows is a layer of experts, which becomes neurons or hot networks as any other.
//!
//! ```text
//! h = linear_glu(x, gate_up)     →   ids, weights = router(slice(x)), table = dispatch(ids)
//! y = linear(h, down)                y = combine(expert_ffn(x, table, gate_up, down), table, weights)
//! ```

use moec_backend::DenseNeurons;
use moec_base::error::{Error, Result};
use moec_ir::op::{DispatchLayout, Renorm, RouterDesc, Score, WeightFrom};
use moec_ir::{Graph, Module, Node, Op, Operand, Patch, Type, Weight, WeightExpr};
use std::collections::BTreeSet;

/// The routing of one expert.
const ONE: RouterDesc = RouterDesc {
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

/// An expression of a weight of experts as matrices of several experts: a dense network has one.
pub(crate) fn stacked(weight: &Weight, expr: WeightExpr) -> WeightExpr {
    if weight.shape.len() == 2 { WeightExpr::Stack(vec![expr]) } else { expr }
}

/// Turns the dense networks of an entry point that `chosen` names into experts. Their matrices keep their
/// shapes, which the operator does not accept: a caller makes neurons or networks of them.
///
/// # Errors
/// A bug of the compiler: a network that does not fit its Graph.
pub(crate) fn to_experts(
    module: &Module,
    graph: &mut Graph,
    chosen: impl Fn(u32, &DenseNeurons) -> bool,
) -> Result<()> {
    let layers: BTreeSet<u32> = graph.nodes.iter().filter_map(|n| n.scope.layer).collect();
    let found = layers
        .into_iter()
        .filter_map(|layer| DenseNeurons::of(module, graph, layer).filter(|network| chosen(layer, network)));
    let networks: Vec<DenseNeurons> = found.collect();
    if networks.is_empty() {
        return Ok(());
    }
    let rows = graph.kind.rows();
    let table = DispatchLayout { rows, k: 1, experts: 1 };
    // The joined gate and up are the table now.
    let joined = |graph: &Graph, network: &DenseNeurons| {
        let node = graph.nodes.get(network.nodes[0].0 as usize);
        node.and_then(|n| n.outputs.first().copied())
            .ok_or_else(|| Error::bug("a network that joins nothing"))
    };
    for network in &networks {
        let value = joined(graph, network)?;
        if let Some(ty) = graph.values.get_mut(value.0 as usize) {
            *ty = Type::i32([table.words()]);
        }
    }
    let mut patch = Patch::new("dense networks become experts", graph);
    for network in networks {
        let table = joined(graph, &network)?;
        let DenseNeurons { scope, glu, gate_up, down, x, y, nodes } = network;
        for node in nodes {
            patch.remove(node);
        }
        let types = [Type::f32([rows, 1]), Type::i32([rows, 1]), Type::f32([rows, 1])];
        let [logits, ids, weights] = types.map(|ty| patch.value(ty));
        let slots = patch.value(graph.ty(y).clone());
        let mut add = |op, inputs: &[Operand], outputs| {
            patch.add(nodes[1], Node { op, inputs: inputs.to_vec(), outputs, scope: scope.clone() });
        };
        add(Op::Slice { heads: 1, start: 0, len: 1 }, &[x.into()], vec![logits]);
        add(Op::Router(ONE), &[logits.into()], vec![ids, weights]);
        add(Op::Dispatch { experts: 1, partial: false }, &[ids.into()], vec![table]);
        let matrices = [Operand::Weight(gate_up), Operand::Weight(down)];
        let op = Op::ExpertFfn { glu, bias: false, fixed: false };
        add(op, &[x.into(), table.into(), matrices[0], matrices[1]], vec![slots]);
        add(Op::Combine { partial: false }, &[slots.into(), table.into(), weights.into()], vec![y]);
    }
    patch.apply(graph).map_err(|e| Error::bug(e.to_string()))
}
