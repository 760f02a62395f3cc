//! The operators of the Graph.
//!
//! Activations are two-dimensional, `[rows, channels]`: a row is a token, and heads are ranges of
//! channels. `T` is the row count of the entry point. A row whose position is negative is **padding**:
//! it writes no cache, attends to nothing, and what it computes is never read.
//!
//! Convolutions take rows channels-first, as `[N, C, H, W]` with a row for each image and one place in it:
//! `[rows, channels, 1, 1]` (NPUMoE, §4.2). [`Op::ToNchw`] and [`Op::FromNchw`] go from one form to the other. What works
//! element by element or on the channels of a row takes both, and gives what it got: [`Op::RmsNorm`], [`Op::Add`],
//! [`Op::Mul`], [`Op::Scale`], [`Op::ScaleCols`], [`Op::Clamp`], [`Op::Act`], [`Op::Glu`], [`Op::Concat`],
//! [`Op::Slice`].
//!
//! Operands of every operator stand in one table, [`Op::signature`].

use crate::state::StateKind;
use bincode::{Decode, Encode};

/// Most scores of a [`Op::Fetch`]: those of its own layer and of three layers ahead (HybriMoE, §IV-C).
pub const FETCHED: usize = 4;

/// What a router kernel writes in place of an expert where too few scores are numbers. No dispatch takes it.
pub const NO_EXPERT: i32 = i32::MAX;

/// Element-wise activation functions.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Activation {
    /// `x · sigmoid(x)`
    Silu,
    /// `x/2 · (1 + erf(x/√2))`
    Gelu,
    /// `x/2 · (1 + tanh(√(2/π)(x + 0.044715 x³)))`
    GeluTanh,
    /// `max(x, 0)`
    Relu,
    /// `1 / (1 + e^-x)`
    Sigmoid,
}

impl Activation {
    /// Every activation.
    pub const ALL: [Self; 5] = [Self::Silu, Self::Gelu, Self::GeluTanh, Self::Relu, Self::Sigmoid];

    /// Name in the text form.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Silu => "silu",
            Self::Gelu => "gelu",
            Self::GeluTanh => "gelu_tanh",
            Self::Relu => "relu",
            Self::Sigmoid => "sigmoid",
        }
    }
}

/// How a gated feed-forward network joins its gate `g` and its up projection `u`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Glu {
    /// `act(g) · u`: SwiGLU, GeGLU, ReGLU.
    Gated(Activation),
    /// `relu(g) · relu(u)`: dReLU (arXiv 2406.05955, eq. 2).
    DRelu,
    /// `fatrelu(g) · u`, where `fatrelu(g)` is 0 if `g < threshold`, else `g`: FATReLU (Kurtz et al., ICML 2020; ProSparse,
    /// arXiv 2402.13516, section 3.3).
    FatRelu {
        /// What is below it becomes 0.
        threshold: f32,
    },
    /// `cats(g) · u`, where `cats(g)` is 0 if `|silu(g)| < threshold`, else `silu(g)`: a SwiGLU whose smallest activations are left
    /// out (CATS, arXiv 2404.08763). An approximation of [`Glu::Gated`] of [`Activation::Silu`].
    Cats {
        /// Magnitudes below it become 0.
        threshold: f32,
    },
    /// gpt-oss: `g' = min(g, limit)`, `u' = clamp(u, ±limit)`, `(u' + 1) · g' · sigmoid(alpha · g')`.
    Clamped {
        /// Slope inside the sigmoid.
        alpha: f32,
        /// Clamp of both inputs.
        limit: f32,
    },
}

impl Glu {
    /// Whether the gate alone makes the result exactly 0 for some of its values, so that up and down of such a neuron need not be
    /// read: what [`Op::NeuronFfn`] takes (PowerInfer-2, §2.2).
    pub const fn skips(self) -> bool {
        self.skips_below() || matches!(self, Self::Cats { .. })
    }

    /// Whether the result is 0 wherever the gate is low enough: an upper bound of the gate then tells who sleeps.
    pub const fn skips_below(self) -> bool {
        matches!(self, Self::Gated(Activation::Relu) | Self::DRelu | Self::FatRelu { .. })
    }
}

/// What says in front of a neuron's gate whether it is awake, at the price of some who are and are passed over (PowerInfer-2,
/// §2.2 and §4.1.2): a number that is above 0 for those that it takes to be awake.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Predictor {
    /// `left · (right · x) + margin`, of `@right[E, R, H], @left[E, I, R], @margin[E, 1, I]`: the gates as a product of two
    /// small matrices.
    LowRank,
    /// `codes · x + margin`, of `@codes[E, I, H], @margin[E, 1, I]`: the gates in fewer bits.
    Coarse,
}

impl Predictor {
    /// Every one.
    pub const ALL: [Self; 2] = [Self::LowRank, Self::Coarse];

    /// Name in the text form.
    pub const fn name(self) -> &'static str {
        match self {
            Self::LowRank => "low_rank",
            Self::Coarse => "coarse",
        }
    }

    /// Its weights.
    pub const fn weights(self) -> usize {
        match self {
            Self::LowRank => 3,
            Self::Coarse => 2,
        }
    }
}

/// Which channels of a head a rotation pairs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum RopeStyle {
    /// Channel `i` with `i + rotary/2`.
    Half,
    /// Channel `2i` with `2i + 1`; the result keeps the interleaved order.
    Interleaved,
}

/// How router logits become scores.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Encode, Decode)]
pub enum Score {
    /// Softmax over all experts.
    Softmax,
    /// Sigmoid of each logit.
    Sigmoid,
    /// The logit itself.
    Identity,
}

impl Score {
    /// Every one.
    pub const ALL: [Self; 3] = [Self::Softmax, Self::Sigmoid, Self::Identity];

    /// Name in the text form.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Softmax => "softmax",
            Self::Sigmoid => "sigmoid",
            Self::Identity => "identity",
        }
    }
}

/// How the score of a group of experts is formed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum GroupScore {
    /// The largest score in the group (DeepSeek-V2).
    Max,
    /// The sum of the two largest (DeepSeek-V3).
    Top2Sum,
}

/// Group-limited selection: of `n` groups only the best `keep` may be chosen from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Groups {
    /// Number of groups; divides the number of experts.
    pub n: usize,
    /// Groups kept.
    pub keep: usize,
    /// Score of a group.
    pub score: GroupScore,
    /// Score of an expert in a dropped group: −∞ if true, 0 if false.
    pub mask_neg_inf: bool,
}

/// Where the routing weight of a selected expert comes from.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum WeightFrom {
    /// Its score, without the selection bias.
    Score,
    /// Softmax over the selected logits only.
    SoftmaxTopk,
    /// Sigmoid of its logit.
    SigmoidTopk,
    /// Phi-MoE's SparseMixer at inference; `k` is 2, or 1: the weight of the first does not depend on the second.
    SparseMixer {
        /// Jitter that decides which near ties share the weight.
        eps: f32,
    },
}

/// How the weights of the selected experts are normalised.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Renorm {
    /// They stay as they are.
    None,
    /// Divided by their sum plus `eps`.
    Sum {
        /// Added to the sum.
        eps: f32,
    },
    /// Divided by their sum, which is at least `min`.
    Clamp {
        /// Smallest divisor.
        min: f32,
    },
}

/// Routing of every supported family, from logits to `k` experts with weights per token.
///
/// 1. `s = score(z)`; the choice is made on `c = s + select_bias` (operand, if there).
/// 2. With `groups`, experts outside of the kept groups are masked in `c`.
/// 3. The `k` largest `c` are selected, the **lowest index wins ties**, slots in descending order of `c`.
/// 4. Weights come from `weight_from`, are renormalised, then multiplied by `scale`.
#[derive(Clone, Debug, PartialEq)]
pub struct RouterDesc {
    /// Number of experts.
    pub experts: usize,
    /// Experts per token.
    pub k: usize,
    /// Scores.
    pub score: Score,
    /// Whether a selection bias operand follows the logits.
    pub select_bias: bool,
    /// Group-limited selection.
    pub groups: Option<Groups>,
    /// Weights of the selected.
    pub weight_from: WeightFrom,
    /// Normalisation of the weights.
    pub renorm: Renorm,
    /// Factor on the weights, last.
    pub scale: f32,
}

/// An operator with its attributes. The comment gives operands → results; `@` marks weights and `$`
/// cache state; `?` marks what may be absent, as the attribute of that name says.
#[derive(Clone, Debug, PartialEq)]
pub enum Op {
    /// `ids i32[T], @table[V, H] → f32[T, H]`
    Embed,
    /// `x[T, groups·C], @weight[C]? → same`. Root mean square norm of each group of channels, in f32.
    RmsNorm {
        /// Added to the mean square.
        eps: f32,
        /// Groups of channels normalised apart (1, or the heads of a per-head norm).
        groups: usize,
        /// Whether the weight is there.
        weight: bool,
    },
    /// `x[T, C], @weight[C], @bias[C] → same`
    LayerNorm {
        /// Added to the variance.
        eps: f32,
    },
    /// `x[T, K], @w[N, K], @bias[N]? → f32[T, N]`
    Linear {
        /// Whether the bias is there.
        bias: bool,
    },
    /// `x[T, K], @w[2I, K], @bias[2I]? → f32[T, I]`: gate (first I rows) and up (last I) in one pass.
    LinearGlu {
        /// How gate and up join.
        glu: Glu,
        /// Whether the bias is there.
        bias: bool,
    },
    /// `x[T, heads·K], @w[heads, N, K] → f32[T, heads·N]`: each head has its own matrix.
    HeadLinear {
        /// Number of heads.
        heads: usize,
    },
    /// `x[T, groups·K, 1, 1], @w[groups, N, K], @bias[groups·N]? → f32[T, groups·N, 1, 1]`: a 1×1 convolution; each group
    /// of channels has its own matrix. One group may have it as `@w[N, K]`.
    Conv1x1 {
        /// Groups of channels.
        groups: usize,
        /// Whether the bias is there.
        bias: bool,
    },
    /// `x[T, C] → f32[T, C, 1, 1]`: rows become channels-first.
    ToNchw,
    /// `x[T, C, 1, 1] → f32[T, C]`
    FromNchw,
    /// `pos i32[T], @inv_freq[R/2], @inv_freq_long[R/2]? → f32[T, R]`: cosines, then sines, of
    /// `pos · inv_freq` rounded to f32, times `scale`. With `switch`, the long frequencies and their factor
    /// hold for a row whose sequence is longer than `switch.after` tokens. A sequence ends with its row, or
    /// with the prompt that is being read: rows of a prompt switch together, as in the reference.
    RopeAngles {
        /// Attention factor on cosine and sine (YaRN, LongRoPE).
        scale: f32,
        /// LongRoPE: sequence length up to which the short frequencies hold, and the factor past it.
        switch: Option<LongSwitch>,
    },
    /// `x[T, heads·dim], angles[T, R] → same`: rotates channels `offset .. offset + R` of each head.
    Rope {
        /// Number of heads.
        heads: usize,
        /// First rotated channel in a head.
        offset: usize,
        /// Pairing.
        style: RopeStyle,
    },
    /// `$state[slots, heads, ctx, dim], x[T, heads·dim], pos i32[T], slot i32[T] → state`: rows with a
    /// position ≥ 0 are stored at (slot, ·, pos mod ctx, ·). The result is the updated state, in place.
    CacheWrite,
    /// `q[T, heads·qk_dim], k(state), v(state)?, pos i32[T], slot i32[T], @sinks[heads]? → f32[T, heads·v_dim]`
    ///
    /// Row `t` attends to positions `0 ..= pos[t]` of its slot, the last `window` of them if set. Position `p` is row
    /// `p mod ctx` of the state.
    Attention(AttentionDesc),
    /// `$state[slots, 1, K − 1, C], x[T, C], @w[K, C], @bias[C]?, pos i32[T], slot i32[T] → f32[T, C]`: each channel's own
    /// convolution over the row and the K − 1 rows of its sequence before it, `Σⱼ w[j, c] · x[t − K + 1 + j, c] + bias[c]`; what
    /// came before the first is the state's, zeros where a sequence begins. Rows follow each other within a sequence; the last
    /// K − 1 become the state (Gu and Dao, *Mamba*, section 3.4).
    CausalConv {
        /// Function of the result.
        act: Option<Activation>,
        /// Whether the bias is there.
        bias: bool,
    },
    /// `$state[slots, heads, K, V], q[T, key_heads·K], k[T, key_heads·K], v[T, heads·V], decay, beta[T, heads], pos i32[T],
    /// slot i32[T] → f32[T, heads·V]`: the gated delta rule (Yang, Kautz and Hatamizadeh, *Gated Delta Networks*,
    /// equation 10). For every head, row by row of a sequence, on the state S, zeros where it begins:
    /// `S ← exp(decay) · S`, `S ← S + k · (beta · (v − kᵀ S))`, and the result is `qᵀ S`. Value head `h` takes query and key of
    /// head `h · key_heads / heads`. `decay` is `[T, heads]`, or `[T, heads·K]` with one for each channel of a key.
    DeltaRule {
        /// Heads of queries and keys.
        key_heads: usize,
        /// Heads of values, a multiple.
        heads: usize,
    },
    /// `$state[slots, heads, N, P], c[T, groups·N], b[T, groups·N], x[T, heads·P], decay[T, heads], dt[T, heads], pos i32[T],
    /// slot i32[T] → f32[T, heads·P]`: a state space of scalar decay (Dao and Gu, *Transformers are SSMs*, equation 1): as
    /// [`Op::DeltaRule`], but that what a state says of `b` is not taken off: `S ← exp(decay) · S + b · (dt · x)`, and the result is
    /// `cᵀ S`.
    Ssd {
        /// Groups of heads that share `b` and `c`.
        groups: usize,
        /// Heads, a multiple.
        heads: usize,
    },
    /// `logits[T, E], @select_bias[E]? → i32[T, k], f32[T, k]`
    Router(RouterDesc),
    /// `ids i32[T, k] → i32[dispatch_words(T, k, experts)]`: token rows grouped by expert, see
    /// [`DispatchLayout`].
    Dispatch {
        /// Number of experts.
        experts: usize,
        /// Whether an id may be −1: a choice that is not served here, whose slot is −1.
        partial: bool,
    },
    /// `dispatch, scores f32[T, E], scores of the next layers f32[T, E'], … → dispatch`: the same table. Where experts stay
    /// on flash, whoever runs the graph has the experts that the table names read, and those of the next layers that its
    /// hidden state seems to lead to: the gates of these layers, applied to it, gave the further scores (HybriMoE, §IV-C).
    Fetch {
        /// Layer, counted over those with routed experts.
        layer: usize,
        /// Operands of scores, 1 to [`FETCHED`].
        scores: usize,
    },
    /// `ids i32[T, k], added f32[T, C], pos i32[T] → i32[T, k], i32[T, k]`: which choices find room where capacities are
    /// fixed, and which are served elsewhere; −1 stands for the others. An expert keeps the rows of the highest L2 norm
    /// of `added`, what attention gave them; of equal ones the lowest (NPUMoE, §3.2 and §4.1).
    Admit(AdmitDesc),
    /// `x[T, H], dispatch, @gate_up[E, 2I, H], @down[E, H, I], @gate_up_bias[E, 2I]?, @down_bias[E, H]?
    /// → f32[T·k, H]`, one row per (token, expert) slot, in dispatch order.
    ExpertFfn {
        /// How gate and up join.
        glu: Glu,
        /// Whether both biases are there.
        bias: bool,
        /// Whether static graphs compute it, group by group, each expert no more rows than its capacity.
        fixed: bool,
    },
    /// `x[T, H], dispatch, @neurons[E, I, 3H] → f32[T·k, H]`: experts by neurons (PowerInfer-2, §4.4). Row `i` of expert `e` is
    /// a neuron's bundle: its row of gate, its row of up, its column of down.
    ///
    /// What [`Op::ExpertFfn`] gives of the same matrices, but that a neuron whose gate makes it 0 adds nothing, even if up or
    /// down is no number. Neurons may stand in any order: sums over them differ by rounding alone.
    NeuronFfn {
        /// How gate and up join: one that [skips](Glu::skips).
        glu: Glu,
        /// Where up and down stay on flash: index of the layer among those that do. The weights are then
        /// `@gates[E, I, H], @rests[E, I, 2H]`.
        paged: Option<usize>,
        /// What is asked in front of a gate, where no neuron stays on flash. Its weights follow `@neurons`; a neuron of which
        /// it says 0 or less adds nothing, whatever its gate would say.
        predict: Option<Predictor>,
    },
    /// `y[T·k, H], dispatch, weights f32[T, k] → f32[T, H]`: the weighted sum of each token's slots. Rows past
    /// those that the table counts are padding.
    Combine {
        /// Whether a slot may be −1: its choice adds nothing.
        partial: bool,
    },
    /// `a, b → a + b`, element by element.
    Add,
    /// `a[T, C], b[T, C] or b[T, 1] → a · b`; one column is broadcast.
    Mul,
    /// `a[T, heads·C], b[T, heads] → a · b`, one factor for every head.
    MulHeads {
        /// Number of heads.
        heads: usize,
    },
    /// `x → cap · tanh(x / cap)`
    SoftCap {
        /// What no result reaches.
        cap: f32,
    },
    /// `x → factor · x`
    Scale {
        /// The factor.
        factor: f32,
    },
    /// `x[T, C], @w[C] → x · w`, per channel.
    ScaleCols,
    /// `x → min(max(x, lo), hi)`
    Clamp {
        /// Lower bound.
        lo: f32,
        /// Upper bound.
        hi: f32,
    },
    /// `x → act(x)`
    Act(Activation),
    /// `g, u → glu(g, u)`
    Glu(Glu),
    /// `x → ln(1 + e^x)`
    Softplus,
    /// `x[T, C] → softmax over C`
    Softmax,
    /// `a[T, heads·A], b[T, heads·B], … → [T, heads·(A + B + …)]`: joined head by head.
    Concat {
        /// Number of heads in every operand; 1 joins whole rows.
        heads: usize,
    },
    /// `x[T, heads·C] → f32[T, heads·len]`: channels `start .. start + len` of each head.
    Slice {
        /// Number of heads; 1 slices whole rows.
        heads: usize,
        /// First channel in a head.
        start: usize,
        /// Channels kept of each head.
        len: usize,
    },
    /// `x[T, C], rows i32[R] → f32[R, C]`: row `rows[r]` of `x`; a negative index gives a padding row.
    GatherRows,
}

/// Attributes of [`Op::Admit`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AdmitDesc {
    /// Rows that each expert has room for; 0: it is served elsewhere, whatever its rows.
    pub capacities: Vec<u32>,
    /// Whether what finds no room is served elsewhere; else it is lost.
    pub spill: bool,
}

/// Where LongRoPE changes frequencies.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LongSwitch {
    /// Sequences of at most this many tokens use the short frequencies.
    pub after: usize,
    /// Attention factor of the long ones.
    pub long_scale: f32,
}

/// Attributes of [`Op::Attention`].
#[derive(Clone, Debug, PartialEq)]
pub struct AttentionDesc {
    /// Query heads.
    pub heads: usize,
    /// Key-value heads; divides `heads`.
    pub kv_heads: usize,
    /// Channels of a query and of a key.
    pub qk_dim: usize,
    /// Channels of a value.
    pub v_dim: usize,
    /// Factor on the scores.
    pub scale: f32,
    /// Sliding window in tokens, the query's own included.
    pub window: Option<usize>,
    /// One extra softmax column per head that is dropped after normalisation (gpt-oss).
    pub sinks: bool,
    /// Values are the first `v_dim` channels of the keys (latent attention); no `v` operand.
    pub v_from_k: bool,
}

/// What an operand slot of an operator takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// A value.
    Value,
    /// A weight.
    Weight,
    /// A state, or the value that an operator which [writes](Effect::Writes) it returned for it.
    State,
}

impl Kind {
    /// Name in messages.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Value => "value",
            Self::Weight => "weight",
            Self::State => "state",
        }
    }
}

/// What an operator does to the state that is its first operand, or to those that it reads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Effect {
    /// It takes none, or reads what it takes.
    None,
    /// It writes the state: its result is the state as it is then, in place.
    Writes,
    /// It reads the state and leaves it changed: its results are values.
    Updates,
}

impl Op {
    /// What the operator does to its state.
    pub const fn effect(&self) -> Effect {
        match self {
            Self::CacheWrite => Effect::Writes,
            Self::CausalConv { .. } | Self::DeltaRule { .. } | Self::Ssd { .. } => Effect::Updates,
            _ => Effect::None,
        }
    }

    /// Whether its states may be of a kind.
    pub const fn takes_state(&self, kind: StateKind) -> bool {
        match self {
            Self::CausalConv { .. } => matches!(kind, StateKind::Convolution),
            Self::DeltaRule { .. } | Self::Ssd { .. } => matches!(kind, StateKind::Recurrent),
            _ => matches!(kind, StateKind::Cache | StateKind::Ring { .. }),
        }
    }

    /// Names of the operators that are matrix products of whole rows, in any form: what parts of a model are made of.
    pub const MATRICES: [&str; 4] = ["attention", "linear", "linear_glu", "conv1x1"];

    /// Mnemonic in the text form.
    pub const fn name(&self) -> &'static str {
        match self {
            Self::Embed => "embed",
            Self::RmsNorm { .. } => "rms_norm",
            Self::LayerNorm { .. } => "layer_norm",
            Self::Linear { .. } => "linear",
            Self::LinearGlu { .. } => "linear_glu",
            Self::HeadLinear { .. } => "head_linear",
            Self::Conv1x1 { .. } => "conv1x1",
            Self::ToNchw => "to_nchw",
            Self::FromNchw => "from_nchw",
            Self::RopeAngles { .. } => "rope_angles",
            Self::Rope { .. } => "rope",
            Self::CacheWrite => "cache_write",
            Self::Attention(_) => "attention",
            Self::CausalConv { .. } => "causal_conv",
            Self::DeltaRule { .. } => "delta_rule",
            Self::Ssd { .. } => "ssd",
            Self::Router(_) => "router",
            Self::Dispatch { .. } => "dispatch",
            Self::Fetch { .. } => "fetch",
            Self::ExpertFfn { .. } => "expert_ffn",
            Self::NeuronFfn { .. } => "neuron_ffn",
            Self::Admit(_) => "admit",
            Self::Combine { .. } => "combine",
            Self::Add => "add",
            Self::Mul => "mul",
            Self::MulHeads { .. } => "mul_heads",
            Self::SoftCap { .. } => "soft_cap",
            Self::Scale { .. } => "scale",
            Self::ScaleCols => "scale_cols",
            Self::Clamp { .. } => "clamp",
            Self::Act(a) => a.name(),
            Self::Glu(_) => "glu",
            Self::Softplus => "softplus",
            Self::Softmax => "softmax",
            Self::Concat { .. } => "concat",
            Self::Slice { .. } => "slice",
            Self::GatherRows => "gather_rows",
        }
    }

    /// Operand kinds in order. [`Op::Concat`] takes two or more values; its signature gives two.
    /// [`Self::takes`] tells whether a number of operands is right.
    pub fn signature(&self) -> Vec<Kind> {
        use Kind::{State as S, Value as V, Weight as W};
        let mut kinds = match self {
            Self::Embed
            | Self::ScaleCols
            | Self::RmsNorm { weight: true, .. }
            | Self::Linear { .. }
            | Self::LinearGlu { .. }
            | Self::HeadLinear { .. }
            | Self::Conv1x1 { .. } => vec![V, W],
            Self::NeuronFfn { paged: None, predict, .. } => {
                let mut kinds = vec![V, V, W];
                kinds.resize(3 + predict.map_or(0, Predictor::weights), W);
                kinds
            }
            Self::LayerNorm { .. } => vec![V, W, W],
            Self::RopeAngles { switch, .. } => {
                if switch.is_some() {
                    vec![V, W, W]
                } else {
                    vec![V, W]
                }
            }
            Self::Rope { .. }
            | Self::Add
            | Self::Mul
            | Self::MulHeads { .. }
            | Self::Glu(_)
            | Self::Concat { .. }
            | Self::GatherRows => vec![V, V],
            Self::CacheWrite => vec![S, V, V, V],
            Self::CausalConv { bias: false, .. } => vec![S, V, W, V, V],
            Self::CausalConv { bias: true, .. } => vec![S, V, W, W, V, V],
            Self::DeltaRule { .. } | Self::Ssd { .. } => vec![S, V, V, V, V, V, V, V],
            Self::Attention(d) => {
                let mut kinds = vec![V, S];
                if !d.v_from_k {
                    kinds.push(S);
                }
                kinds.extend([V, V]);
                if d.sinks {
                    kinds.push(W);
                }
                kinds
            }
            Self::Router(d) => {
                if d.select_bias {
                    vec![V, W]
                } else {
                    vec![V]
                }
            }
            Self::ExpertFfn { .. } | Self::NeuronFfn { paged: Some(_), .. } => vec![V, V, W, W],
            // A plan has no more; a wrong number is found by inference.
            Self::Fetch { scores, .. } => vec![V; 1 + (*scores).min(FETCHED)],
            Self::Admit(_) | Self::Combine { .. } => vec![V, V, V],
            Self::Dispatch { .. }
            | Self::Scale { .. }
            | Self::SoftCap { .. }
            | Self::RmsNorm { weight: false, .. }
            | Self::Clamp { .. }
            | Self::Act(_)
            | Self::Softplus
            | Self::Softmax
            | Self::ToNchw
            | Self::FromNchw
            | Self::Slice { .. } => vec![V],
        };
        match self {
            Self::Linear { bias: true }
            | Self::LinearGlu { bias: true, .. }
            | Self::Conv1x1 { bias: true, .. } => kinds.push(W),
            Self::ExpertFfn { bias: true, .. } => kinds.extend([W, W]),
            _ => {}
        }
        kinds
    }
}

/// The layout of the dispatch table: i32 words that [`Op::Dispatch`] writes and the expert kernels read.
///
/// | words | content |
/// |---|---|
/// | 0 | active experts `A` |
/// | 1 | pairs, `valid rows · k`; as many slots are in use, less those that a partial table leaves out |
/// | `expert() ..` `[E]` | ids of the active experts, the busiest first, ties by id |
/// | `start() ..` `[E+1]` | first slot of each active expert, then the number of slots |
/// | `token() ..` `[T·k]` | token row of each slot |
/// | `slot() ..` `[T·k]` | slot of each (token, choice); −1 where a partial table leaves it out |
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DispatchLayout {
    /// Token rows `T`.
    pub rows: usize,
    /// Experts per token.
    pub k: usize,
    /// Experts.
    pub experts: usize,
}

impl DispatchLayout {
    /// First word of the expert list.
    pub const fn expert(self) -> usize {
        4
    }
    /// First word of the slot starts.
    pub const fn start(self) -> usize {
        self.expert() + self.experts
    }
    /// First word of the token rows.
    pub const fn token(self) -> usize {
        self.start() + self.experts + 1
    }
    /// First word of the slots of each (token, choice).
    pub const fn slot(self) -> usize {
        self.token() + self.rows * self.k
    }
    /// Words in all.
    pub const fn words(self) -> usize {
        self.slot() + self.rows * self.k
    }
    /// Words in all, or `None` where that overflows.
    pub fn checked_words(self) -> Option<usize> {
        let slots = self.rows.checked_mul(self.k)?.checked_mul(2)?;
        self.experts.checked_mul(2)?.checked_add(5)?.checked_add(slots)
    }
}
