//! Rows times one matrix, of one projection or of a gate and an up projection.

use super::math::matvec;
use super::*;

/// Rows of the operands, and rows of the matrix.
fn rows(o: &Operands<'_>, bias: bool) -> Result<[usize; 2], TypeError> {
    let [t, k] = o.matrix(0, "x")?;
    let [n, wk] = o.matrix(1, "weight")?;
    o.require(k == wk, || format!("x has {k} channels, the weight takes {wk}"))?;
    if bias {
        o.exact(2, "bias", &f32(&[n]))?;
    }
    Ok([t, n])
}

impl Operator for Linear {
    const NAMES: &'static [&'static str] = &["linear"];
    const OPERANDS: &'static [Kind] = &[V, W];

    fn weights(&self) -> usize {
        usize::from(self.bias)
    }

    fn infer(&self, o: &Operands<'_>) -> Inferred {
        Ok(vec![f32(&rows(o, self.bias)?)])
    }

    fn eval(&self, a: &Args<'_>) -> Evaluated {
        let (k, w, bias) = (a.cols(0)?, a.f32(1)?, a.weight(2, self.bias)?);
        Ok(one(a.f32(0)?.chunks_exact(k).flat_map(|x| matvec(x, w, bias)).collect()))
    }
}

impl Operator for LinearGlu {
    const NAMES: &'static [&'static str] = &["linear_glu"];
    const OPERANDS: &'static [Kind] = &[V, W];

    fn weights(&self) -> usize {
        usize::from(self.bias)
    }

    fn infer(&self, o: &Operands<'_>) -> Inferred {
        self.glu.require_gate(o)?;
        let [t, n] = rows(o, self.bias)?;
        Ok(vec![f32(&[t, o.part(n, 2, "halves")?])])
    }

    fn eval(&self, a: &Args<'_>) -> Evaluated {
        let (k, w, bias) = (a.cols(0)?, a.f32(1)?, a.weight(2, self.bias)?);
        Ok(one(a.f32(0)?.chunks_exact(k).flat_map(|x| self.glu.of_row(x, w, bias)).collect()))
    }
}
