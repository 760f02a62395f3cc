//! Routed experts of a layer, found in the Graph.

use moec_ir::{Glu, Graph, Module, Node, Operand, WeightId};

/// The experts of a layer, as the Graph has them.
#[derive(Clone, Copy, Debug)]
pub struct LayerExperts {
    /// Function that joins gate and up.
    pub glu: Glu,
    /// `[E, 2I, H]`
    pub gate_up: WeightId,
    /// `[E, H, I]`
    pub down: WeightId,
    /// `[E, 2I]` and `[E, H]`
    pub biases: Option<[WeightId; 2]>,
}

impl LayerExperts {
    /// The experts of a layer.
    pub fn of(module: &Module, layer: u32) -> Option<Self> {
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
