//! Experts as feed-forward networks of two matrices.

use super::dispatch::{for_each_slot, slots_for};
use super::math::{matrix, matvec};
use super::*;

impl Operator for ExpertFfn {
    const NAMES: &'static [&'static str] = &["expert_ffn"];
    const OPERANDS: &'static [Kind] = &[V, V, W, W];

    fn weights(&self) -> usize {
        if self.bias { 2 } else { 0 }
    }

    fn infer(&self, o: &Operands<'_>) -> Inferred {
        let [t, h] = o.matrix(0, "x")?;
        let [words] = o.shape(1, "dispatch", DType::I32)?;
        let [e, rows, gh] = o.shape(2, "gate_up", DType::F32)?;
        o.require(gh == h, || format!("x has {h} channels, gate_up takes {gh}"))?;
        let i = o.part(rows, self.glu.projections(), "halves")?;
        o.exact(3, "down", &f32(&[e, h, i]))?;
        if self.bias {
            o.exact(4, "gate_up_bias", &f32(&[e, rows]))?;
            o.exact(5, "down_bias", &f32(&[e, h]))?;
        }
        Ok(vec![f32(&[slots_for(o, words, t, e)?, h])])
    }

    /// Slots that no active expert has are 0.
    fn eval(&self, a: &Args<'_>) -> Evaluated {
        let (rows, hidden, x, experts) = (a.rows(0)?, a.cols(0)?, a.f32(0)?, a.rows(2)?);
        let (gate_up, down) = (a.f32(2)?, a.f32(3)?);
        let (gate_up_bias, down_bias) = (a.weight(4, self.bias)?, a.weight(5, self.bias)?);
        let slots = a.results.first().map_or(0, Type::rows);
        let mut out = vec![0.0; slots * hidden];
        for_each_slot(a, (rows, slots, experts), |e, slot, row| {
            let own = |all| matrix(all, e, experts);
            let x = &x[row * hidden..(row + 1) * hidden];
            let h = self.glu.of_row(x, own(gate_up), gate_up_bias.map(own));
            let y = matvec(&h, own(down), down_bias.map(own));
            out[slot * hidden..(slot + 1) * hidden].copy_from_slice(&y);
            Ok(())
        })?;
        Ok(one(out))
    }
}
