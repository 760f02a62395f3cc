//! Softmax of rows.

use super::*;

impl Operator for Softmax {
    const NAMES: &'static [&'static str] = &["softmax"];
    const OPERANDS: &'static [Kind] = &[V];

    fn infer(&self, o: &Operands<'_>) -> Inferred {
        Ok(vec![f32(&o.matrix(0, "x")?)])
    }

    fn eval(&self, a: &Args<'_>) -> Evaluated {
        let cols = a.cols(0)?;
        Ok(one(a.f32(0)?.chunks_exact(cols).flat_map(math::softmax).map(|x| x as f32).collect()))
    }
}
