//! Rotary embedding.

use super::*;

words! {
    /// Pairing of a head's channels in a rotation.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
    pub enum RopeStyle, "`half` or `interleaved`" {
        /// Channel `i` with `i + rotary/2`.
        Half = "half",
        /// Channel `2i` with `2i + 1`; the result keeps the interleaved order.
        Interleaved = "interleaved",
    }
}

impl Operator for Rope {
    const NAMES: &'static [&'static str] = &["rope"];
    const OPERANDS: &'static [Kind] = &[V, V];

    fn infer(&self, o: &Operands<'_>) -> Inferred {
        let offset = self.offset;
        let [t, width] = o.matrix(0, "x")?;
        let dim = o.part(width, self.heads, "heads")?;
        let [at, r] = o.matrix(1, "angles")?;
        o.require(at == t, || format!("x has {t} rows, angles {at}"))?;
        o.require(r % 2 == 0, || format!("{r} rotated channels are odd"))?;
        o.require(offset.checked_add(r).is_some_and(|end| end <= dim), || {
            format!("channels {offset} .. {offset} + {r} exceed the head's {dim}")
        })?;
        Ok(vec![f32(&[t, width])])
    }

    fn eval(&self, a: &Args<'_>) -> Evaluated {
        let (width, rotary, angles) = (a.cols(0)?, a.cols(1)?, a.f32(1)?);
        let (dim, half) = (width / self.heads, rotary / 2);
        let mut out = a.f32(0)?.to_vec();
        for (t, row) in out.chunks_exact_mut(width).enumerate() {
            let (cos, sin) = angles[t * rotary..(t + 1) * rotary].split_at(half);
            for head in row.chunks_exact_mut(dim) {
                let part = &mut head[self.offset..self.offset + rotary];
                for i in 0..half {
                    let (p, q) = match self.style {
                        RopeStyle::Half => (i, i + half),
                        RopeStyle::Interleaved => (2 * i, 2 * i + 1),
                    };
                    let (x, y) = (f64::from(part[p]), f64::from(part[q]));
                    let (c, s) = (f64::from(cos[i]), f64::from(sin[i]));
                    part[p] = (x * c - y * s) as f32;
                    part[q] = (y * c + x * s) as f32;
                }
            }
        }
        Ok(one(out))
    }
}
