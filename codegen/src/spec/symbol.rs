//! Symbols of kernels: every parameter, spelt so that equal symbols mean equal kernels.

use super::schedule::Schedule;
use super::{ComputeType, Rotation, RowFormat, RowNorm, WeightOrder};
use moec_ir::op::{DispatchLayout, Glu, RopeStyle};
use std::fmt::Write as _;

/// A symbol under construction. Every part begins with `_` and a tag, so that no two read alike.
pub(crate) struct Symbol(pub(super) String);

impl Default for Symbol {
    fn default() -> Self {
        Self("moec".to_owned())
    }
}

impl Symbol {
    pub(crate) fn word(&mut self, word: &str) -> &mut Self {
        let _ = write!(self.0, "_{word}");
        self
    }

    pub(crate) fn num(&mut self, tag: &str, value: usize) -> &mut Self {
        let _ = write!(self.0, "_{tag}{value}");
        self
    }

    pub(crate) fn option(&mut self, tag: &str, value: Option<usize>) -> &mut Self {
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
    pub(crate) fn compute(&mut self, compute: ComputeType) -> &mut Self {
        if compute == ComputeType::F32 { self } else { self.word("as").word(compute.name()) }
    }

    /// Silent about panels.
    pub(crate) fn order(&mut self, order: WeightOrder) -> &mut Self {
        match order {
            WeightOrder::Panels => self,
            WeightOrder::Neurons { gate_bound } => self.word("neurons").flag("bounded", gate_bound),
            WeightOrder::Split => self.word("split"),
            WeightOrder::Bundles => self.word("bundles"),
        }
    }

    /// Silent about what is usual.
    pub(crate) fn schedule(&mut self, schedule: &Schedule) -> &mut Self {
        for (knob, value) in schedule.unusual() {
            self.num(knob.name(), value);
        }
        self
    }

    /// Plain numbers add nothing.
    pub(crate) fn row_format(&mut self, out: RowFormat) {
        self.num("o", out.ld);
        if out.compute != ComputeType::F32 {
            self.word(out.compute.name());
        }
    }

    pub(crate) fn norm(&mut self, norm: Option<RowNorm>) {
        if let Some(RowNorm { width, eps, weight }) = norm {
            self.word("normed").num("c", width).float("eps", eps).flag("weight", weight);
        }
    }

    pub(crate) fn rotation(&mut self, r: Rotation) {
        self.word("rope").word(match r.style {
            RopeStyle::Half => "half",
            RopeStyle::Interleaved => "interleaved",
        });
        self.num("r", r.rotary).num("at", r.offset).num("a", r.angles_ld);
    }

    pub(crate) fn float(&mut self, tag: &str, value: f32) -> &mut Self {
        let text = format!("{value:?}").replace('.', "p").replace('-', "m");
        let _ = write!(self.0, "_{tag}{text}");
        self
    }

    pub(crate) fn glu(&mut self, glu: Glu) -> &mut Self {
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

    pub(crate) fn layout(&mut self, layout: DispatchLayout) -> &mut Self {
        self.num("t", layout.rows).num("k", layout.k).num("e", layout.experts)
    }
}
