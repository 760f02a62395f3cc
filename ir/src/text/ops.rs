//! Operators: mnemonic and attributes.

use super::attrs::{Attrs, Value};
use super::cursor::{Cursor, Parsed};
use crate::op::{
    Activation, AdmitDesc, AttentionDesc, Glu, GroupScore, Groups, LongSwitch, Op, Predictor, Renorm,
    RopeStyle, RouterDesc, Score, WeightFrom,
};
use std::fmt;

/// Writes attributes, with separators.
struct Writer(Vec<String>);

impl Writer {
    fn put(mut self, key: &str, value: impl fmt::Display) -> Self {
        self.0.push(format!("{key} = {value}"));
        self
    }
    fn float(self, key: &str, value: f32) -> Self {
        self.put(key, format_args!("{value:?}"))
    }
    /// False is the default and is left out.
    fn flag(self, key: &str, value: bool) -> Self {
        if value { self.put(key, true) } else { self }
    }
    fn optional(self, key: &str, value: Option<impl fmt::Display>) -> Self {
        match value {
            Some(value) => self.put(key, value),
            None => self,
        }
    }
}

fn activation(name: &str) -> Option<Activation> {
    Activation::ALL.into_iter().find(|a| a.name() == name)
}

struct GluText(Glu);
impl fmt::Display for GluText {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            Glu::Gated(a) => f.write_str(a.name()),
            Glu::DRelu => f.write_str("drelu"),
            Glu::FatRelu { threshold } => write!(f, "fatrelu(threshold = {threshold:?})"),
            Glu::Cats { threshold } => write!(f, "cats(threshold = {threshold:?})"),
            Glu::Clamped { alpha, limit } => write!(f, "clamped(alpha = {alpha:?}, limit = {limit:?})"),
        }
    }
}

/// The attributes of an operator in braces, or nothing if it has none to show.
pub(super) fn attributes(op: &Op) -> String {
    let w = Writer(Vec::new());
    let w = match op {
        Op::RmsNorm { eps, groups, weight } => {
            w.float("eps", *eps).put("groups", groups).flag("weight", *weight)
        }
        Op::LayerNorm { eps } => w.float("eps", *eps),
        Op::Linear { bias } => w.flag("bias", *bias),
        Op::LinearGlu { glu, bias } => w.put("glu", GluText(*glu)).flag("bias", *bias),
        Op::ExpertFfn { glu, bias, fixed } => {
            w.put("glu", GluText(*glu)).flag("bias", *bias).flag("fixed", *fixed)
        }
        Op::Admit(d) => w.put("capacities", format_args!("{:?}", d.capacities)).flag("spill", d.spill),
        Op::HeadLinear { heads } | Op::Concat { heads } | Op::MulHeads { heads } => w.put("heads", heads),
        Op::SoftCap { cap } => w.float("cap", *cap),
        Op::Conv1x1 { groups, bias } => w.put("groups", groups).flag("bias", *bias),
        Op::RopeAngles { scale, switch } => {
            let long = switch.map(|s| format!("long(after = {}, scale = {:?})", s.after, s.long_scale));
            w.float("scale", *scale).optional("switch", long)
        }
        Op::Rope { heads, offset, style } => {
            let style = match style {
                RopeStyle::Half => "half",
                RopeStyle::Interleaved => "interleaved",
            };
            w.put("heads", heads).put("offset", offset).put("style", style)
        }
        Op::Attention(d) => w
            .put("heads", d.heads)
            .put("kv_heads", d.kv_heads)
            .put("qk_dim", d.qk_dim)
            .put("v_dim", d.v_dim)
            .float("scale", d.scale)
            .optional("window", d.window)
            .flag("sinks", d.sinks)
            .flag("v_from_k", d.v_from_k),
        Op::CausalConv { act, bias } => w.optional("act", act.map(Activation::name)).flag("bias", *bias),
        Op::DeltaRule { key_heads, heads } => w.put("key_heads", key_heads).put("heads", heads),
        Op::Ssd { groups, heads } => w.put("groups", groups).put("heads", heads),
        Op::Router(d) => router(w, d),
        Op::Dispatch { experts, partial } => w.put("experts", experts).flag("partial", *partial),
        Op::Fetch { layer, scores } => w.put("layer", layer).put("scores", scores),
        Op::Combine { partial } => w.flag("partial", *partial),
        Op::Scale { factor } => w.float("factor", *factor),
        Op::Clamp { lo, hi } => w.float("lo", *lo).float("hi", *hi),
        Op::Glu(glu) => w.put("glu", GluText(*glu)),
        Op::NeuronFfn { glu, paged, predict } => w
            .put("glu", GluText(*glu))
            .optional("paged", *paged)
            .optional("predict", predict.map(Predictor::name)),
        Op::Slice { heads, start, len } => w.put("heads", heads).put("start", start).put("len", len),
        Op::Embed
        | Op::CacheWrite
        | Op::Add
        | Op::Mul
        | Op::ScaleCols
        | Op::Act(_)
        | Op::Softplus
        | Op::Softmax
        | Op::ToNchw
        | Op::FromNchw
        | Op::GatherRows => w,
    };
    if w.0.is_empty() { String::new() } else { format!(" {{{}}}", w.0.join(", ")) }
}

fn router(w: Writer, d: &RouterDesc) -> Writer {
    let score = d.score.name();
    let groups = d.groups.map(|g| {
        let score = match g.score {
            GroupScore::Max => "max",
            GroupScore::Top2Sum => "top2sum",
        };
        let mask = if g.mask_neg_inf { "neg_inf" } else { "zero" };
        format!("groups(n = {}, keep = {}, score = {score}, mask = {mask})", g.n, g.keep)
    });
    let from = match d.weight_from {
        WeightFrom::Score => "score".to_owned(),
        WeightFrom::SoftmaxTopk => "softmax_topk".to_owned(),
        WeightFrom::SigmoidTopk => "sigmoid_topk".to_owned(),
        WeightFrom::SparseMixer { eps } => format!("sparsemixer(eps = {eps:?})"),
    };
    let renorm = match d.renorm {
        Renorm::None => "none".to_owned(),
        Renorm::Sum { eps } => format!("sum(eps = {eps:?})"),
        Renorm::Clamp { min } => format!("clamp(min = {min:?})"),
    };
    w.put("experts", d.experts)
        .put("k", d.k)
        .put("score", score)
        .flag("select_bias", d.select_bias)
        .optional("groups", groups)
        .put("weight_from", from)
        .put("renorm", renorm)
        .float("scale", d.scale)
}

impl fmt::Display for Op {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}{}", self.name(), attributes(self))
    }
}

fn read_glu<'t>(c: &Cursor<'t>, a: &mut Attrs<'t>) -> Parsed<Glu> {
    a.variant(c, "glu", "an activation, `drelu`, `fatrelu`, `cats` or `clamped`", |word, args| {
        Ok(match word {
            "drelu" => Some(Glu::DRelu),
            "fatrelu" => Some(Glu::FatRelu { threshold: args.float(c, "threshold")? }),
            "cats" => Some(Glu::Cats { threshold: args.float(c, "threshold")? }),
            "clamped" => {
                Some(Glu::Clamped { alpha: args.float(c, "alpha")?, limit: args.float(c, "limit")? })
            }
            _ => activation(word).map(Glu::Gated),
        })
    })
}

fn read_router<'t>(c: &Cursor<'t>, a: &mut Attrs<'t>) -> Parsed<RouterDesc> {
    Ok(RouterDesc {
        experts: a.int(c, "experts")?,
        k: a.int(c, "k")?,
        score: a.variant(c, "score", "`softmax`, `sigmoid` or `identity`", |word, _| {
            Ok(match word {
                "softmax" => Some(Score::Softmax),
                "sigmoid" => Some(Score::Sigmoid),
                "identity" => Some(Score::Identity),
                _ => None,
            })
        })?,
        select_bias: a.flag(c, "select_bias")?,
        groups: a.optional_variant(c, "groups", "`groups(…)`", |word, args| {
            if word != "groups" {
                return Ok(None);
            }
            Ok(Some(Groups {
                n: args.int(c, "n")?,
                keep: args.int(c, "keep")?,
                score: args.variant(c, "score", "`max` or `top2sum`", |word, _| {
                    Ok(match word {
                        "max" => Some(GroupScore::Max),
                        "top2sum" => Some(GroupScore::Top2Sum),
                        _ => None,
                    })
                })?,
                mask_neg_inf: args.variant(c, "mask", "`neg_inf` or `zero`", |word, _| {
                    Ok(match word {
                        "neg_inf" => Some(true),
                        "zero" => Some(false),
                        _ => None,
                    })
                })?,
            }))
        })?,
        weight_from: a.variant(c, "weight_from", "a source of weights", |word, args| {
            Ok(match word {
                "score" => Some(WeightFrom::Score),
                "softmax_topk" => Some(WeightFrom::SoftmaxTopk),
                "sigmoid_topk" => Some(WeightFrom::SigmoidTopk),
                "sparsemixer" => Some(WeightFrom::SparseMixer { eps: args.float(c, "eps")? }),
                _ => None,
            })
        })?,
        renorm: a.variant(c, "renorm", "`none`, `sum` or `clamp`", |word, args| {
            Ok(match word {
                "none" => Some(Renorm::None),
                "sum" => Some(Renorm::Sum { eps: args.float(c, "eps")? }),
                "clamp" => Some(Renorm::Clamp { min: args.float(c, "min")? }),
                _ => None,
            })
        })?,
        scale: a.float(c, "scale")?,
    })
}

/// The operator of this mnemonic, which stands at byte `at`, with the attributes read for it.
pub(super) fn read<'t>(c: &Cursor<'t>, name: &str, at: usize, mut attrs: Attrs<'t>) -> Parsed<Op> {
    let a = &mut attrs;
    let op = match name {
        "embed" => Op::Embed,
        "rms_norm" => {
            Op::RmsNorm { eps: a.float(c, "eps")?, groups: a.int(c, "groups")?, weight: a.flag(c, "weight")? }
        }
        "layer_norm" => Op::LayerNorm { eps: a.float(c, "eps")? },
        "linear" => Op::Linear { bias: a.flag(c, "bias")? },
        "linear_glu" => Op::LinearGlu { glu: read_glu(c, a)?, bias: a.flag(c, "bias")? },
        "head_linear" => Op::HeadLinear { heads: a.int(c, "heads")? },
        "conv1x1" => Op::Conv1x1 { groups: a.int(c, "groups")?, bias: a.flag(c, "bias")? },
        "to_nchw" => Op::ToNchw,
        "from_nchw" => Op::FromNchw,
        "rope_angles" => Op::RopeAngles {
            scale: a.float(c, "scale")?,
            switch: a.optional_variant(c, "switch", "`long(…)`", |word, args| {
                if word != "long" {
                    return Ok(None);
                }
                Ok(Some(LongSwitch { after: args.int(c, "after")?, long_scale: args.float(c, "scale")? }))
            })?,
        },
        "rope" => Op::Rope {
            heads: a.int(c, "heads")?,
            offset: a.int(c, "offset")?,
            style: a.variant(c, "style", "`half` or `interleaved`", |word, _| {
                Ok(match word {
                    "half" => Some(RopeStyle::Half),
                    "interleaved" => Some(RopeStyle::Interleaved),
                    _ => None,
                })
            })?,
        },
        "cache_write" => Op::CacheWrite,
        "attention" => Op::Attention(AttentionDesc {
            heads: a.int(c, "heads")?,
            kv_heads: a.int(c, "kv_heads")?,
            qk_dim: a.int(c, "qk_dim")?,
            v_dim: a.int(c, "v_dim")?,
            scale: a.float(c, "scale")?,
            window: a.optional_int(c, "window")?,
            sinks: a.flag(c, "sinks")?,
            v_from_k: a.flag(c, "v_from_k")?,
        }),
        "causal_conv" => Op::CausalConv {
            act: a.optional_variant(c, "act", "an activation", |word, _| Ok(activation(word)))?,
            bias: a.flag(c, "bias")?,
        },
        "delta_rule" => Op::DeltaRule { key_heads: a.int(c, "key_heads")?, heads: a.int(c, "heads")? },
        "ssd" => Op::Ssd { groups: a.int(c, "groups")?, heads: a.int(c, "heads")? },
        "router" => Op::Router(read_router(c, a)?),
        "dispatch" => Op::Dispatch { experts: a.int(c, "experts")?, partial: a.flag(c, "partial")? },
        "fetch" => Op::Fetch { layer: a.int(c, "layer")?, scores: a.int(c, "scores")? },
        "admit" => Op::Admit(AdmitDesc {
            capacities: a.list(c, "capacities", "a list of capacities", Value::number)?,
            spill: a.flag(c, "spill")?,
        }),
        "expert_ffn" => {
            Op::ExpertFfn { glu: read_glu(c, a)?, bias: a.flag(c, "bias")?, fixed: a.flag(c, "fixed")? }
        }
        "neuron_ffn" => Op::NeuronFfn {
            glu: read_glu(c, a)?,
            paged: a.optional_int(c, "paged")?,
            predict: a.optional_variant(c, "predict", "`low_rank` or `coarse`", |word, _| {
                Ok(Predictor::ALL.into_iter().find(|p| p.name() == word))
            })?,
        },
        "combine" => Op::Combine { partial: a.flag(c, "partial")? },
        "add" => Op::Add,
        "mul" => Op::Mul,
        "mul_heads" => Op::MulHeads { heads: a.int(c, "heads")? },
        "soft_cap" => Op::SoftCap { cap: a.float(c, "cap")? },
        "scale" => Op::Scale { factor: a.float(c, "factor")? },
        "scale_cols" => Op::ScaleCols,
        "clamp" => Op::Clamp { lo: a.float(c, "lo")?, hi: a.float(c, "hi")? },
        "glu" => Op::Glu(read_glu(c, a)?),
        "softplus" => Op::Softplus,
        "softmax" => Op::Softmax,
        "concat" => Op::Concat { heads: a.int(c, "heads")? },
        "slice" => Op::Slice { heads: a.int(c, "heads")?, start: a.int(c, "start")?, len: a.int(c, "len")? },
        "gather_rows" => Op::GatherRows,
        _ => match activation(name) {
            Some(act) => Op::Act(act),
            None => return Err(c.error_at(at, format!("expected an operator, found `{name}`"))),
        },
    };
    attrs.finish(c)?;
    Ok(op)
}
