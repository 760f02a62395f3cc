//! Some channels of each head.

use super::*;

impl Operator for Slice {
    const NAMES: &'static [&'static str] = &["slice"];
    const OPERANDS: &'static [Kind] = &[V];

    fn infer(&self, o: &Operands<'_>) -> Inferred {
        let Self { heads, start, len } = *self;
        let x = o.rows(0, "x")?;
        let c = o.part(x.channels, heads, "heads")?;
        o.require(len > 0 && start.checked_add(len).is_some_and(|end| end <= c), || {
            format!("channels {start} .. {start} + {len} of {c}")
        })?;
        Ok(vec![x.of(o.mul(heads, len)?)])
    }

    fn eval(&self, a: &Args<'_>) -> Evaluated {
        let (width, kept) = (a.cols(0)? / self.heads, self.start..self.start + self.len);
        Ok(one(a.f32(0)?.chunks_exact(width).flat_map(|head| &head[kept.clone()]).copied().collect()))
    }
}
