//! Published shapes of models.

use moec_costs::Model;
use moec_costs::model::{ModelLayer, Moe};
use moec_costs::units::ExpertSize;

/// Published shapes of a model with equal layers.
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
        let layer = |layer| ModelLayer {
            layer,
            attention: 2 * self.hidden * inner,
            mixer: 0,
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
