//! Shapes of a model, as far as they cost time: numbers of matrices by what runs them.

use crate::error::Result;
use crate::passes::units::{ExpertSize, expert_sizes};
use moec_ir::{EntryKind, Module, Node, Op, Operand, Part, WeightClass};

/// A model.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Model {
    /// What to call it.
    pub name: String,
    /// Channels of the residual stream.
    pub hidden: u64,
    /// Numbers of the output matrix.
    pub head: u64,
    /// Layers, in order.
    pub layers: Vec<Layer>,
}

/// A layer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Layer {
    /// Its number.
    pub layer: u32,
    /// Numbers of the projections of attention.
    pub attention: u64,
    /// Numbers that a row of attention multiplies with per position of the context: heads × (query + value channels).
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

/// Published shapes of a model whose layers are alike.
#[derive(Clone, Copy, Debug)]
pub struct Shape {
    /// Name, as NPUMoE shortens it.
    pub name: &'static str,
    /// Layers.
    pub layers: u32,
    /// Channels of the residual stream.
    pub hidden: u64,
    /// Query heads.
    pub heads: u64,
    /// Key and value heads.
    pub kv_heads: u64,
    /// Channels of a head.
    pub head_dim: u64,
    /// Channels inside an expert.
    pub intermediate: u64,
    /// Experts.
    pub experts: usize,
    /// Experts per token.
    pub k: u32,
    /// Rows of the output matrix.
    pub vocab: u64,
}

/// Phi-3.5-MoE-instruct: `config.json` of `microsoft/Phi-3.5-MoE-instruct`; NPUMoE, Table 1.
pub const PHIMOE: Shape = Shape {
    name: "PhiMoE",
    layers: 32,
    hidden: 4096,
    heads: 32,
    kv_heads: 8,
    head_dim: 128,
    intermediate: 6400,
    experts: 16,
    k: 2,
    vocab: 32064,
};

/// Phi-tiny-MoE-instruct: `config.json` of `microsoft/Phi-tiny-MoE-instruct`; NPUMoE, Table 1.
pub const PHIMOE_TINY: Shape =
    Shape { name: "PhiMoE-tiny", heads: 16, kv_heads: 4, intermediate: 448, ..PHIMOE };

/// OLMoE-1B-7B: `config.json` of `allenai/OLMoE-1B-7B-0924`.
pub const OLMOE: Shape = Shape {
    name: "OLMoE",
    layers: 16,
    hidden: 2048,
    heads: 16,
    kv_heads: 16,
    head_dim: 128,
    intermediate: 1024,
    experts: 64,
    k: 8,
    vocab: 50304,
};

/// Qwen3-30B-A3B: `config.json` of `Qwen/Qwen3-30B-A3B`; NPUMoE, Table 1.
pub const QWEN3: Shape = Shape {
    name: "Qwen3-MoE",
    layers: 48,
    hidden: 2048,
    heads: 32,
    kv_heads: 4,
    head_dim: 128,
    intermediate: 768,
    experts: 128,
    k: 8,
    vocab: 151_936,
};

impl Shape {
    /// Numbers of one expert's three matrices.
    pub const fn expert(&self) -> u64 {
        3 * self.hidden * self.intermediate
    }

    /// The model of this shape; graphs hold f16.
    pub fn model(&self) -> Model {
        let inner = self.head_dim * (self.heads + self.kv_heads);
        let size = ExpertSize { weights: self.expert(), bytes: 2 * self.expert() };
        let layer = |layer| Layer {
            layer,
            attention: 2 * self.hidden * inner,
            per_position: 2 * self.heads * self.head_dim,
            router: self.hidden * self.experts as u64,
            dense: 0,
            experts: Some(Moe { count: self.experts, k: self.k, size }),
        };
        Model {
            name: self.name.to_owned(),
            hidden: self.hidden,
            head: self.hidden * self.vocab,
            layers: (0..self.layers).map(layer).collect(),
        }
    }
}

impl Model {
    /// The shapes of a compiled Graph: those of its prefill entry point.
    ///
    /// # Errors
    /// Our bug: experts without sizes.
    pub fn of(module: &Module, name: &str, layers: u32) -> Result<Self> {
        let sizes = expert_sizes(module)?;
        let mut model = Self {
            name: name.to_owned(),
            hidden: 0,
            head: 0,
            layers: (0..layers).map(|layer| Layer { layer, ..Layer::default() }).collect(),
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
                _ if node.scope.part == Part::ATTN => layer.attention += numbers,
                _ if exact => layer.router += numbers,
                _ => layer.dense += numbers,
            }
        }
        Ok(model)
    }

    /// Layers with experts.
    pub fn moe_layers(&self) -> impl Iterator<Item = &Layer> {
        self.layers.iter().filter(|l| l.experts.is_some())
    }
}

/// Numbers of the matrix that a node multiplies with, and whether they must stay exact (a router's).
fn matrix(module: &Module, node: &Node) -> (u64, bool) {
    let is_matrix = matches!(
        node.op,
        Op::Linear { .. } | Op::LinearGlu { .. } | Op::HeadLinear { .. } | Op::Conv1x1 { .. }
    );
    match node.inputs.get(1).filter(|_| is_matrix) {
        Some(Operand::Weight(id)) => {
            let weight = module.weight(*id);
            (weight.shape.iter().map(|&d| d as u64).product(), weight.class == WeightClass::Exact)
        }
        _ => (0, false),
    }
}
