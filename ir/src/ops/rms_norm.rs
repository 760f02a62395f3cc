//! Root mean square norm.

use super::math::dot;
use super::*;

impl Operator for RmsNorm {
    const NAMES: &'static [&'static str] = &["rms_norm"];
    const OPERANDS: &'static [Kind] = &[V];

    fn weights(&self) -> usize {
        usize::from(self.weight)
    }

    fn infer(&self, o: &Operands<'_>) -> Inferred {
        let x = o.rows(0, "x")?;
        let c = o.part(x.channels, self.groups, "groups")?;
        if self.weight {
            o.exact(1, "weight", &f32(&[c]))?;
        }
        Ok(vec![x.ty()])
    }

    fn eval(&self, a: &Args<'_>) -> Evaluated {
        let width = a.cols(0)? / self.groups;
        let weight = a.weight(1, self.weight)?;
        let mut out = Vec::new();
        for group in a.f32(0)?.chunks_exact(width) {
            let mean_square = dot(group, group) / width as f64;
            let factor = 1.0 / (mean_square + f64::from(self.eps)).sqrt();
            for (c, &x) in group.iter().enumerate() {
                let w = weight.map_or(1.0, |w| f64::from(w[c]));
                out.push((f64::from(x) * factor * w) as f32);
            }
        }
        Ok(one(out))
    }
}
