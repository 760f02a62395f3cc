//! The kernels that can be asked for: parameters, symbol, work grid, scratch and weight layout.
//!
//! Every kernel is `void symbol(ptr args, i64 n, i64 begin, i64 end, ptr scratch)`: `args[i]` is the
//! address of operand `i` in the order that the variant documents, `n` the number of valid rows,
//! `begin .. end` the work items of [`KernelSpec::grid`] to do. Activations are f32; `ld` is the distance
//! from row to row, in elements. Results do not depend on how work items are split.

use crate::machine::Isa;
use crate::schedule::Schedule;
use moec_ir::op::{
    Activation, AttentionDesc, DispatchLayout, Glu, GroupScore, Renorm, RopeStyle, RouterDesc, Score,
    WeightFrom,
};
use moec_ir::plan::{Grid, Layout};
use moec_ir::types::{Format, GROUP};
use std::fmt::Write as _;

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
    /// `act(a)`
    Act(Activation),
}

/// A kernel with every parameter baked in. `?` marks operands that are absent when the flag is off.
#[derive(Clone, Debug, PartialEq)]
pub enum KernelSpec {
    /// `[ids i32, table (Layout::Rows), out]`: rows of the table. Ids must be in `0 .. vocab`.
    Embed {
        /// Rows of the table.
        vocab: usize,
        /// Columns.
        hidden: usize,
        /// Format of the table.
        format: Format,
        /// Row distance of `out`.
        out_ld: usize,
    },
    /// `[x, weight?, bias (Layer only), out]`; `out` may be `x`.
    Norm {
        /// Which norm.
        kind: NormKind,
        /// Channels normalised together.
        width: usize,
        /// Segments of `width` channels per row; they share the weight.
        groups: usize,
        /// Row distance of `x`.
        x_ld: usize,
        /// Row distance of `out`.
        out_ld: usize,
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
    /// `[x, angles (cos[rotary/2], sin[rotary/2] per row), out]`; `out` may be `x`.
    Rope {
        /// Heads.
        heads: usize,
        /// Channels of a head.
        dim: usize,
        /// Rotated channels of a head, even.
        rotary: usize,
        /// First rotated channel of a head.
        offset: usize,
        /// Pairing.
        style: RopeStyle,
        /// Row distance of `x`.
        x_ld: usize,
        /// Row distance of `out`.
        out_ld: usize,
        /// Row distance of `angles`.
        angles_ld: usize,
    },
    /// `[state, x, pos i32, slot i32]`: rows into a KV-cache tensor, ordered as [`crate::key_order`] or
    /// [`crate::value_order`] says. Rows with a position outside of `0 .. ctx` are skipped.
    CacheWrite {
        /// Heads.
        heads: usize,
        /// Channels of a head.
        dim: usize,
        /// Tokens of the state.
        ctx: usize,
        /// Format of the state.
        cache: Format,
        /// Whether they are values, not keys.
        values: bool,
        /// Row distance of `x`.
        x_ld: usize,
    },
    /// `[q, k_state, v_state?, pos i32, slot i32, sinks? f32 [heads], out]`. States are ordered as
    /// [`crate::key_order`] and [`crate::value_order`] say; `v_state` is absent with `v_from_k`. `pos < 0`: zeros.
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
    /// `[x, dispatch i32, w (addresses [E] of GluPanels), bias? f32 [E, 2I], h out f32 [slots, I]]`: the gathered rows
    /// of each active expert through gate and up.
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
        /// How it cuts its work.
        schedule: Schedule,
    },
    /// `[h f32 [slots, I], dispatch i32, w (addresses [E] of Panels), bias? f32 [E, H], y out f32 [slots, H]]`.
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
        /// Whether the bias is there.
        bias: bool,
        /// How it cuts its work.
        schedule: Schedule,
    },
    /// `[y f32 [slots, H], dispatch i32, weights f32 [T, k], residual?, out]`: the weighted sum of each
    /// token's slots, on top of the residual. `out` may be `residual`.
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
}

/// Rows per work item of kernels whose rows are independent and cheap.
pub(crate) const ROWS: usize = 4;
/// Rows per work item of [`KernelSpec::Embed`].
pub(crate) const EMBED_ROWS: usize = 8;

impl KernelSpec {
    /// Symbol: readable, and equal exactly for equal parameters (on the same [`Isa`]).
    pub fn symbol(&self, isa: &Isa) -> String {
        let mut s = Symbol("moec".to_string());
        match self {
            Self::Embed { vocab, hidden, format, out_ld } => {
                s.word("embed").num("v", *vocab).num("h", *hidden).word(format.name()).num("o", *out_ld);
            }
            Self::Norm { kind, width, groups, x_ld, out_ld, eps, weight } => {
                s.word(match kind {
                    NormKind::Rms => "rms_norm",
                    NormKind::Layer => "layer_norm",
                });
                s.num("c", *width).num("g", *groups).num("x", *x_ld).num("o", *out_ld).float("eps", *eps);
                s.flag("weight", *weight);
            }
            Self::Quantise { cols, groups, per_row, x_ld, to } => {
                s.word("quantise").num("c", *cols).num("g", *groups).num("r", *per_row).num("x", *x_ld);
                s.word(to.name());
            }
            Self::Linear {
                k,
                n,
                format,
                compute,
                groups,
                x_ld,
                out_ld,
                bias,
                residual_ld,
                glu,
                schedule,
            } => {
                s.word("linear").num("k", *k).num("n", *n).word(format.name()).num("p", isa.nr);
                s.compute(*compute);
                s.num("g", *groups).num("x", *x_ld).num("o", *out_ld).flag("bias", *bias);
                s.option("r", *residual_ld);
                if let Some(glu) = glu {
                    s.glu(*glu);
                }
                s.schedule(schedule);
            }
            Self::Rope { heads, dim, rotary, offset, style, x_ld, out_ld, angles_ld } => {
                s.word("rope").word(match style {
                    RopeStyle::Half => "half",
                    RopeStyle::Interleaved => "interleaved",
                });
                s.num("h", *heads).num("d", *dim).num("r", *rotary).num("at", *offset);
                s.num("x", *x_ld).num("o", *out_ld).num("a", *angles_ld);
            }
            Self::CacheWrite { heads, dim, ctx, cache, values, x_ld } => {
                s.word("cache_write").word(if *values { "values" } else { "keys" }).word(cache.name());
                s.num("p", isa.nr).num("h", *heads).num("d", *dim).num("ctx", *ctx).num("x", *x_ld);
            }
            Self::Attention { desc, cache, compute, ctx, rows, splits, q_ld, out_ld } => {
                s.word("attention").num("h", desc.heads).num("kv", desc.kv_heads).num("d", desc.qk_dim);
                s.num("v", desc.v_dim).float("s", desc.scale).option("w", desc.window);
                s.flag("sinks", desc.sinks).flag("latent", desc.v_from_k);
                s.word(cache.name()).word(compute.name()).num("p", isa.nr).num("r", *rows).num("n", *splits);
                s.num("q", *q_ld).num("o", *out_ld).num("ctx", *ctx);
            }
            Self::AttentionMerge { heads, v_dim, splits, sinks, out_ld } => {
                s.word("attention_merge").num("h", *heads).num("v", *v_dim).num("n", *splits);
                s.flag("sinks", *sinks).num("o", *out_ld);
            }
            Self::Router { desc, logits_ld } => s.router(desc, *logits_ld),
            Self::ExpertGateUp { layout, hidden, inter, format, compute, x_ld, glu, bias, schedule } => {
                s.word("expert_gate_up").layout(*layout).num("h", *hidden).num("i", *inter);
                s.word(format.name())
                    .compute(*compute)
                    .num("p", isa.nr)
                    .num("x", *x_ld)
                    .flag("bias", *bias)
                    .glu(*glu)
                    .schedule(schedule);
            }
            Self::ExpertDown { layout, inter, hidden, format, compute, bias, schedule } => {
                s.word("expert_down").layout(*layout).num("i", *inter).num("h", *hidden);
                s.word(format.name()).compute(*compute).num("p", isa.nr).flag("bias", *bias);
                s.schedule(schedule);
            }
            Self::Combine { layout, hidden, out_ld, residual_ld, partial } => {
                s.word("combine").layout(*layout).num("h", *hidden).num("o", *out_ld);
                s.option("r", *residual_ld).flag("partial", *partial);
            }
            Self::Map { op, cols, a_ld, out_ld } => {
                s.map(*op);
                s.num("c", *cols).num("a", *a_ld).num("o", *out_ld);
            }
            Self::Copy { groups, cols, in_group, out_group, in_ld, out_ld } => {
                s.word("copy").num("g", *groups).num("c", *cols).num("ig", *in_group).num("og", *out_group);
                s.num("i", *in_ld).num("o", *out_ld);
            }
            Self::Softmax { cols, x_ld, out_ld } => {
                s.word("softmax").num("c", *cols).num("x", *x_ld).num("o", *out_ld);
            }
            Self::GatherRows { cols, x_ld, out_ld } => {
                s.word("gather_rows").num("c", *cols).num("x", *x_ld).num("o", *out_ld);
            }
        }
        s.0
    }

    /// Work items.
    pub fn grid(&self, isa: &Isa) -> Grid {
        let tiles = |rows: usize, tiles: usize| Grid::Tiles { rows: rows as u32, tiles: tiles as u32 };
        match self {
            Self::Embed { .. } => tiles(EMBED_ROWS, 1),
            Self::Linear { n, groups, glu, schedule, .. } => {
                tiles(schedule.rows, groups * panels(isa, *n, glu.is_some()))
            }
            Self::Attention { desc, rows, splits, .. } => tiles(*rows, desc.kv_heads * splits),
            Self::AttentionMerge { heads, .. } => tiles(1, *heads),
            Self::ExpertGateUp { inter, .. } => {
                Grid::Experts { table: 1, tiles: panels(isa, 2 * inter, true) as u32 }
            }
            Self::ExpertDown { hidden, .. } => {
                Grid::Experts { table: 1, tiles: panels(isa, *hidden, false) as u32 }
            }
            Self::Norm { .. }
            | Self::Quantise { .. }
            | Self::Rope { .. }
            | Self::CacheWrite { .. }
            | Self::Router { .. }
            | Self::Combine { .. }
            | Self::Map { .. }
            | Self::Copy { .. }
            | Self::Softmax { .. }
            | Self::GatherRows { .. } => tiles(ROWS, 1),
        }
    }

    /// Bytes of scratch that one thread needs; the scratch must be aligned to 64 bytes.
    pub fn scratch_bytes(&self, isa: &Isa) -> usize {
        match self {
            Self::CacheWrite { dim, .. } => crate::kernels::cache::scratch_bytes(*dim),
            Self::Attention { .. } => crate::kernels::attention::scratch_bytes(self, isa),
            Self::AttentionMerge { splits, .. } => splits * 4,
            Self::Router { desc, .. } => crate::kernels::router::scratch_bytes(desc, isa),
            &Self::ExpertGateUp { layout, hidden, format, compute, schedule, .. } => {
                let products =
                    crate::kernels::multiply::scratch_bytes(isa, hidden, format, compute, schedule);
                products + crate::kernels::expert::gathered_bytes(isa, layout.rows, hidden, compute)
            }
            &Self::Linear { k: depth, format, compute, schedule, .. }
            | &Self::ExpertDown { inter: depth, format, compute, schedule, .. } => {
                crate::kernels::multiply::scratch_bytes(isa, depth, format, compute, schedule)
            }
            _ => 0,
        }
    }

    /// Layout of its weight matrix, if it reads one.
    pub fn layout(&self, isa: &Isa) -> Option<Layout> {
        let nr = isa.nr as u32;
        match self {
            Self::Embed { .. } => Some(Layout::Rows),
            Self::Linear { glu: Some(_), .. } | Self::ExpertGateUp { .. } => Some(Layout::GluPanels { nr }),
            Self::Linear { glu: None, .. } | Self::ExpertDown { .. } => Some(Layout::Panels { nr }),
            _ => None,
        }
    }

    /// How it cuts its work, if it multiplies by a matrix.
    pub fn schedule(&self) -> Option<Schedule> {
        match self {
            Self::Linear { schedule, .. }
            | Self::ExpertGateUp { schedule, .. }
            | Self::ExpertDown { schedule, .. } => Some(*schedule),
            _ => None,
        }
    }

    /// The same kernel with its work cut otherwise; nothing changes where there is no matrix.
    #[must_use]
    pub fn with_schedule(&self, to: Schedule) -> Self {
        let mut spec = self.clone();
        if let Self::Linear { schedule, .. }
        | Self::ExpertGateUp { schedule, .. }
        | Self::ExpertDown { schedule, .. } = &mut spec
        {
            *schedule = to;
        }
        spec
    }

    /// Format of its matrix, if it multiplies by one.
    pub fn weight_format(&self) -> Option<Format> {
        match self {
            Self::Linear { format, .. }
            | Self::ExpertGateUp { format, .. }
            | Self::ExpertDown { format, .. } => Some(*format),
            _ => None,
        }
    }

    /// What it does, in a word.
    pub fn kind(&self) -> &'static str {
        match self {
            Self::Embed { .. } => "embed",
            Self::Norm { .. } => "norm",
            Self::Quantise { .. } => "quantise",
            Self::Linear { .. } => "linear",
            Self::Rope { .. } => "rope",
            Self::CacheWrite { .. } => "cache_write",
            Self::Attention { .. } => "attention",
            Self::AttentionMerge { .. } => "attention_merge",
            Self::Router { .. } => "router",
            Self::ExpertGateUp { .. } => "expert_gate_up",
            Self::ExpertDown { .. } => "expert_down",
            Self::Combine { .. } => "combine",
            Self::Map { .. } => "map",
            Self::Copy { .. } => "copy",
            Self::Softmax { .. } => "softmax",
            Self::GatherRows { .. } => "gather_rows",
        }
    }

    /// In what form it multiplies, if it multiplies by a matrix.
    pub fn compute(&self) -> Option<Compute> {
        match self {
            Self::Linear { compute, .. }
            | Self::ExpertGateUp { compute, .. }
            | Self::ExpertDown { compute, .. } => Some(*compute),
            _ => None,
        }
    }

    /// Number of arguments.
    pub fn args(&self) -> usize {
        let opt = usize::from;
        match self {
            Self::Embed { .. } | Self::Rope { .. } | Self::GatherRows { .. } => 3,
            Self::Norm { kind, weight, .. } => 2 + opt(*weight) + opt(*kind == NormKind::Layer),
            Self::Linear { bias, residual_ld, .. } => 3 + opt(*bias) + opt(residual_ld.is_some()),
            Self::CacheWrite { .. } => 4,
            Self::Attention { desc, splits, .. } => 5 + opt(!desc.v_from_k) + opt(desc.sinks && *splits == 1),
            Self::AttentionMerge { sinks, .. } => 2 + opt(*sinks),
            Self::Router { desc, .. } => 3 + opt(desc.select_bias),
            Self::ExpertGateUp { bias, .. } | Self::ExpertDown { bias, .. } => 4 + opt(*bias),
            Self::Combine { residual_ld, .. } => 4 + opt(residual_ld.is_some()),
            Self::Map { op, .. } => match op {
                MapOp::Scale { .. } | MapOp::Clamp { .. } | MapOp::Act(_) => 2,
                MapOp::Add { .. } | MapOp::Mul { .. } | MapOp::Glu { .. } | MapOp::ScaleCols => 3,
            },
            Self::Copy { .. } | Self::Softmax { .. } | Self::Quantise { .. } => 2,
        }
    }
}

/// Panels of a weight of `n` rows. A gated panel holds half of its columns from either half of the rows.
pub(crate) fn panels(isa: &Isa, n: usize, glu: bool) -> usize {
    if glu { (n / 2).div_ceil(isa.nr / 2) } else { n.div_ceil(isa.nr) }
}

/// A symbol under construction. Every part begins with `_` and a tag, so that no two read alike.
struct Symbol(String);

impl Symbol {
    fn word(&mut self, word: &str) -> &mut Self {
        let _ = write!(self.0, "_{word}");
        self
    }

    fn num(&mut self, tag: &str, value: usize) -> &mut Self {
        let _ = write!(self.0, "_{tag}{value}");
        self
    }

    fn option(&mut self, tag: &str, value: Option<usize>) -> &mut Self {
        if let Some(value) = value {
            self.num(tag, value);
        }
        self
    }

    fn flag(&mut self, word: &str, on: bool) -> &mut Self {
        if on {
            self.word(word);
        }
        self
    }

    /// Silent about f32, which needs no name.
    fn compute(&mut self, compute: Compute) -> &mut Self {
        if compute == Compute::F32 { self } else { self.word("as").word(compute.name()) }
    }

    /// Silent about what is usual.
    fn schedule(&mut self, schedule: &Schedule) -> &mut Self {
        for (knob, value) in schedule.unusual() {
            self.num(knob.name(), value);
        }
        self
    }

    fn float(&mut self, tag: &str, value: f32) -> &mut Self {
        let text = format!("{value:?}").replace('.', "p").replace('-', "m");
        let _ = write!(self.0, "_{tag}{text}");
        self
    }

    fn glu(&mut self, glu: Glu) -> &mut Self {
        match glu {
            Glu::Gated(act) => self.word("glu").word(act.name()),
            Glu::DRelu => self.word("glu").word("drelu"),
            Glu::Clamped { alpha, limit } => {
                self.word("glu").word("clamped").float("alpha", alpha).float("limit", limit)
            }
        }
    }

    fn layout(&mut self, layout: DispatchLayout) -> &mut Self {
        self.num("t", layout.rows).num("k", layout.k).num("e", layout.experts)
    }

    fn map(&mut self, op: MapOp) {
        match op {
            MapOp::Add { b_ld, broadcast_b } => self.word("add").num("b", b_ld).flag("column", broadcast_b),
            MapOp::Mul { b_ld, broadcast_b } => self.word("mul").num("b", b_ld).flag("column", broadcast_b),
            MapOp::Glu { glu, b_ld } => self.glu(glu).num("b", b_ld),
            MapOp::ScaleCols => self.word("scale_cols"),
            MapOp::Scale { factor } => self.word("scale").float("by", factor),
            MapOp::Clamp { lo, hi } => self.word("clamp").float("lo", lo).float("hi", hi),
            MapOp::Act(act) => self.word("act").word(act.name()),
        };
    }

    fn router(&mut self, d: &RouterDesc, logits_ld: usize) {
        self.word("router").num("e", d.experts).num("k", d.k);
        self.word(match d.score {
            Score::Softmax => "softmax",
            Score::Sigmoid => "sigmoid",
            Score::Identity => "identity",
        });
        self.flag("bias", d.select_bias);
        if let Some(g) = &d.groups {
            self.num("groups", g.n).num("keep", g.keep);
            self.word(match g.score {
                GroupScore::Max => "max",
                GroupScore::Top2Sum => "top2sum",
            });
            self.flag("inf", g.mask_neg_inf);
        }
        match d.weight_from {
            WeightFrom::Score => self.word("from_score"),
            WeightFrom::SoftmaxTopk => self.word("from_softmax"),
            WeightFrom::SigmoidTopk => self.word("from_sigmoid"),
            WeightFrom::SparseMixer { eps } => self.word("from_mixer").float("eps", eps),
        };
        match d.renorm {
            Renorm::None => &mut *self,
            Renorm::Sum { eps } => self.float("sum", eps),
            Renorm::Clamp { min } => self.float("clamp", min),
        };
        self.float("s", d.scale).num("z", logits_ld);
    }
}
