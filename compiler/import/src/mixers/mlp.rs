//! A feed-forward network that every token uses, with or without a gate.

use super::parts::{PROJ, Parts};
use super::{Mix, Mixer};
use crate::common::Base;
use crate::lower::{LowerResult, Lowering, Rows};
use crate::spec::Projection;
use crate::tensors::Dim;
use moec_base::error::Result;
use moec_ir::infer::TypeError;
use moec_ir::{Glu, Op, Part, ValueId, WeightClass, WeightExpr};

/// A feed-forward network, `down(glu(gate(x), up(x)))`, or `down(act(up(x)))`.
#[derive(Clone, Debug, PartialEq)]
pub struct Mlp {
    /// `[intermediate, hidden]`; `None` where [`glu`](Self::glu) has no gate.
    pub gate: Option<Projection>,
    /// `[intermediate, hidden]`.
    pub up: Projection,
    /// `[hidden, intermediate]`.
    pub down: Projection,
    /// Function that combines gate and up.
    pub glu: Glu,
}

impl Mlp {
    /// Adds its nodes for the rows `x`; `at` is the prefix of its weights.
    pub(super) fn of_rows<'a>(&'a self, l: &mut Lowering<'a, '_>, at: &str, x: ValueId) -> LowerResult {
        const CLASS: WeightClass = WeightClass::Attention;
        let gate = self.gate.as_ref().map(|gate| l.linear(&format!("{at}.gate"), CLASS, gate, x));
        let (gate, up) = (gate.transpose()?, l.linear(&format!("{at}.up"), CLASS, &self.up, x)?);
        let h = match (self.glu, gate) {
            (Glu::Ungated(activation), None) => l.g.one(Op::Act(activation), &[up.into()])?,
            (Glu::Gated(activation), Some(gate)) => {
                let gate = l.g.one(Op::Act(activation), &[gate.into()])?;
                l.g.one(Op::Mul, &[gate.into(), up.into()])?
            }
            (glu, Some(gate)) => l.g.one(Op::Glu(glu), &[gate.into(), up.into()])?,
            (_, None) => return Err(TypeError::new(at, "a gated network without a gate")),
        };
        l.linear(&format!("{at}.down"), CLASS, &self.down, h)
    }
}

impl Mix for Mlp {
    fn part(&self) -> Part {
        Part::FFN
    }

    fn weights(&self) -> Vec<(WeightClass, &WeightExpr)> {
        super::projections(self.gate.iter().chain([&self.up, &self.down])).collect()
    }

    fn lower<'a>(&'a self, l: &mut Lowering<'a, '_>, at: &str, rows: Rows) -> LowerResult {
        self.of_rows(l, &format!("{at}.ffn"), rows.normed)
    }
}

impl Base<'_> {
    /// Reads a network with `up_proj` and `down_proj`, and `gate_proj` if it has a gate.
    ///
    /// # Errors
    /// Fails if tensors do not fit the config.
    pub fn mlp(&self, at: &str, intermediate: &Dim, bias: bool) -> Result<Mlp> {
        self.mlp_of(at, PROJ, intermediate, bias)
    }

    /// Reads a network with these names of parts.
    ///
    /// # Errors
    /// Fails if tensors do not fit the config.
    pub fn mlp_of(&self, at: &str, parts: Parts, intermediate: &Dim, bias: bool) -> Result<Mlp> {
        let part =
            |name: &str, out, input| self.tensors.projection(&format!("{at}.{name}"), out, input, bias);
        let gate = self.glu.is_gated().then(|| part(parts.gate, intermediate, &self.hidden)).transpose()?;
        let up = part(parts.up, intermediate, &self.hidden)?;
        Ok(Mlp { gate, up, down: part(parts.down, &self.hidden, intermediate)?, glu: self.glu })
    }

    /// Reads the dense network of a layer, with `intermediate_size` channels.
    ///
    /// # Errors
    /// Fails if tensors do not fit the config.
    pub fn dense(&self, layer: usize, bias: bool) -> Result<Mixer> {
        let intermediate = self.config.size(&["intermediate_size"])?.into();
        Ok(self.mlp(&format!("{}.mlp", self.layer(layer)), &intermediate, bias)?.into())
    }
}
