//! Experts of a layer, found in the Graph: routed ones, or a dense network, which is one expert that every
//! token takes.

use crate::find::{self, Walk};
use moec_ir::{Glu, Graph, Module, Node, NodeId, Operand, Part, Scope, ValueId, WeightId};

/// The experts of a layer, as the Graph has them.
#[derive(Clone, Copy, Debug)]
pub struct LayerExperts {
    /// Function that joins gate and up.
    pub glu: Glu,
    /// `[E, 2I, H]`, or `[2I, H]` of a dense network.
    pub gate_up: WeightId,
    /// `[E, H, I]`, or `[H, I]` of a dense network.
    pub down: WeightId,
    /// `[E, 2I]` and `[E, H]`
    pub biases: Option<[WeightId; 2]>,
}

impl LayerExperts {
    /// The experts of a layer. Where all entry points have them by neurons on disk, beside graphs of hot
    /// neurons, the whole matrices are weights that no node reads.
    pub fn of(module: &Module, layer: u32) -> Option<Self> {
        let dense = || DenseNeurons::of(module, module.entries.first()?, layer);
        Self::whole(module, layer).or_else(|| Self::beside_hot(module, layer)).or_else(|| {
            let DenseNeurons { glu, gate_up, down, .. } = dense()?;
            Some(Self { glu, gate_up, down, biases: None })
        })
    }

    fn beside_hot(module: &Module, layer: u32) -> Option<Self> {
        let nodes = module.entries.iter().flat_map(|g| &g.nodes);
        let mut own = nodes.filter(|n| n.scope.layer == Some(layer));
        let (glu, node) = own.find_map(|n| Some((n.op.paged_neurons()?, n)))?;
        let Some(&Operand::Weight(first)) = node.inputs.get(2) else { return None };
        let first = &module.weight(first).name;
        let stem = first.strip_suffix("gates").or_else(|| first.strip_suffix("neurons"))?;
        let of = |part: &str| {
            let at = module.weights.iter().position(|w| w.name.strip_prefix(stem) == Some(part))?;
            u32::try_from(at).ok().map(WeightId)
        };
        Some(Self { glu, gate_up: of("gate_up")?, down: of("down")?, biases: None })
    }

    fn whole(module: &Module, layer: u32) -> Option<Self> {
        let graph: &Graph = module.entries.first()?;
        let in_layer = |n: &&Node| n.scope.layer == Some(layer);
        graph.nodes.iter().filter(in_layer).find_map(|node| {
            let glu = node.op.expert_ffn()?;
            let weights = node.inputs.iter().filter_map(|o| match o {
                Operand::Weight(id) => Some(*id),
                _ => None,
            });
            match *weights.collect::<Vec<_>>().as_slice() {
                [gate_up, down] => Some(Self { glu, gate_up, down, biases: None }),
                [gate_up, down, a, b] => Some(Self { glu, gate_up, down, biases: Some([a, b]) }),
                _ => None,
            }
        })
    }
}

/// Whether an entry point has the dense network of a scope as one expert that every token takes.
pub fn is_one_expert(graph: &Graph, scope: &Scope) -> bool {
    let one = |n: &Node| n.op.router().is_some_and(|router| router.experts == 1);
    graph.nodes.iter().any(|n| n.scope == *scope && one(n))
}

/// A dense network whose gates leave zeros, in one entry point.
#[derive(Clone, Debug, PartialEq)]
pub struct DenseNeurons {
    /// Layer and part.
    pub scope: Scope,
    /// Function that joins gate and up.
    pub glu: Glu,
    /// `[2I, H]`
    pub gate_up: WeightId,
    /// `[H, I]`
    pub down: WeightId,
    /// Its rows.
    pub x: ValueId,
    /// Its result.
    pub y: ValueId,
    /// The node that joins gate and up, and the node that multiplies by down.
    pub nodes: [NodeId; 2],
}

impl DenseNeurons {
    /// The network of a layer; `None` if the layer has experts, or if the network has biases, gates without
    /// zeros, or matrices that neurons cannot be taken from.
    pub fn of(module: &Module, graph: &Graph, layer: u32) -> Option<Self> {
        if graph.nodes.iter().any(|n| n.scope.layer == Some(layer) && n.op.router().is_some()) {
            return None;
        }
        let scope = Scope::in_layer(layer, Part::FFN);
        let mut walk = Walk::new(graph, &scope);
        let (found, x, y) = find::dense(module, &mut walk).ok()?;
        let (&[gate_up], [], down, None) =
            (&*found.gate_up, &*found.gate_up_bias, found.down, found.down_bias)
        else {
            return None;
        };
        let [format, other] = [gate_up, down].map(|id| module.weight(id).format);
        let holds = format == other && format.has_plain_codes();
        let nodes = walk.close(y).ok().filter(|_| found.glu.skips() && holds)?.try_into().ok()?;
        Some(Self { glu: found.glu, gate_up, down, x, y, nodes, scope })
    }
}
