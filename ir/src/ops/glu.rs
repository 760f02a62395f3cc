//! Gate and up projection of a gated feed-forward network, joined.

use super::math::{matvec, sigmoid, zip};
use super::*;

/// Function by which a gated feed-forward network joins its gate `g` and its up projection `u`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Glu {
    /// `act(g) · u`: SwiGLU, GeGLU, ReGLU.
    Gated(Activation),
    /// `relu(g) · relu(u)`: dReLU (arXiv 2406.05955, eq. 2).
    DRelu,
    /// `fatrelu(g) · u`, where `fatrelu(g)` is 0 if `g < threshold`, else `g`: FATReLU (Kurtz et al., ICML
    /// 2020; ProSparse, arXiv 2402.13516, section 3.3).
    FatRelu {
        /// Magnitude below which a gate becomes 0.
        threshold: f32,
    },
    /// `cats(g) · u`, where `cats(g)` is 0 if `|silu(g)| < threshold`, else `silu(g)`: a SwiGLU whose
    /// smallest activations are left out (CATS, arXiv 2404.08763). An approximation of [`Glu::Gated`] of
    /// [`Activation::Silu`].
    Cats {
        /// Magnitudes below it become 0.
        threshold: f32,
    },
    /// `min(silu(g), limit) · clamp(u, ±limit)`: a SwiGLU whose factors are bounded after the activation
    /// (Step-3.5).
    Limited {
        /// Bound of both factors.
        limit: f32,
    },
    /// gpt-oss: `g' = min(g, limit)`, `u' = clamp(u, ±limit)`, `(u' + 1) · g' · sigmoid(alpha · g')`.
    Clamped {
        /// Slope inside the sigmoid.
        alpha: f32,
        /// Clamp of both inputs.
        limit: f32,
    },
    /// `act(u)`: a network without a gate. Its first matrix is the up projection alone.
    Ungated(Activation),
}

impl Glu {
    /// Projections that the first matrix of an expert has one after the other: gate and up, or up alone.
    pub const fn projections(self) -> usize {
        if self.is_gated() { 2 } else { 1 }
    }

    /// Whether there is a gate.
    pub const fn is_gated(self) -> bool {
        !matches!(self, Self::Ungated(_))
    }

    /// Whether the gate alone makes the result exactly 0 for some of its values. Up and down of the neuron
    /// need not be read then, as [`Op::NeuronFfn`] requires (PowerInfer-2, §2.2).
    pub const fn skips(self) -> bool {
        self.skips_below() || matches!(self, Self::Cats { .. })
    }

    /// Whether the result is 0 wherever the gate is low enough: an upper bound of the gate then tells which
    /// neurons are inactive.
    pub const fn skips_below(self) -> bool {
        matches!(self, Self::Gated(Activation::Relu) | Self::DRelu | Self::FatRelu { .. })
    }

    /// Refuses a network without a gate where there are two projections to join.
    pub(super) fn require_gate(self, o: &Operands<'_>) -> Result<(), TypeError> {
        o.require(self.is_gated(), || "a network without a gate joins nothing".to_owned())
    }

    /// Joins gate and up; without a gate, `g` is not looked at.
    pub(super) fn at(self, g: f32, u: f32) -> f32 {
        match self {
            Self::Gated(act) => act.at(g) * u,
            Self::DRelu => g.max(0.0) * u.max(0.0),
            Self::FatRelu { threshold } => (if g < threshold { 0.0 } else { g }) * u,
            Self::Cats { threshold } => {
                let g = Activation::Silu.at(g);
                (if g.abs() < threshold { 0.0 } else { g }) * u
            }
            Self::Limited { limit } => Activation::Silu.at(g).min(limit) * u.max(-limit).min(limit),
            Self::Clamped { alpha, limit } => {
                let g = f64::from(g.min(limit));
                let u = f64::from(u.max(-limit).min(limit));
                ((u + 1.0) * g * sigmoid(f64::from(alpha) * g)) as f32
            }
            Self::Ungated(act) => act.at(u),
        }
    }

    /// Gate and up of one row, joined: `w` has the rows of the gate, if there is one, then those of up.
    pub(super) fn of_row(self, x: &[f32], w: &[f32], bias: Option<&[f32]>) -> Vec<f32> {
        let both = matvec(x, w, bias);
        if !self.is_gated() {
            return both.into_iter().map(|u| self.at(0.0, u)).collect();
        }
        let (gate, up) = both.split_at(both.len() / 2);
        gate.iter().zip(up).map(|(&g, &u)| self.at(g, u)).collect()
    }
}

impl Word for Glu {
    const EXPECTED: &'static str =
        "an activation, `drelu`, `fatrelu`, `cats`, `limited`, `clamped` or `ungated`";

    fn word(&self, w: &mut Writer) {
        match self {
            Self::Gated(act) => w.word(act.name()),
            Self::DRelu => w.word("drelu"),
            Self::FatRelu { threshold } => w.put("threshold", threshold).word("fatrelu"),
            Self::Cats { threshold } => w.put("threshold", threshold).word("cats"),
            Self::Limited { limit } => w.put("limit", limit).word("limited"),
            Self::Clamped { alpha, limit } => w.put("alpha", alpha).put("limit", limit).word("clamped"),
            Self::Ungated(act) => w.put("act", act).word("ungated"),
        }
    }

    fn of(word: &str, r: &mut Reader<'_, '_>) -> Parsed<Option<Self>> {
        Ok(Some(match word {
            "drelu" => Self::DRelu,
            "fatrelu" => Self::FatRelu { threshold: r.get("threshold")? },
            "cats" => Self::Cats { threshold: r.get("threshold")? },
            "limited" => Self::Limited { limit: r.get("limit")? },
            "clamped" => Self::Clamped { alpha: r.get("alpha")?, limit: r.get("limit")? },
            "ungated" => Self::Ungated(r.get("act")?),
            _ => return Ok(Activation::of(word, r)?.map(Self::Gated)),
        }))
    }
}

impl Attributes for Glu {
    fn write(&self, w: &mut Writer) {
        w.put("glu", self);
    }

    fn read(_: &str, r: &mut Reader<'_, '_>) -> Parsed<Option<Self>> {
        r.get("glu").map(Some)
    }
}

impl Operator for Glu {
    const NAMES: &'static [&'static str] = &["glu"];
    const OPERANDS: &'static [Kind] = &[V, V];

    fn infer(&self, o: &Operands<'_>) -> Inferred {
        self.require_gate(o)?;
        let gate = o.rows(0, "a")?.ty();
        o.exact(1, "b", &gate)?;
        Ok(vec![gate])
    }

    fn eval(&self, a: &Args<'_>) -> Evaluated {
        zip(a, |g, u| self.at(g, u))
    }
}
