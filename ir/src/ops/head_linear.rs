//! Heads times a matrix each.

use super::math::{matrix, matvec};
use super::*;

impl Operator for HeadLinear {
    const NAMES: &'static [&'static str] = &["head_linear"];
    const OPERANDS: &'static [Kind] = &[V, W];

    fn infer(&self, o: &Operands<'_>) -> Inferred {
        let heads = self.heads;
        let [t, width] = o.matrix(0, "x")?;
        let k = o.part(width, heads, "heads")?;
        let [wh, n, wk] = o.shape(1, "weight", DType::F32)?;
        o.require(wh == heads && wk == k, || {
            format!("weight is f32{:?}, expected f32[{heads}, _, {k}]", [wh, n, wk])
        })?;
        Ok(vec![f32(&[t, o.mul(heads, n)?])])
    }

    fn eval(&self, a: &Args<'_>) -> Evaluated {
        let (k, w) = (a.cols(1)?, a.f32(1)?);
        let mut out = Vec::new();
        for (i, x) in a.f32(0)?.chunks_exact(k).enumerate() {
            out.extend(matvec(x, matrix(w, i % self.heads, self.heads), None));
        }
        Ok(one(out))
    }
}
