//! What a checkpoint computes, said once: the result of the import and the input of lowering.
//!
//! A [`ModelSpec`] names no family's quirks. Whatever sets one family apart from another is a field here.

use moec_ir::{Glu, Part, RopeStyle, RouterDesc, WeightExpr};

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
    /// Layers in order.
    pub layers: Vec<LayerSpec>,
    /// Norm in front of the head.
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
    /// What the user should know about the checkpoint.
    pub warnings: Vec<String>,
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
    /// The blocks. No two mixers of a layer are of one [part](Mixer::part).
    pub blocks: Vec<Block>,
}

impl LayerSpec {
    /// The usual layer: `x += attention(norm(x))`, then `x += ffn(norm(x))`.
    pub fn pre_norm(blocks: [(Norm, Mixer); 2]) -> Self {
        let block = |(norm, mixer)| Block { norm: Some(norm), mixers: vec![mixer], post_norm: None };
        Self { blocks: blocks.map(block).into() }
    }

    /// The mixers of all blocks, in order.
    pub fn mixers(&self) -> impl Iterator<Item = &Mixer> {
        self.blocks.iter().flat_map(|b| &b.mixers)
    }

    /// The layer's attention, if it has one.
    pub fn attention(&self) -> Option<&Attention> {
        self.mixers().find_map(|m| if let Mixer::Attention(a) = m { Some(a) } else { None })
    }

    /// The mixture of experts, if the layer has one.
    pub fn moe(&self) -> Option<&Moe> {
        self.mixers().find_map(|m| if let Mixer::Moe(moe) = m { Some(&**moe) } else { None })
    }
}

/// A residual block: `x += post_norm(mixer(h) + mixer(h) + …)` of `h = norm(x)`.
#[derive(Clone, Debug, PartialEq)]
pub struct Block {
    /// Norm in front; without it, `h` is `x`.
    pub norm: Option<Norm>,
    /// What reads `h`, one mixer at least.
    pub mixers: Vec<Mixer>,
    /// Norm of the sum, in front of the residual.
    pub post_norm: Option<Norm>,
}

/// What mixes tokens or channels: `[T, hidden]` to `[T, hidden]`.
#[derive(Clone, Debug, PartialEq)]
pub enum Mixer {
    /// Attention.
    Attention(Attention),
    /// One network for every token.
    Dense(Box<Mlp>),
    /// A mixture of experts.
    Moe(Box<Moe>),
}

impl From<Gqa> for Mixer {
    fn from(attention: Gqa) -> Self {
        Self::Attention(Attention::Gqa(Box::new(attention)))
    }
}

impl From<Mla> for Mixer {
    fn from(attention: Mla) -> Self {
        Self::Attention(Attention::Mla(Box::new(attention)))
    }
}

impl From<Mlp> for Mixer {
    fn from(mlp: Mlp) -> Self {
        Self::Dense(Box::new(mlp))
    }
}

impl From<Moe> for Mixer {
    fn from(moe: Moe) -> Self {
        Self::Moe(Box::new(moe))
    }
}

impl Mixer {
    /// Its part of the layer, by which nodes, weights and states are named.
    pub const fn part(&self) -> Part {
        match self {
            Self::Attention(_) => Part::ATTN,
            Self::Dense(_) | Self::Moe(_) => Part::FFN,
        }
    }
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

/// Attention of a layer.
#[derive(Clone, Debug, PartialEq)]
pub enum Attention {
    /// Multi-head, grouped-query, multi-query.
    Gqa(Box<Gqa>),
    /// Multi-head latent attention.
    Mla(Box<Mla>),
}

impl Attention {
    /// Its rotation, if it has one.
    pub const fn rope(&self) -> Option<&Rope> {
        match self {
            Self::Gqa(a) => a.rope.as_ref(),
            Self::Mla(a) => Some(&a.rope),
        }
    }
}

/// Grouped-query attention; multi-head attention is the case of `kv_heads = heads`.
#[derive(Clone, Debug, PartialEq)]
pub struct Gqa {
    /// Query heads.
    pub heads: usize,
    /// Key-value heads.
    pub kv_heads: usize,
    /// Channels of a head.
    pub head_dim: usize,
    /// Query, `[heads·head_dim, hidden]`.
    pub q: Projection,
    /// Key, `[kv_heads·head_dim, hidden]`.
    pub k: Projection,
    /// Value, `[kv_heads·head_dim, hidden]`.
    pub v: Projection,
    /// Output, `[hidden, heads·head_dim]`.
    pub o: Projection,
    /// Norms of query and key before the rotation.
    pub qk_norm: Option<QkNorm>,
    /// Bound of the magnitude of query, key and value.
    pub clip: Option<f32>,
    /// Rotation of the first channels of each head; none in layers that see no positions but by the mask (NoPE).
    pub rope: Option<Rope>,
    /// Sliding window in tokens.
    pub window: Option<usize>,
    /// Extra softmax column of each head, `[heads]`.
    pub sinks: Option<WeightExpr>,
    /// Factor on the scores.
    pub scale: f32,
}

/// Norms of query and key.
#[derive(Clone, Debug, PartialEq)]
pub struct QkNorm {
    /// Whether each head is normalised apart (weights `[head_dim]`), or all channels together.
    pub per_head: bool,
    /// Added to the mean square.
    pub eps: f32,
    /// Weight for the query.
    pub q: WeightExpr,
    /// Weight for the key.
    pub k: WeightExpr,
}

/// Latent attention in its absorbed form: one cached head of `latent + rope` channels that all query
/// heads share; keys are all of it, values its first `latent` channels.
#[derive(Clone, Debug, PartialEq)]
pub struct Mla {
    /// Query heads.
    pub heads: usize,
    /// Channels of a query that are not rotated.
    pub nope: usize,
    /// Channels that are.
    pub rotated: usize,
    /// Channels of a head's output.
    pub v_dim: usize,
    /// Channels of the latent.
    pub latent: usize,
    /// Low-rank part of the query: projection and norm.
    pub q_down: Option<(Projection, Norm)>,
    /// Query, `[heads·(nope + rotated), hidden or rank]`.
    pub q: Projection,
    /// Latent and rotated key, `[latent + rotated, hidden]`.
    pub kv_down: Projection,
    /// Norm of the latent.
    pub kv_norm: Norm,
    /// `[heads, latent, nope]`: takes the query's plain channels to the latent.
    pub k_up: WeightExpr,
    /// `[heads, v_dim, latent]`: takes the attended latent to the head's output.
    pub v_up: WeightExpr,
    /// Output, `[hidden, heads·v_dim]`.
    pub o: Projection,
    /// Rotation.
    pub rope: Rope,
    /// Which channels it pairs.
    pub style: RopeStyle,
    /// Factor on the scores.
    pub scale: f32,
}

/// A gated feed-forward network, `down(glu(gate(x), up(x)))`.
#[derive(Clone, Debug, PartialEq)]
pub struct Mlp {
    /// `[inner, hidden]`.
    pub gate: Projection,
    /// `[inner, hidden]`.
    pub up: Projection,
    /// `[hidden, inner]`.
    pub down: Projection,
    /// How gate and up join.
    pub glu: Glu,
}

/// A mixture of experts.
#[derive(Clone, Debug, PartialEq)]
pub struct Moe {
    /// Routing, from logits on.
    pub router: RouterDesc,
    /// Logits, `[experts, hidden]`.
    pub logits: Projection,
    /// Rows that the logits are computed from.
    pub router_reads: RouterInput,
    /// Bias on the choice of experts, `[experts]`.
    pub select_bias: Option<WeightExpr>,
    /// The experts.
    pub experts: ExpertWeights,
    /// Expert for every token, added to the routed ones.
    pub shared: Option<Shared>,
}

/// What a router reads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RouterInput {
    /// The rows that the experts read.
    Experts,
    /// The residual stream as the layer got it: experts are chosen before attention (SmallThinker).
    Layer,
}

/// The routed experts of a layer.
#[derive(Clone, Debug, PartialEq)]
pub struct ExpertWeights {
    /// Channels between gate-up and down.
    pub inner: usize,
    /// `[experts, 2·inner, hidden]`: gate, then up.
    pub gate_up: WeightExpr,
    /// `[experts, hidden, inner]`.
    pub down: WeightExpr,
    /// `[experts, 2·inner]` and `[experts, hidden]`.
    pub bias: Option<(WeightExpr, WeightExpr)>,
    /// How gate and up join.
    pub glu: Glu,
}

/// An expert that every token takes.
#[derive(Clone, Debug, PartialEq)]
pub struct Shared {
    /// The expert.
    pub mlp: Mlp,
    /// `[1, hidden]`: its weight is the sigmoid of this.
    pub gate: Option<WeightExpr>,
}
