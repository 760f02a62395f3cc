//! Specification of a checkpoint's computation: the result of the import and the input of lowering.
//!
//! A [`ModelSpec`] names no family's quirks. Whatever sets one family apart from another is a field here.

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
    /// Factors of its rows, of the sum of each block, and of logits.
    pub multipliers: Multipliers,
    /// Bound that no logit reaches: `cap · tanh(x / cap)`.
    pub logit_cap: Option<f32>,
    /// Layers in order.
    pub layers: Vec<LayerSpec>,
    /// Norm before the head.
    pub final_norm: Norm,
    /// Language-model head `[vocab, hidden]`; `None` where the embedding table serves.
    pub head: Option<WeightExpr>,
    /// Bias of the head `[vocab]`.
    pub head_bias: Option<WeightExpr>,
    /// First token of a sequence.
    pub bos: Option<u32>,
    /// Tokens that end a sequence.
    pub eos: Vec<u32>,
    /// Parameters in all.
    pub params: u64,
    /// Parameters that take part in computing one token.
    pub active_params: u64,
    /// Warnings for the user about the checkpoint.
    pub warnings: Vec<String>,
}

/// Factors on rows of a model; 1 where a family has none.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Multipliers {
    /// On rows of the embedding table.
    pub embed: f32,
    /// On what each block adds to the residual stream.
    pub residual: f32,
    /// On logits.
    pub logits: f32,
}

impl Default for Multipliers {
    fn default() -> Self {
        Self { embed: 1.0, residual: 1.0, logits: 1.0 }
    }
}

impl ModelSpec {
    /// Routed experts of the layer that has most of them; 0 for a dense model.
    pub fn experts(&self) -> usize {
        self.layers.iter().filter_map(LayerSpec::moe).map(|m| m.router.experts).max().unwrap_or(0)
    }

    /// Routed experts that every mixture gives a token at least; `None` for a dense model.
    pub fn experts_per_token(&self) -> Option<usize> {
        self.layers.iter().filter_map(LayerSpec::moe).map(|m| m.router.k).min()
    }
}

/// A layer: blocks on the residual stream, one after the other.
#[derive(Clone, Debug, PartialEq)]
pub struct LayerSpec {
    /// The blocks. No two mixers of a layer are of one [part](crate::mixers::Mix::part).
    pub blocks: Vec<Block>,
    /// Factor on the stream after them, `[hidden]`.
    pub scale: Option<WeightExpr>,
}

impl LayerSpec {
    /// The usual layer: `x += attention(norm(x))`, then `x += ffn(norm(x))`.
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

/// A residual block: `x += post_norm(mixer(h) + mixer(h) + …)` of `h = norm(x)`.
#[derive(Clone, Debug, PartialEq)]
pub struct Block {
    /// Norm of the input; without it, `h` is `x`.
    pub norm: Option<Norm>,
    /// Mixers that read `h`, one at least.
    pub mixers: Vec<Mixer>,
    /// Norm of the sum, before the residual.
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
    /// Frequencies of long sequences.
    pub long: Option<LongRope>,
}

/// LongRoPE's frequencies of long sequences.
#[derive(Clone, Debug, PartialEq)]
pub struct LongRope {
    /// Sequences of at most this many tokens use the short ones.
    pub after: usize,
    /// One for each rotated pair of channels.
    pub inv_freq: Vec<f32>,
    /// Attention factor.
    pub scale: f32,
}
