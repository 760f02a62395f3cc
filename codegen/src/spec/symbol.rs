//! Symbols of kernels: every parameter, spelt so that equal symbols mean equal kernels.

use super::schedule::Schedule;
use super::{Compute, KernelSpec, MapOp, NormKind, Rotation, RowForm, RowNorm, WeightOrder};
use crate::machine::Isa;
use moec_ir::op::{DispatchLayout, Glu, GroupScore, Renorm, RopeStyle, RouterDesc, Score, WeightFrom};
use std::fmt::Write as _;

impl KernelSpec {
    /// Symbol: readable, and equal exactly for equal parameters (on the same [`Isa`]).
    pub fn symbol(&self, isa: &Isa) -> String {
        let mut s = Symbol("moec".to_string());
        match self {
            Self::Embed { vocab, hidden, format, panels, out_ld } => {
                s.word("embed").num("v", *vocab).num("h", *hidden).word(format.name());
                s.option("p", panels.then_some(isa.nr)).num("o", *out_ld);
            }
            Self::Norm { kind, width, groups, x_ld, outs, eps, weight } => {
                s.word(match kind {
                    NormKind::Rms => "rms_norm",
                    NormKind::Layer => "layer_norm",
                });
                s.num("c", *width).num("g", *groups).num("x", *x_ld);
                for out in outs {
                    s.form(*out);
                }
                s.float("eps", *eps).flag("weight", *weight);
            }
            Self::Quantise { cols, groups, per_row, x_ld, out_ld, to } => {
                s.word("quantise").num("c", *cols).num("g", *groups).num("r", *per_row);
                s.num("x", *x_ld).num("o", *out_ld);
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
            Self::Rope { heads, dim, norm, rotation, x_ld, out_ld } => {
                s.rotation(*rotation);
                s.norm(*norm);
                s.num("h", *heads).num("d", *dim).num("x", *x_ld).num("o", *out_ld);
            }
            Self::CacheWrite { heads, dim, ctx, ring, cache, values, norm, rotation, each, x_ld } => {
                s.word("cache_write").word(if *values { "values" } else { "keys" }).word(cache.name());
                s.num("p", isa.nr).num("h", *heads).num("d", *dim).num("ctx", *ctx).num("x", *x_ld);
                s.flag("ring", *ring);
                s.option("n", (each != heads).then_some(*each));
                if let Some(r) = rotation {
                    s.rotation(*r);
                }
                s.norm(*norm);
            }
            Self::Attention { desc, cache, compute, ctx, rows, splits, q_ld, out_ld } => {
                s.word("attention").num("h", desc.heads).num("kv", desc.kv_heads).num("d", desc.qk_dim);
                s.num("v", desc.v_dim).float("s", desc.scale).option("w", desc.window);
                s.flag("chunked", desc.chunked).flag("sinks", desc.sinks).flag("latent", desc.v_from_k);
                s.word(cache.name()).word(compute.name()).num("p", isa.nr).num("r", *rows).num("n", *splits);
                s.num("q", *q_ld).num("o", *out_ld).num("ctx", *ctx);
            }
            Self::AttentionMerge { heads, v_dim, splits, sinks, out_ld } => {
                s.word("attention_merge").num("h", *heads).num("v", *v_dim).num("n", *splits);
                s.flag("sinks", *sinks).num("o", *out_ld);
            }
            Self::Router { desc, logits_ld } => s.router(desc, *logits_ld),
            Self::ExpertGateUp {
                layout,
                hidden,
                inter,
                format,
                compute,
                x_ld,
                glu,
                bias,
                out,
                order,
                schedule,
            } => {
                s.word("expert_gate_up").layout(*layout).num("h", *hidden).num("i", *inter);
                s.word(format.name())
                    .compute(*compute)
                    .num("p", isa.nr)
                    .num("x", *x_ld)
                    .flag("bias", *bias)
                    .glu(*glu);
                if *out != RowForm::f32(*inter) {
                    s.form(*out);
                }
                s.order(*order).schedule(schedule);
            }
            Self::ExpertDown { layout, inter, hidden, format, compute, h_ld, bias, order, schedule } => {
                s.word("expert_down").layout(*layout).num("i", *inter).num("h", *hidden);
                s.word(format.name()).compute(*compute).num("p", isa.nr).num("x", *h_ld).flag("bias", *bias);
                s.order(*order).schedule(schedule);
            }
            Self::NeuronUp { layout, hidden, inter, format, compute, sketch, predicted, x_ld, glu } => {
                s.word("neuron_up").layout(*layout).num("h", *hidden).num("i", *inter).word(format.name());
                s.compute(*compute).flag("sketched", *sketch).flag("predicted", *predicted);
                s.num("x", *x_ld).glu(*glu);
            }
            Self::NeuronPredict { layout, hidden, inter, rank, format, x_ld } => {
                s.word("neuron_predict").layout(*layout).num("h", *hidden).num("i", *inter);
                s.option("rank", *rank).word(format.name()).num("x", *x_ld);
            }
            Self::NeuronDown { layout, hidden, inter, format, sketch } => {
                s.word("neuron_down").layout(*layout).num("h", *hidden).num("i", *inter).word(format.name());
                s.flag("sketched", *sketch);
            }
            Self::NeuronGate { layout, hidden, inter, format, compute, x_ld, glu }
            | Self::NeuronUpAt { layout, hidden, inter, format, compute, x_ld, glu } => {
                s.word(self.kind()).layout(*layout).num("h", *hidden).num("i", *inter).word(format.name());
                s.compute(*compute).num("x", *x_ld).glu(*glu);
            }
            Self::NeuronDownAt { layout, hidden, inter, format } => {
                s.word(self.kind()).layout(*layout).num("h", *hidden).num("i", *inter).word(format.name());
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
            Self::ZeroExperts { experts, zero, k } => {
                s.word("zero_experts").num("e", *experts).num("z", *zero).num("k", *k);
            }
            Self::Recurrence(of) => {
                let kernel = of.kernel();
                kernel.name(s.word(kernel.kind()));
            }
        }
        s.0
    }
}

/// A symbol under construction. Every part begins with `_` and a tag, so that no two read alike.
pub(crate) struct Symbol(String);

impl Symbol {
    pub(crate) fn word(&mut self, word: &str) -> &mut Self {
        let _ = write!(self.0, "_{word}");
        self
    }

    pub(crate) fn num(&mut self, tag: &str, value: usize) -> &mut Self {
        let _ = write!(self.0, "_{tag}{value}");
        self
    }

    fn option(&mut self, tag: &str, value: Option<usize>) -> &mut Self {
        if let Some(value) = value {
            self.num(tag, value);
        }
        self
    }

    pub(crate) fn flag(&mut self, word: &str, on: bool) -> &mut Self {
        if on {
            self.word(word);
        }
        self
    }

    /// Silent about f32, which needs no name.
    fn compute(&mut self, compute: Compute) -> &mut Self {
        if compute == Compute::F32 { self } else { self.word("as").word(compute.name()) }
    }

    /// Silent about panels.
    fn order(&mut self, order: WeightOrder) -> &mut Self {
        match order {
            WeightOrder::Panels => self,
            WeightOrder::Neurons { sketch } => self.word("neurons").flag("sketched", sketch),
            WeightOrder::Apart => self.word("apart"),
        }
    }

    /// Silent about what is usual.
    fn schedule(&mut self, schedule: &Schedule) -> &mut Self {
        for (knob, value) in schedule.unusual() {
            self.num(knob.name(), value);
        }
        self
    }

    /// Silent about the form of plain numbers.
    fn form(&mut self, out: RowForm) {
        self.num("o", out.ld);
        if out.form != Compute::F32 {
            self.word(out.form.name());
        }
    }

    fn norm(&mut self, norm: Option<RowNorm>) {
        if let Some(RowNorm { width, eps, weight }) = norm {
            self.word("normed").num("c", width).float("eps", eps).flag("weight", weight);
        }
    }

    fn rotation(&mut self, r: Rotation) {
        self.word("rope").word(match r.style {
            RopeStyle::Half => "half",
            RopeStyle::Interleaved => "interleaved",
        });
        self.num("r", r.rotary).num("at", r.offset).num("a", r.angles_ld);
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
            Glu::FatRelu { threshold } => self.word("glu").word("fatrelu").float("at", threshold),
            Glu::Cats { threshold } => self.word("glu").word("cats").float("at", threshold),
            Glu::Limited { limit } => self.word("glu").word("limited").float("at", limit),
            Glu::Clamped { alpha, limit } => {
                self.word("glu").word("clamped").float("alpha", alpha).float("limit", limit)
            }
            Glu::Ungated(act) => self.word("ungated").word(act.name()),
        }
    }

    fn layout(&mut self, layout: DispatchLayout) -> &mut Self {
        self.num("t", layout.rows).num("k", layout.k).num("e", layout.experts)
    }

    fn map(&mut self, op: MapOp) {
        match op {
            MapOp::Add { b_ld, broadcast_b } => self.word("add").num("b", b_ld).flag("column", broadcast_b),
            MapOp::Mul { b_ld, broadcast_b } => self.word("mul").num("b", b_ld).flag("column", broadcast_b),
            MapOp::MulHeads { heads, b_ld } => self.word("mul_heads").num("h", heads).num("b", b_ld),
            MapOp::SoftCap { cap } => self.word("soft_cap").float("at", cap),
            MapOp::Glu { glu, b_ld } => self.glu(glu).num("b", b_ld),
            MapOp::ScaleCols => self.word("scale_cols"),
            MapOp::Scale { factor } => self.word("scale").float("by", factor),
            MapOp::Clamp { lo, hi } => self.word("clamp").float("lo", lo).float("hi", hi),
            MapOp::ScaleByPosition { beta, every, offset } => {
                self.word("by_position").float("beta", beta).num("every", every).num("from", offset)
            }
            MapOp::Act(act) => self.word("act").word(act.name()),
            MapOp::Softplus => self.word("softplus"),
        };
    }

    fn router(&mut self, d: &RouterDesc, logits_ld: usize) {
        self.word("router").num("e", d.scores()).num("k", d.k);
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
