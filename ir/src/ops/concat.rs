//! Operands side by side.

use super::*;

impl Operator for Concat {
    const NAMES: &'static [&'static str] = &["concat"];
    const OPERANDS: &'static [Kind] = &[V, V];
    fn takes_more(&self) -> bool {
        true
    }

    fn infer(&self, o: &Operands<'_>) -> Inferred {
        let first = o.rows(0, "operand 0")?;
        let mut width = first.channels;
        o.part(width, self.heads, "heads")?;
        for i in 1..o.types.len() {
            let x = o.rows(i, &format!("operand {i}"))?;
            o.require(x.count == first.count, || {
                format!("operand {i} has {} rows, expected {}", x.count, first.count)
            })?;
            o.part(x.channels, self.heads, "heads")?;
            width = width.checked_add(x.channels).ok_or_else(|| o.error("width overflows"))?;
        }
        Ok(vec![first.of(width)])
    }

    fn eval(&self, a: &Args<'_>) -> Evaluated {
        let mut out = Vec::new();
        for block in 0..a.rows(0)? * self.heads {
            for i in 0..a.list.len() {
                let width = a.cols(i)? / self.heads;
                out.extend_from_slice(&a.f32(i)?[block * width..(block + 1) * width]);
            }
        }
        Ok(one(out))
    }
}
