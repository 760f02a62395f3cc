//! Specification of a checkpoint's computation: the result of the import and the input of lowering.
//!
//! A [`ModelSpec`] is independent of families: all differences between them are fields here.

use crate::mixers::{Mixer, Moe};
use moec_ir::WeightExpr;

/// A model.
#[derive(Clone, Debug, PartialEq)]
pub struct ModelSpec {
    /// `model_type` of the family, such as `qwen3_moe`.
    pub family: &'static str,
    /// Name of the family for people.
    pub title: &'static str,
    /// Vocabulary.
    pub vocab: usize,
    /// Channels of the residual stream.
    pub hidden: usize,
    /// Longest context that the checkpoint declares.
    pub max_positions: usize,
    /// Embedding table `[vocab, hidden]`.
    pub embed: WeightExpr,
    /// Factors on embeddings, on the sum of each block, and on logits.
    pub multipliers: Multipliers,
    /// Bound of the magnitude of logits: `cap · tanh(x / cap)`.
    pub logit_cap: Option<f32>,
    /// Layers in order.
    pub layers: Vec<LayerSpec>,
    /// Norm before the head.
    pub final_norm: Norm,
    /// Language-model head `[vocab, hidden]`; `None` if it is the embedding table.
    pub head: Option<WeightExpr>,
    /// Bias of the head `[vocab]`.
    pub head_bias: Option<WeightExpr>,
    /// First token of a sequence.
    pub bos: Option<u32>,
    /// Tokens that end a sequence.
    pub eos: Vec<u32>,
    /// Number of parameters.
    pub params: u64,
    /// Number of parameters that are used for one token.
    pub active_params: u64,
    /// Warnings about the checkpoint, for the user.
    pub warnings: Vec<String>,
}

/// Factors on rows of a model; 1 by default.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Multipliers {
    /// Factor on rows of the embedding table.
    pub embed: f32,
    /// Factor on the result of each block.
    pub residual: f32,
    /// Factor on logits.
    pub logits: f32,
}

impl Default for Multipliers {
    fn default() -> Self {
        Self { embed: 1.0, residual: 1.0, logits: 1.0 }
    }
}

impl ModelSpec {
    /// Largest number of routed experts in a layer; 0 for a dense model.
    pub fn experts(&self) -> usize {
        self.layers.iter().filter_map(LayerSpec::moe).map(|m| m.router.experts).max().unwrap_or(0)
    }

    /// Least number of routed experts per token in any mixture; `None` for a dense model.
    pub fn experts_per_token(&self) -> Option<usize> {
        self.layers.iter().filter_map(LayerSpec::moe).map(|m| m.router.k).min()
    }
}

/// A layer: consecutive blocks on the residual stream.
#[derive(Clone, Debug, PartialEq)]
pub struct LayerSpec {
    /// The blocks. All mixers of a layer have different [parts](crate::mixers::Mix::part).
    pub blocks: Vec<Block>,
    /// Factor on the stream after them, `[hidden]`.
    pub scale: Option<WeightExpr>,
}

impl LayerSpec {
    /// The most common layer: `x += attention(norm(x))`, then `x += ffn(norm(x))`.
    pub fn pre_norm(blocks: [(Norm, Mixer); 2]) -> Self {
        let block = |(norm, mixer)| Block { norm: Some(norm), mixers: vec![mixer], post_norm: None };
        Self { blocks: blocks.map(block).into(), scale: None }
    }

    /// The mixers of all blocks, in order.
    pub fn mixers(&self) -> impl Iterator<Item = &Mixer> {
        self.blocks.iter().flat_map(|b| &b.mixers)
    }

    /// The mixture of experts, if the layer has one.
    pub fn moe(&self) -> Option<&Moe> {
        self.mixers().find_map(Mixer::moe)
    }
}

/// A residual block: `x += post_norm(mixer(h) + mixer(h) + …)` with `h = norm(x)`.
#[derive(Clone, Debug, PartialEq)]
pub struct Block {
    /// Norm of the input; without one, `h` is `x`.
    pub norm: Option<Norm>,
    /// Mixers with input `h`; at least one.
    pub mixers: Vec<Mixer>,
    /// Norm of the sum, before the residual addition.
    pub post_norm: Option<Norm>,
}

/// A norm over channels.
#[derive(Clone, Debug, PartialEq)]
pub enum Norm {
    /// Root mean square.
    Rms {
        /// Added to the mean square.
        eps: f32,
        /// Weight `[C]`.
        weight: WeightExpr,
    },
    /// Mean and variance.
    Layer {
        /// Added to the variance.
        eps: f32,
        /// Weight `[C]`.
        weight: WeightExpr,
        /// Bias `[C]`.
        bias: WeightExpr,
    },
}

impl Norm {
    /// Its weights.
    pub fn weights(&self) -> impl Iterator<Item = &WeightExpr> {
        let (weight, bias) = match self {
            Self::Rms { weight, .. } => (weight, None),
            Self::Layer { weight, bias, .. } => (weight, Some(bias)),
        };
        [weight].into_iter().chain(bias)
    }
}

/// A linear map.
#[derive(Clone, Debug, PartialEq)]
pub struct Projection {
    /// Matrix `[out, in]`.
    pub weight: WeightExpr,
    /// Bias `[out]`.
    pub bias: Option<WeightExpr>,
}

/// Rotary frequencies.
#[derive(Clone, Debug, PartialEq)]
pub struct Rope {
    /// One for each rotated pair of channels.
    pub inv_freq: Vec<f32>,
    /// Attention factor on cosine and sine.
    pub scale: f32,
    /// Frequencies for long sequences.
    pub long: Option<LongRope>,
}

/// LongRoPE's frequencies for long sequences.
#[derive(Clone, Debug, PartialEq)]
pub struct LongRope {
    /// Longest sequence in tokens that uses the short frequencies.
    pub after: usize,
    /// One for each rotated pair of channels.
    pub inv_freq: Vec<f32>,
    /// Attention factor.
    pub scale: f32,
}
