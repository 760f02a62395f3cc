//! The kernels that can be asked for: parameters, symbol, work grid, scratch and weight layout.
//!
//! Every kernel is `void symbol(ptr args, i64 n, i64 begin, i64 end, ptr scratch)`: `args[i]` is the
//! address of operand `i` in the order that the variant documents, `n` the number of valid rows,
//! `begin .. end` the work items of [`KernelSpec::grid`] to do. Activations are f32; `ld` is the distance
//! from row to row, in elements. Results do not depend on how work items are split.
#![expect(clippy::cast_possible_truncation, reason = "kernels: lanes, tiles and strides of one matrix")]

mod facts;
pub mod schedule;
mod symbol;

use moec_ir::op::{Activation, AttentionDesc, DispatchLayout, Glu, RopeStyle, RouterDesc};
use moec_ir::types::{Format, GROUP};
use schedule::Schedule;

pub use crate::kernels::recurrence::{CausalConv, DeltaRule, Recurrence, SelectiveScan};
pub(crate) use facts::panels;
pub(crate) use symbol::Symbol;

/// Which norm.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum NormKind {
    /// `x / sqrt(mean(x²) + eps) · weight`
    Rms,
    /// `(x − mean) / sqrt(var + eps) · weight + bias`
    Layer,
}

/// In what form a matrix kernel multiplies.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Compute {
    /// Rows and weights as f32: exact up to the order of summation.
    #[default]
    F32,
    /// Rows rounded to bf16, products of pairs summed in f32.
    Bf16,
    /// Rows as bytes in groups of 32 with an f32 scale each, products summed as integers within a group.
    I8,
}

impl Compute {
    /// Every one.
    pub const ALL: [Self; 3] = [Self::F32, Self::Bf16, Self::I8];

    /// Name in symbols and in `model.toml`.
    pub const fn name(self) -> &'static str {
        match self {
            Self::F32 => "f32",
            Self::Bf16 => "bf16",
            Self::I8 => "i8",
        }
    }

    /// The one of that name.
    pub fn parse(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|c| c.name() == name)
    }
}

/// Words of 32 bits that a row of `cols` numbers takes in the form that `compute` multiplies.
///
/// bf16: one word per pair. Bytes: for every group of 32 its codes, the scale (f32) and `−128 · Σ codes`
/// (i32), ten words; absent codes are zero.
pub const fn packed_words(cols: usize, compute: Compute) -> usize {
    match compute {
        Compute::F32 => cols,
        Compute::Bf16 => cols.div_ceil(2),
        Compute::I8 => cols.div_ceil(GROUP) * 10,
    }
}

/// Words from one row to the next where rows of `words` words are to be multiplied by a matrix: whole cache lines, and an
/// odd number of them. Rows that meet the same weights then lie in different sets of a cache, whatever the model's extents,
/// which are powers of two too often. Short rows are left as they are.
pub const fn apart(words: usize) -> usize {
    const LINE: usize = 16;
    const SHORT: usize = 128;
    if words < SHORT { words } else { (words.div_ceil(LINE) | 1) * LINE }
}

/// Rows in a form that a kernel multiplies.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct RowForm {
    /// The form.
    pub form: Compute,
    /// Words from row to row.
    pub ld: usize,
}

impl RowForm {
    /// Plain numbers, `ld` words from row to row.
    pub const fn f32(ld: usize) -> Self {
        Self { form: Compute::F32, ld }
    }
}

/// A root mean square norm of rows where they are read, as [`KernelSpec::Norm`] computes it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RowNorm {
    /// Channels normalised together: those of a head, or of a row.
    pub width: usize,
    /// Added to the mean square.
    pub eps: f32,
    /// Whether the weight is there, f32 `[width]`.
    pub weight: bool,
}

/// A rotation of heads where they are read, as [`KernelSpec::Rope`] computes it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Rotation {
    /// Rotated channels of a head, even.
    pub rotary: usize,
    /// First rotated channel of a head.
    pub offset: usize,
    /// Pairing.
    pub style: RopeStyle,
    /// Row distance of the angles.
    pub angles_ld: usize,
}

/// What [`KernelSpec::Map`] computes from `a` and perhaps a second operand `b`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum MapOp {
    /// `a + b`; with `broadcast_b`, `b` has one column.
    Add {
        /// Row distance of `b`.
        b_ld: usize,
        /// Whether `b` has a single column.
        broadcast_b: bool,
    },
    /// `a · b`; with `broadcast_b`, `b` has one column.
    Mul {
        /// Row distance of `b`.
        b_ld: usize,
        /// Whether `b` has a single column.
        broadcast_b: bool,
    },
    /// `a · b`, one `b` for every head of `a`.
    MulHeads {
        /// Heads.
        heads: usize,
        /// Row distance of `b`.
        b_ld: usize,
    },
    /// `glu(a, b)`.
    Glu {
        /// How they join.
        glu: Glu,
        /// Row distance of `b`.
        b_ld: usize,
    },
    /// `a · b` with one `b` per channel, f32.
    ScaleCols,
    /// `factor · a`
    Scale {
        /// The factor.
        factor: f32,
    },
    /// `min(max(a, lo), hi)`
    Clamp {
        /// Lower bound.
        lo: f32,
        /// Upper bound.
        hi: f32,
    },
    /// `cap · tanh(a / cap)`
    SoftCap {
        /// What no result reaches.
        cap: f32,
    },
    /// `a · (1 + beta · ln(1 + ⌊(b + offset) / every⌋))` with one position `b`, i32, per row; 0 where it is negative.
    ScaleByPosition {
        /// Slope over the logarithm.
        beta: f32,
        /// Positions that share a factor.
        every: usize,
        /// Added to the position.
        offset: usize,
    },
    /// `act(a)`
    Act(Activation),
    /// `ln(1 + e^a)`
    Softplus,
}

/// How the matrices of experts lie.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum WeightOrder {
    /// In panels, gate and up apart from down.
    #[default]
    Panels,
    /// Neuron by neuron ([`Layout::Neurons`](moec_ir::plan::Layout)): panels are written to scratch.
    Neurons {
        /// Whether bundles begin with a sketch.
        sketch: bool,
    },
    /// Gates in rows ([`Layout::Gates`](moec_ir::plan::Layout)), up and down of every neuron anywhere: panels are written to
    /// scratch.
    Apart,
}

impl WeightOrder {
    /// Whether bundles begin with a sketch.
    pub(crate) const fn sketch(self) -> bool {
        matches!(self, Self::Neurons { sketch: true })
    }
}

/// A kernel with every parameter baked in. `?` marks operands that are absent when the flag is off.
#[derive(Clone, Debug, PartialEq)]
pub enum KernelSpec {
    /// `[ids i32, table, out]`: rows of the table, as f32. Ids must be in `0 .. vocab`.
    Embed {
        /// Rows of the table.
        vocab: usize,
        /// Columns.
        hidden: usize,
        /// Format of the table.
        format: Format,
        /// Whether the table is stored in panels, as a head that shares it multiplies by it; otherwise row by row.
        panels: bool,
        /// Row distance of `out`.
        out_ld: usize,
    },
    /// `[x, weight?, bias (Layer only), out, …]`: one result per form. A single result of f32 may be `x`.
    Norm {
        /// Which norm.
        kind: NormKind,
        /// Channels normalised together.
        width: usize,
        /// Segments of `width` channels per row; they share the weight.
        groups: usize,
        /// Row distance of `x`.
        x_ld: usize,
        /// Forms of the results; each segment is packed by itself.
        outs: Vec<RowForm>,
        /// Added to the mean square or the variance.
        eps: f32,
        /// Whether the weight is there, f32 `[width]`.
        weight: bool,
    },
    /// `[x, out]`: rows in the form that a matrix kernel multiplies, [`packed_words`] per group.
    Quantise {
        /// Columns of a group.
        cols: usize,
        /// Groups of a row, each packed by itself.
        groups: usize,
        /// Rows of `x` per valid row (slots per token).
        per_row: usize,
        /// Row distance of `x`.
        x_ld: usize,
        /// Row distance of `out`, in words.
        out_ld: usize,
        /// The form.
        to: Compute,
    },
    /// `[x, w, bias? f32 [n], residual?, out]`: `x · wᵀ`. `out` may be `residual`. `x` is packed as
    /// `compute` says, and so is `x_ld` counted, in words.
    ///
    /// With `groups > 1` group `g` reads columns `g·k ..` of `x` and writes columns `g·n ..` of `out`.
    /// With `glu`, `n` is `2I`: gate (first I) and up (last I) join, and `out` has I columns.
    Linear {
        /// Input channels (per group).
        k: usize,
        /// Rows of the weight (per group).
        n: usize,
        /// Format of the weight.
        format: Format,
        /// How it multiplies.
        compute: Compute,
        /// Matrices, each with its own range of columns.
        groups: usize,
        /// Row distance of `x`.
        x_ld: usize,
        /// Row distance of `out`.
        out_ld: usize,
        /// Whether the bias is there.
        bias: bool,
        /// Row distance of the residual, if one is added. Not together with `glu`.
        residual_ld: Option<usize>,
        /// Gated epilogue.
        glu: Option<Glu>,
        /// How it cuts its work.
        schedule: Schedule,
    },
    /// `[x, norm weight?, angles (cos[rotary/2], sin[rotary/2] per row), out]`: heads normalised, if so, and rotated.
    /// Without a norm `out` may be `x`.
    Rope {
        /// Heads.
        heads: usize,
        /// Channels of a head.
        dim: usize,
        /// The norm before.
        norm: Option<RowNorm>,
        /// The rotation.
        rotation: Rotation,
        /// Row distance of `x`.
        x_ld: usize,
        /// Row distance of `out`.
        out_ld: usize,
    },
    /// `[state, x, norm weight?, angles?, pos i32, slot i32]`: rows into a KV-cache tensor, ordered as [`crate::key_order`]
    /// or [`crate::value_order`] says, normalised and rotated before, if so. Rows with a position outside of `0 .. ctx` are
    /// skipped; in a ring those below 0 alone, and position `p` goes to row `p mod ctx`.
    CacheWrite {
        /// Heads.
        heads: usize,
        /// Channels of a head.
        dim: usize,
        /// Tokens of the state.
        ctx: usize,
        /// Whether the state is a ring of whole blocks ([`CACHE_BLOCK`](crate::CACHE_BLOCK)).
        ring: bool,
        /// Format of the state.
        cache: Format,
        /// Whether they are values, not keys.
        values: bool,
        /// The norm before.
        norm: Option<RowNorm>,
        /// The rotation before.
        rotation: Option<Rotation>,
        /// Heads of a work item: all of them, or a divisor of their number.
        each: usize,
        /// Row distance of `x`.
        x_ld: usize,
    },
    /// `[q, k_state, v_state?, pos i32, slot i32, sinks? f32 [heads], out]`. States are ordered as
    /// [`crate::key_order`] and [`crate::value_order`] say; `v_state` is absent with `v_from_k`. `pos < 0`: zeros. With a
    /// window, position `p` is row `p mod ctx` of states of whole blocks, and of no other state past `ctx`.
    ///
    /// With `splits > 1` the tokens of the cache are cut into so many parts, `sinks` is absent, and `out` is
    /// what [`KernelSpec::AttentionMerge`] reads.
    Attention {
        /// Heads, dimensions, scale, window, sinks.
        desc: AttentionDesc,
        /// Format of the states.
        cache: Format,
        /// Form of queries and weights.
        compute: Compute,
        /// Tokens of the states.
        ctx: usize,
        /// Token rows per work item.
        rows: usize,
        /// Parts that the tokens of the cache are cut into.
        splits: usize,
        /// Row distance of `q`.
        q_ld: usize,
        /// Row distance of `out`.
        out_ld: usize,
    },
    /// `[parts f32 [T, heads, splits, 2 + v_dim], sinks? f32 [heads], out]`: parts of attention joined. A part
    /// is its maximum (of scores times log2 e), its sum, and its sum of values.
    AttentionMerge {
        /// Query heads.
        heads: usize,
        /// Channels of a head's result.
        v_dim: usize,
        /// Parts.
        splits: usize,
        /// Whether the sinks are there.
        sinks: bool,
        /// Row distance of `out`.
        out_ld: usize,
    },
    /// `[logits, select_bias? f32 [E], ids out i32 [T, k], weights out f32 [T, k]]`.
    Router {
        /// The routing.
        desc: RouterDesc,
        /// Row distance of the logits.
        logits_ld: usize,
    },
    /// `[x, dispatch i32, w (addresses [E] of GluPanels, of Panels without a gate), bias? f32 [E, 2I], h out [slots, I]]`: the gathered rows
    /// of each active expert through gate and up. With [`WeightOrder::Apart`] the `E` addresses are those of gates, and
    /// `E·I` addresses of up and down stand behind them; [`KernelSpec::ExpertDown`] has these alone.
    ExpertGateUp {
        /// Layout of the dispatch table.
        layout: DispatchLayout,
        /// Input channels.
        hidden: usize,
        /// Output channels `I`.
        inter: usize,
        /// Format of the weight.
        format: Format,
        /// How it multiplies; `x` is packed accordingly.
        compute: Compute,
        /// Row distance of `x`.
        x_ld: usize,
        /// How gate and up join.
        glu: Glu,
        /// Whether the bias is there.
        bias: bool,
        /// Form of the result: f32 or bf16.
        out: RowForm,
        /// How the weight lies.
        order: WeightOrder,
        /// How it cuts its work.
        schedule: Schedule,
    },
    /// `[h [slots, I], dispatch i32, w (addresses [E] of Panels), bias? f32 [E, H], y out f32 [slots, H]]`.
    ExpertDown {
        /// Layout of the dispatch table.
        layout: DispatchLayout,
        /// Input channels `I`.
        inter: usize,
        /// Output channels `H`.
        hidden: usize,
        /// Format of the weight.
        format: Format,
        /// How it multiplies; `h` is packed accordingly.
        compute: Compute,
        /// Row distance of `h`, in words.
        h_ld: usize,
        /// Whether the bias is there.
        bias: bool,
        /// How the weight lies.
        order: WeightOrder,
        /// How it cuts its work.
        schedule: Schedule,
    },
    /// `[x, dispatch i32, w (addresses [E] of Neurons), h out f32 [slots, I], awake out i32]`: the neurons that the rows of
    /// each active expert wake, in lists of [`awake_words`], and what these give; of the others `h` holds anything. For few
    /// rows: they are not cut.
    NeuronUp {
        /// Layout of the dispatch table.
        layout: DispatchLayout,
        /// Input channels.
        hidden: usize,
        /// Neurons `I`.
        inter: usize,
        /// Format of the weight.
        format: Format,
        /// Form of `x`: f32, or bytes where [`crate::neurons_meet`] says so.
        compute: Compute,
        /// Whether there are sketches, which are read first.
        sketch: bool,
        /// Whether `h` holds what [`KernelSpec::NeuronPredict`] says: neurons that it takes to be asleep are passed over, row by
        /// row. Sketches are not read then.
        predicted: bool,
        /// Row distance of `x`, in words.
        x_ld: usize,
        /// How gate and up join.
        glu: Glu,
    },
    /// `[x f32, dispatch i32, right (addresses [E] of Gates)?, left or codes (addresses [E] of Gates), margin (addresses [E] of Gates),
    /// h out f32 [slots, I]]`: what a predictor ([`moec_ir::Predictor`]) says of every neuron of the experts that rows chose:
    /// above 0 where it takes one to be awake.
    NeuronPredict {
        /// Layout of the dispatch table.
        layout: DispatchLayout,
        /// Input channels.
        hidden: usize,
        /// Neurons `I`.
        inter: usize,
        /// Rows of `right`, if there is one.
        rank: Option<usize>,
        /// Format of `right`, `left` and codes; margins are f32.
        format: Format,
        /// Row distance of `x`, in words.
        x_ld: usize,
    },
    /// `[h f32 [slots, I], dispatch i32, w (addresses [E] of Neurons), awake i32, y out f32 [slots, H]]`: the columns of down of
    /// the neurons that [`KernelSpec::NeuronUp`] found awake.
    NeuronDown {
        /// Layout of the dispatch table.
        layout: DispatchLayout,
        /// Output channels.
        hidden: usize,
        /// Neurons `I`.
        inter: usize,
        /// Format of the weight.
        format: Format,
        /// Whether there are sketches.
        sketch: bool,
    },
    /// `[x, dispatch i32, w (addresses [E] of Gates), h out f32 [slots, I], awake out i32]`: as [`KernelSpec::NeuronUp`], but
    /// up to the gates alone: of who is awake `h` holds what the gate gives.
    NeuronGate {
        /// Layout of the dispatch table.
        layout: DispatchLayout,
        /// Input channels.
        hidden: usize,
        /// Neurons `I`.
        inter: usize,
        /// Format of the weight.
        format: Format,
        /// Form of `x`, as of [`KernelSpec::NeuronUp`].
        compute: Compute,
        /// Row distance of `x`, in words.
        x_ld: usize,
        /// How gate and up join.
        glu: Glu,
    },
    /// `[x, dispatch i32, w (addresses [E·I] of Rests), h in and out f32 [slots, I], awake i32]`: up of the neurons that
    /// [`KernelSpec::NeuronGate`] found awake, wherever they lie, joined with their gates in `h`.
    NeuronUpAt {
        /// Layout of the dispatch table.
        layout: DispatchLayout,
        /// Input channels.
        hidden: usize,
        /// Neurons `I`.
        inter: usize,
        /// Format of the weight.
        format: Format,
        /// Form of `x`, as of [`KernelSpec::NeuronUp`].
        compute: Compute,
        /// Row distance of `x`, in words.
        x_ld: usize,
        /// How gate and up join.
        glu: Glu,
    },
    /// `[h f32 [slots, I], dispatch i32, w (addresses [E·I] of Rests), awake i32, y out f32 [slots, H]]`: as
    /// [`KernelSpec::NeuronDown`], of neurons that lie anywhere.
    NeuronDownAt {
        /// Layout of the dispatch table.
        layout: DispatchLayout,
        /// Output channels.
        hidden: usize,
        /// Neurons `I`.
        inter: usize,
        /// Format of the weight.
        format: Format,
    },
    /// `[y f32 [slots, H], dispatch i32, weights f32 [T, k], residual?, out]`: the weighted sum of each
    /// token's slots, to which the residual is added last: the bits of a sum and of an addition. `out` may be `residual`.
    Combine {
        /// Layout of the dispatch table.
        layout: DispatchLayout,
        /// Channels.
        hidden: usize,
        /// Row distance of `out`.
        out_ld: usize,
        /// Row distance of the residual, if there.
        residual_ld: Option<usize>,
        /// Whether a slot may be −1: its choice adds nothing.
        partial: bool,
    },
    /// `[a, b?, out]`, element by element; `out` may be an operand of the same row distance.
    Map {
        /// The function.
        op: MapOp,
        /// Columns.
        cols: usize,
        /// Row distance of `a`.
        a_ld: usize,
        /// Row distance of `out`.
        out_ld: usize,
    },
    /// `[in, out]`: columns `g·in_group ..+ cols` to columns `g·out_group ..+ cols`, for each group: what
    /// slicing and joining whole rows (one group) or heads take.
    Copy {
        /// Groups (heads).
        groups: usize,
        /// Columns copied per group.
        cols: usize,
        /// Columns from group to group of `in`.
        in_group: usize,
        /// Columns from group to group of `out`.
        out_group: usize,
        /// Row distance of `in`.
        in_ld: usize,
        /// Row distance of `out`.
        out_ld: usize,
    },
    /// `[x, out]`: softmax over the columns; `out` may be `x`.
    Softmax {
        /// Columns.
        cols: usize,
        /// Row distance of `x`.
        x_ld: usize,
        /// Row distance of `out`.
        out_ld: usize,
    },
    /// `[x, rows i32, out]`: row `rows[r]` of `x`, or zeros where that is negative.
    GatherRows {
        /// Columns.
        cols: usize,
        /// Row distance of `x`.
        x_ld: usize,
        /// Row distance of `out`.
        out_ld: usize,
    },
    /// `[ids i32, weights, ids i32, sum]`: choices of the `zero` experts after the first `experts` as −1, and the sum of their weights.
    ZeroExperts {
        /// Experts that compute.
        experts: usize,
        /// Experts that do not, numbered after them.
        zero: usize,
        /// Choices of a row.
        k: usize,
    },
    /// Rows that change the state that the next one reads.
    Recurrence(Recurrence),
}

/// Neurons of a work item of [`KernelSpec::NeuronUp`].
pub(crate) const NEURONS: usize = moec_ir::bundle::BLOCK;

/// Columns of a work item of [`KernelSpec::NeuronDown`]: rows so long that memory is read on and on, and yet two items and more
/// for an expert. Their sums stay in the first-level cache.
pub(crate) const NEURON_COLUMNS: usize = 1024;

pub use moec_ir::bundle::awake_words;

/// Rows per work item of kernels whose rows are independent and cheap.
pub(crate) const ROWS: usize = 4;
/// Rows per work item of [`KernelSpec::CacheWrite`]: as many tokens as are stored together, at most.
pub(crate) const CACHE_ROWS: usize = 16;
/// Rows per work item of [`KernelSpec::Embed`].
pub(crate) const EMBED_ROWS: usize = 8;
