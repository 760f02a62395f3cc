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
    /// The experts of a layer. Where all entry points have them by neurons on disk, beside graphs of hot
    /// neurons, the whole matrices are weights that no node reads.
    pub fn of(module: &Module, layer: u32) -> Option<Self> {
        Self::whole(module, layer).or_else(|| Self::beside_hot(module, layer))
    }

    fn beside_hot(module: &Module, layer: u32) -> Option<Self> {
        let nodes = module.entries.iter().flat_map(|g| &g.nodes);
        let mut own = nodes.filter(|n| n.scope.layer == Some(layer));
        let (glu, node) = own.find_map(|n| Some((n.op.paged_neurons()?, n)))?;
        let Some(&Operand::Weight(gates)) = node.inputs.get(2) else { return None };
        let stem = module.weight(gates).name.strip_suffix("gates")?;
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
