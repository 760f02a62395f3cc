//! The operators of the Graph.
//!
//! Activations are two-dimensional, `[rows, channels]`: a row is a token, and heads are ranges of
//! channels. `T` is the row count of the entry point. A row whose position is negative is **padding**:
//! it writes no cache, attends to nothing, and what it computes is never read.
//!
//! An operator is one row of `operators!` below, with its attributes and their meaning, and one file of this
//! folder with its `Operator`: name, operands, shape rule, effect on states, meaning. Text forms are derived
//! from the row.

/// A struct of attributes, each written and read under its field's name. `as "word"`: and a value itself, as
/// a word with arguments.
macro_rules! attributes {
    ($(#[$meta:meta])* $vis:vis struct $T:ident as $word:literal { $($body:tt)* }) => {
        attributes! { $(#[$meta])* $vis struct $T { $($body)* } }

        impl Word for $T {
            const EXPECTED: &'static str = concat!("`", $word, "(…)`");
            fn word(&self, w: &mut Writer) {
                w.word($word);
                self.write(w);
            }
            fn of(word: &str, r: &mut Reader<'_, '_>) -> Parsed<Option<Self>> {
                if word == $word { Self::read(word, r) } else { Ok(None) }
            }
        }
    };
    ($(#[$meta:meta])* $vis:vis struct $T:ident { $($(#[$doc:meta])* $field_vis:vis $field:ident: $ty:ty,)* }) => {
        $(#[$meta])*
        $vis struct $T { $($(#[$doc])* $field_vis $field: $ty,)* }

        impl Attributes for $T {
            fn write(&self, _w: &mut Writer) {
                $(_w.put(stringify!($field), &self.$field);)*
            }
            fn read(_: &str, _r: &mut Reader<'_, '_>) -> Parsed<Option<Self>> {
                Ok(Some(Self { $($field: _r.get(stringify!($field))?,)* }))
            }
        }
    };
}

/// An enum whose variants are words of the text form. `$what` they are, for messages.
macro_rules! words {
    ($(#[$meta:meta])* $vis:vis enum $T:ident, $what:literal { $($(#[$doc:meta])* $variant:ident = $word:literal,)* }) => {
        $(#[$meta])*
        $vis enum $T { $($(#[$doc])* $variant,)* }

        impl $T {
            const WORDS: [&'static str; [$($word),*].len()] = [$($word),*];

            /// Every one.
            $vis const ALL: [Self; Self::WORDS.len()] = [$(Self::$variant),*];

            /// Name in the text form.
            $vis const fn name(self) -> &'static str {
                Self::WORDS[self as usize]
            }
        }

        impl Word for $T {
            const EXPECTED: &'static str = $what;
            fn word(&self, w: &mut Writer) {
                w.word(self.name());
            }
            fn of(word: &str, _: &mut Reader<'_, '_>) -> Parsed<Option<Self>> {
                Ok(Self::ALL.into_iter().find(|x| x.name() == word))
            }
        }
    };
}

pub(crate) use {attributes, words};

/// The struct that is the [`Operator`] of a row: the one that the row names in parentheses, or one of the
/// attributes that it has in braces, with the variant's name. `declare` is its item, `name` its path, `take`
/// makes it of the variant's fields, and `give` makes the variant of it.
macro_rules! attributes_of {
    (declare $Variant:ident ($Desc:ident)) => {};
    (declare $Variant:ident $({ $($field:ident: $ty:ty,)* })?) => {
        attributes! { pub(crate) struct $Variant { $($($field: $ty,)*)? } }
    };
    (name $Variant:ident ($Desc:ident)) => { $Desc };
    (name $Variant:ident) => { $Variant };
    (take $Variant:ident ($desc:ident)) => { $desc };
    (take $Variant:ident $({ $($field:ident)* })?) => { &$Variant { $($($field: *$field,)*)? } };
    (give $attributes:ident $Variant:ident ($Desc:ident)) => { Op::$Variant($attributes) };
    (give $attributes:ident $Variant:ident $({ $($field:ident)* })?) => {{
        let $Variant { $($($field,)*)? } = $attributes;
        Op::$Variant $({ $($field,)* })?
    }};
}

/// Defines [`Op`] with a variant for each row, [`Op::read`], and `each!(op, it => answer)`, where `it` is the
/// [`Operator`] of `op`. A row has its attributes in braces, all of them `Copy`, or a struct of them in
/// parentheses. `$d` is a dollar sign.
macro_rules! operators {
    (($d:tt) $(#[$meta:meta])* pub enum Op { $(
        $(#[$doc:meta])*
        $Variant:ident $(($desc:ident: $Desc:ident))? $({ $($(#[$field_doc:meta])* $field:ident: $ty:ty,)* })?,
    )* }) => {
        $(#[$meta])*
        pub enum Op { $($(#[$doc])* $Variant $(($Desc))? $({ $($(#[$field_doc])* $field: $ty,)* })?,)* }

        $(attributes_of! { declare $Variant $(($Desc))? $({ $($field: $ty,)* })? })*

        macro_rules! each {
            ($d op:expr, $d it:ident => $d answer:expr) => {
                match $d op {
                    $(Op::$Variant $(($desc))? $({ $($field),* })? => {
                        let $d it = attributes_of!(take $Variant $(($desc))? $({ $($field)* })?);
                        $d answer
                    })*
                }
            };
        }

        impl Op {
            /// The operator of this name, if there is one, with the attributes that are taken out of `r`.
            pub(crate) fn read(name: &str, r: &mut Reader<'_, '_>) -> Parsed<Option<Self>> {
                $(if <attributes_of!(name $Variant $(($Desc))?)>::NAMES.contains(&name) {
                    let read = <attributes_of!(name $Variant $(($Desc))?)>::read(name, r)?;
                    return Ok(read.map(|read| attributes_of!(give read $Variant $(($Desc))? $({ $($field)* })?)));
                })*
                Ok(None)
            }
        }
    };
}

mod activation;
mod attention;
mod cache_write;
mod causal_conv;
mod combine;
mod concat;
mod delta_rule;
mod dispatch;
mod elementwise;
mod embed;
mod expert_ffn;
mod gather_rows;
mod glu;
mod head_linear;
mod heads;
mod layer_norm;
mod limit_capacity;
mod linear;
mod math;
mod neuron_ffn;
mod request_experts;
mod rms_norm;
mod rope;
mod rope_angles;
mod router;
mod scale_by_position;
mod selective_scan;
mod slice;
mod softmax;
mod zero_experts;

pub use activation::Activation;
pub use attention::AttentionDesc;
pub use dispatch::{DispatchLayout, NO_EXPERT};
pub use glu::Glu;
pub use limit_capacity::LimitCapacityDesc;
pub use neuron_ffn::Predictor;
pub use request_experts::MAX_REQUEST_SCORES;
pub use rope::RopeStyle;
pub use rope_angles::LongSwitch;
pub use router::{GroupScore, Groups, Renorm, RouterDesc, Score, WeightFrom};

use crate::eval::{Args, Data, EvalError};
use crate::infer::{Operands, RowShape, TypeError, f32, i32};
use crate::state::StateKind;
use crate::text::ops::{Parsed, Reader, Word, Writer};
use crate::types::{DType, Type};
use Kind::{State as S, Value as V, Weight as W};

type Inferred = Result<Vec<Type>, TypeError>;
type Evaluated = Result<Vec<Data>, EvalError>;

/// Attributes in the text form.
pub(crate) trait Attributes: Sized {
    /// Writes them.
    fn write(&self, w: &mut Writer);
    /// Reads the attributes of the operator with this name, if it has them.
    fn read(name: &str, r: &mut Reader<'_, '_>) -> Parsed<Option<Self>>;
}

/// Operator. `self` is its attributes.
pub(crate) trait Operator: Attributes {
    /// Mnemonics in the text form: one, unless attributes choose it.
    const NAMES: &'static [&'static str];
    /// Operands in order, without [`Self::weights`].
    const OPERANDS: &'static [Kind];

    /// The mnemonic of these attributes.
    fn name(&self) -> &'static str {
        Self::NAMES[0]
    }

    /// Weights after [`Self::OPERANDS`], by attributes.
    fn weights(&self) -> usize {
        0
    }

    /// Whether more operands of the last kind may follow.
    fn takes_more(&self) -> bool {
        false
    }

    /// Effect on the state that is the first operand.
    fn effect(&self) -> Effect {
        Effect::None
    }

    /// Whether its states may be of a kind.
    fn takes_state(&self, kind: StateKind) -> bool {
        matches!(kind, StateKind::Cache | StateKind::Ring { .. })
    }

    /// Operand kinds in order.
    fn signature(&self) -> Vec<Kind> {
        [Self::OPERANDS, &vec![W; self.weights()]].concat()
    }

    /// Result types. There are as many operands as the signature has, and none is empty.
    fn infer(&self, o: &Operands<'_>) -> Inferred;

    /// Multiply-adds of a row with the states of its sequence, of which it sees `context` positions. `state` is
    /// the type of the first of them.
    fn multiply_adds(&self, _state: &Type, _context: f64) -> f64 {
        0.0
    }

    /// Results for operands of types that [`Self::infer`] took. An operator with an [`Effect`] has the state
    /// in [`Args::state`]; its operands are those after it, and a result that is the state is left out.
    fn eval(&self, a: &Args<'_>) -> Evaluated;
}

operators! { ($)
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
            /// Function that joins gate and up.
            glu: Glu,
            /// Whether the bias is there.
            bias: bool,
        },
        /// `x[T, heads·K], @w[heads, N, K] → f32[T, heads·N]`: each head has its own matrix.
        HeadLinear {
            /// Number of heads.
            heads: usize,
        },
        /// `pos i32[T], @inv_freq[R/2], @inv_freq_long[R/2]? → f32[T, R]`: cosines, then sines, of `pos ·
        /// inv_freq` rounded to f32, times `scale`. With `switch`, the long frequencies and their factor hold
        /// for a row whose sequence is longer than `switch.after` tokens. A sequence ends with its row, or
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
        /// `q[T, heads·qk_dim], k(state), v(state)?, pos i32[T], slot i32[T], @sinks[heads]? → f32[T,
        /// heads·v_dim]`
        ///
        /// Row `t` attends to positions `0 ..= pos[t]` of its slot, the last `window` of them if set, or
        /// those of its chunk. Position `p` is row `p mod ctx` of the state.
        Attention(desc: AttentionDesc),
        /// `$state[slots, 1, K − 1, C], x[T, C], @w[K, C], @bias[C]?, pos i32[T], slot i32[T] → f32[T, C]`:
        /// each channel's own convolution over the row and the K − 1 rows of its sequence before it, `Σⱼ w[j,
        /// c] · x[t − K + 1 + j, c] + bias[c]`; what came before the first is the state's, zeros where a
        /// sequence begins. Rows follow each other within a sequence; the last K − 1 become the state (Gu and
        /// Dao, *Mamba*, section 3.4).
        CausalConv {
            /// Function of the result.
            act: Option<Activation>,
            /// Whether the bias is there.
            bias: bool,
        },
        /// `$state[slots, heads, K, V], q[T, key_heads·K], k[T, key_heads·K], v[T, heads·V], decay, beta[T,
        /// heads], pos i32[T], slot i32[T] → f32[T, heads·V]`: the gated delta rule (Yang, Kautz and
        /// Hatamizadeh, *Gated Delta Networks*, equation 10). For every head, row by row of a sequence, on
        /// the state S, zeros where it begins: `S ← exp(decay) · S`, `S ← S + k · (beta · (v − kᵀ S))`, and
        /// the result is `qᵀ S`. Value head `h` takes query and key of head `h · key_heads / heads`. `decay`
        /// is `[T, heads]`, or `[T, heads·K]` with one for each channel of a key.
        DeltaRule {
            /// Heads of queries and keys.
            key_heads: usize,
            /// Heads of values, a multiple.
            heads: usize,
        },
        /// `$state[slots, heads, N, P], c[T, groups·N], b[T, groups·N], x[T, heads·P], decay[T, heads], dt[T,
        /// heads], pos i32[T], slot i32[T] → f32[T, heads·P]`: a state space of scalar decay (Dao and Gu,
        /// *Transformers are SSMs*, equation 1): as [`Op::DeltaRule`], but that what a state says of `b` is
        /// not taken off: `S ← exp(decay) · S + b · (dt · x)`, and the result is `cᵀ S`.
        Ssd {
            /// Groups of heads that share `b` and `c`.
            groups: usize,
            /// Heads, a multiple.
            heads: usize,
        },
        /// `$state[slots, 1, N, C], c[T, N], b[T, N], x[T, C], dt[T, C], @rate[N, C], pos i32[T], slot i32[T]
        /// → f32[T, C]`: a selective state space (Gu and Dao, *Mamba*, section 3.2). Row by row of a
        /// sequence, on the state S, zeros where it begins: `S ← exp(dt · rate) · S + b · (dt · x)`, where
        /// `dt` and `x` are of the column and `b` is of the row, and the result is `cᵀ S`.
        SelectiveScan,
        /// `logits[T, E], @select_bias[E]? → i32[T, k], f32[T, k]`
        Router(desc: RouterDesc),
        /// `ids i32[T, k] → i32[dispatch_words(T, k, experts)]`: token rows grouped by expert, see
        /// [`DispatchLayout`].
        Dispatch {
            /// Number of experts.
            experts: usize,
            /// Whether an id may be −1: a choice that is not served here, whose slot is −1.
            partial: bool,
        },
        /// `ids i32[T, k], weights f32[T, k] → i32[T, k], f32[T, 1]`: choices of the `zero` experts after the
        /// first `experts`, which give a row back as it is, become −1; the sum of their weights.
        ZeroExperts {
            /// Experts that compute.
            experts: usize,
            /// Experts that do not, numbered after them.
            zero: usize,
        },
        /// `dispatch, scores f32[T, E], scores of the next layers f32[T, E'], … → dispatch`: the same table.
        /// Where experts stay on disk, their executor reads the experts that the table names, and those that
        /// the next layers will probably choose. The further scores are those of the next layers' gates,
        /// applied to the hidden state of this layer (HybriMoE, §IV-C).
        RequestExperts {
            /// Layer, counted over those with routed experts.
            layer: usize,
            /// Operands of scores, 1 to [`MAX_REQUEST_SCORES`].
            scores: usize,
        },
        /// `ids i32[T, k], added f32[T, C], pos i32[T] → i32[T, k], i32[T, k]`: the choices within fixed
        /// capacities, and the choices that are served elsewhere; −1 marks the others. An expert keeps the
        /// rows of the highest L2 norm of `added`, the output of attention; of equal ones the lowest (NPUMoE,
        /// §3.2 and §4.1).
        LimitCapacity(desc: LimitCapacityDesc),
        /// `x[T, H], dispatch, @gate_up[E, 2I, H], @down[E, H, I], @gate_up_bias[E, 2I]?, @down_bias[E, H]? →
        /// f32[T·k, H]`, one row per (token, expert) slot, in dispatch order. Experts without a gate have
        /// `@gate_up[E, I, H]`.
        ExpertFfn {
            /// Function that joins gate and up.
            glu: Glu,
            /// Whether both biases are there.
            bias: bool,
            /// Whether static graphs compute it, group by group, with at most its capacity of rows for each
            /// expert.
            fixed: bool,
        },
        /// `x[T, H], dispatch, @neurons[E, I, 3H] → f32[T·k, H]`: experts by neurons (PowerInfer-2, §4.4).
        /// Row `i` of expert `e` is a neuron's bundle: its row of gate, its row of up, its column of down.
        ///
        /// The result of [`Op::ExpertFfn`] for the same matrices, except that a neuron whose gate is 0 adds
        /// nothing, even if up or down is NaN. Neurons may be in any order: sums over them differ by rounding
        /// alone.
        NeuronFfn {
            /// Function that joins gate and up: one that [skips](Glu::skips).
            glu: Glu,
            /// Index of the layer among those whose up and down stay on disk; `None`: they are resident. The
            /// weights are then `@gates[E, I, H], @up_down[E, I, 2H]`, unless gates stay on disk, too.
            paged: Option<usize>,
            /// Whether gates stay on disk, too: a predictor names those that are read (PowerInfer-2, §4.3), and
            /// without one all are read. The weights are those of neurons in memory.
            gates_on_disk: bool,
            /// Number of hot neurons, the first ones of each expert, that another unit computes: they add
            /// nothing here. Only where up and down stay on disk; neurons in memory are a slice instead.
            hot: Option<usize>,
            /// Predictor that is evaluated before a gate; none if gates alone are in memory. Its weights follow
            /// `@neurons`. A neuron with a prediction of 0 or less adds nothing, whatever its gate is.
            predict: Option<Predictor>,
        },
        /// `y[T·k, H], dispatch, weights f32[T, k] → f32[T, H]`: the weighted sum of each token's slots. Rows
        /// past those that the table counts are padding.
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
            /// Bound that no result reaches.
            cap: f32,
        },
        /// `x → factor · x`
        Scale {
            /// The factor.
            factor: f32,
        },
        /// `x[T, C], @w[C] → x · w`, per channel.
        ScaleCols,
        /// `x[T, C], pos i32[T] → x · (1 + beta · ln(1 + ⌊(pos + offset) / every⌋))`: the temperature of long
        /// contexts, on queries (Llama 4). Padding rows are of position 0.
        ScaleByPosition {
            /// Slope over the logarithm.
            beta: f32,
            /// Positions that share a factor.
            every: usize,
            /// Added to the position.
            offset: usize,
        },
        /// `x → min(max(x, lo), hi)`
        Clamp {
            /// Lower bound.
            lo: f32,
            /// Upper bound.
            hi: f32,
        },
        /// `x → act(x)`
        Act(act: Activation),
        /// `g, u → glu(g, u)`
        Glu(glu: Glu),
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
}

/// Kind of an operand slot of an operator.
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

/// Effect of an operator on the state that is its first operand.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Effect {
    /// It has no state, or reads what it has.
    None,
    /// It writes the state: its result is the state, changed in place.
    Writes,
    /// It reads the state and changes it: its results are values.
    Updates,
}

impl Op {
    /// Names of the operators that are matrix products of whole rows: what parts of a model are made of.
    pub const MATRICES: [&str; 3] = ["attention", "linear", "linear_glu"];

    /// Mnemonic in the text form.
    pub fn name(&self) -> &'static str {
        each!(self, op => op.name())
    }

    /// Operand kinds in order. [`Op::Concat`] takes two or more values; its signature gives two.
    /// [`Self::accepts_operands`] tells whether a number of operands is valid.
    pub fn signature(&self) -> Vec<Kind> {
        each!(self, op => op.signature())
    }

    /// Whether this number of operands is valid.
    pub fn accepts_operands(&self, operands: usize) -> bool {
        let n = self.signature().len();
        operands == n || (operands > n && each!(self, op => op.takes_more()))
    }

    /// Effect on the state that is the first operand.
    pub fn effect(&self) -> Effect {
        each!(self, op => op.effect())
    }

    /// Whether its states may be of a kind.
    pub fn takes_state(&self, kind: StateKind) -> bool {
        each!(self, op => op.takes_state(kind))
    }

    /// The routing, of a router.
    pub fn router(&self) -> Option<&RouterDesc> {
        match self {
            Self::Router(desc) => Some(desc),
            _ => None,
        }
    }

    /// Whether it looks rows up in a table.
    pub fn is_embedding(&self) -> bool {
        matches!(self, Self::Embed)
    }

    /// Function that joins gate and up, of experts that are computed by their whole matrices.
    pub fn expert_ffn(&self) -> Option<Glu> {
        match *self {
            Self::ExpertFfn { glu, .. } => Some(glu),
            _ => None,
        }
    }

    /// Function that joins gate and up, of experts whose neurons are read from disk.
    pub fn paged_neurons(&self) -> Option<Glu> {
        match *self {
            Self::NeuronFfn { glu, paged: Some(_), .. } => Some(glu),
            _ => None,
        }
    }

    /// Whether neurons are read from disk while it runs.
    pub fn pages_neurons(&self) -> bool {
        self.paged_neurons().is_some()
    }

    /// Whether experts, or neurons of them, are read from disk while it runs.
    pub fn reads_disk(&self) -> bool {
        matches!(self, Self::RequestExperts { .. }) || self.pages_neurons()
    }

    /// Result types for operand types in the order of [`Op::signature`]. Weights count as `f32` of
    /// their shape, states by their declared type.
    ///
    /// # Errors
    /// A wrong number of operands, a wrong element type or shape, or attributes out of range.
    pub fn infer(&self, operands: &[&Type]) -> Result<Vec<Type>, TypeError> {
        let o = Operands { op: self.name(), types: operands };
        o.require(self.accepts_operands(operands.len()), || {
            format!("{} operands, expected {}", operands.len(), self.signature().len())
        })?;
        if let Some(empty) = operands.iter().find(|t| t.shape.contains(&0)) {
            return Err(o.error(format!("operand of type {empty} is empty")));
        }
        each!(self, op => op.infer(&o))
    }

    /// Multiply-adds of a row with the states of its sequence, of which it sees `context` positions; 0 without
    /// states. `state` is the type of the first of them.
    pub fn multiply_adds(&self, state: &Type, context: f64) -> f64 {
        each!(self, op => op.multiply_adds(state, context))
    }

    pub(crate) fn eval(&self, a: &Args<'_>) -> Evaluated {
        each!(self, op => op.eval(a))
    }

    pub(crate) fn write(&self, w: &mut Writer) {
        each!(self, op => op.write(w));
    }
}

/// The one result of an operator.
fn one(out: Vec<f32>) -> Vec<Data> {
    vec![Data::F32(out)]
}
