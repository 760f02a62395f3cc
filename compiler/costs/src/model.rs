//! Shapes of a model as far as they cost time: sizes of matrices by the operators that use them.

use super::units::{ExpertSize, expert_sizes};
use moec_base::error::Result;
use moec_ir::{EntryKind, Module, Node, Op, Operand, Role, WeightClass};

/// A model.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Model {
    /// Name.
    pub name: String,
    /// Channels of the residual stream.
    pub hidden: u64,
    /// Numbers of the output matrix.
    pub head: u64,
    /// Layers, in order.
    pub layers: Vec<ModelLayer>,
}

/// A layer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ModelLayer {
    /// Number of the layer.
    pub layer: u32,
    /// Numbers of the projections of attention.
    pub attention: u64,
    /// Numbers of the projections of mixers other than attention.
    pub mixer: u64,
    /// Multiplications of a row of attention per position of the context: heads × (query + value channels).
    pub per_position: u64,
    /// Numbers of the router.
    pub router: u64,
    /// Numbers of dense and shared feed-forward networks.
    pub dense: u64,
    /// Its experts.
    pub experts: Option<Moe>,
}

/// The experts of a layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Moe {
    /// Experts.
    pub count: usize,
    /// Experts per token.
    pub k: u32,
    /// Size of one.
    pub size: ExpertSize,
}

impl Model {
    /// The shapes of a compiled Graph: those of its prefill entry point.
    ///
    /// # Errors
    /// A bug of the compiler: experts without sizes.
    pub fn of(module: &Module, name: &str, layers: u32) -> Result<Self> {
        let sizes = expert_sizes(module)?;
        let mut model = Self {
            name: name.to_owned(),
            hidden: 0,
            head: 0,
            layers: (0..layers).map(|layer| ModelLayer { layer, ..ModelLayer::default() }).collect(),
        };
        let prefill = |g: &&moec_ir::Graph| matches!(g.kind, EntryKind::Prefill(_));
        let Some(graph) = module.entries.iter().find(prefill) else { return Ok(model) };
        for node in &graph.nodes {
            let (numbers, exact) = matrix(module, node);
            let Some(layer) = node.scope.layer.and_then(|n| model.layers.get_mut(n as usize)) else {
                if matches!(node.op, Op::Embed)
                    && let Some(Operand::Weight(id)) = node.inputs.get(1)
                {
                    model.hidden = module.weight(*id).shape.get(1).map_or(0, |&d| d as u64);
                } else {
                    model.head += numbers;
                }
                continue;
            };
            match &node.op {
                Op::Attention(a) => layer.per_position += (a.heads * (a.qk_dim + a.v_dim)) as u64,
                Op::Router(d) => {
                    let size = sizes.get(&layer.layer);
                    layer.experts = size.map(|&size| Moe { count: d.experts, k: d.k as u32, size });
                }
                _ => match node.scope.role() {
                    Role::Attention => layer.attention += numbers,
                    Role::Mixer => layer.mixer += numbers,
                    _ if exact => layer.router += numbers,
                    _ => layer.dense += numbers,
                },
            }
        }
        Ok(model)
    }

    /// Layers with experts.
    pub fn moe_layers(&self) -> impl Iterator<Item = &ModelLayer> {
        self.layers.iter().filter(|l| l.experts.is_some())
    }
}

/// Numbers of the matrix that a node multiplies by, and true if it must stay exact (a router's).
fn matrix(module: &Module, node: &Node) -> (u64, bool) {
    let is_matrix = matches!(node.op, Op::Linear { .. } | Op::LinearGlu { .. } | Op::HeadLinear { .. });
    match node.inputs.get(1).filter(|_| is_matrix) {
        Some(Operand::Weight(id)) => {
            let weight = module.weight(*id);
            (weight.shape.iter().map(|&d| d as u64).product(), weight.class == WeightClass::Exact)
        }
        _ => (0, false),
    }
}
