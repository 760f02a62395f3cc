//! A 1×1 convolution: each group of channels meets its own matrix at every place of every image.

use super::math::{matrix, matvec};
use super::*;

impl Operator for Conv1x1 {
    const NAMES: &'static [&'static str] = &["conv1x1"];
    const OPERANDS: &'static [Kind] = &[V, W];

    fn weights(&self) -> usize {
        usize::from(self.bias)
    }

    fn infer(&self, o: &Operands<'_>) -> Inferred {
        let groups = self.groups;
        let x = o.nchw(0, "x")?;
        let k = o.part(x.channels, groups, "groups")?;
        let w = o.get(1)?;
        let n = match *w.shape.as_slice() {
            [n, wk] if groups == 1 && wk == k => n,
            [wg, n, wk] if wg == groups && wk == k => n,
            _ => return Err(o.error(format!("weight is {w}, expected f32[{groups}, _, {k}]"))),
        };
        let out = o.mul(groups, n)?;
        if self.bias {
            o.exact(2, "bias", &f32(&[out]))?;
        }
        Ok(vec![x.of(out)])
    }

    fn eval(&self, a: &Args<'_>) -> Evaluated {
        let (k, w, bias) = (a.channels(0)? / self.groups, a.f32(1)?, a.weight(2, self.bias)?);
        let mut out = Vec::new();
        for (i, x) in a.f32(0)?.chunks_exact(k).enumerate() {
            let own = |all| matrix(all, i % self.groups, self.groups);
            out.extend(matvec(x, own(w), bias.map(own)));
        }
        Ok(one(out))
    }
}
