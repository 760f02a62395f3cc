//! Rows, channels-first and back. With one place in every image, both forms have the same numbers in the same order.

use super::math::map;
use super::*;

impl Operator for ToNchw {
    const NAMES: &'static [&'static str] = &["to_nchw"];
    const OPERANDS: &'static [Kind] = &[V];

    fn infer(&self, o: &Operands<'_>) -> Inferred {
        let [t, c] = o.matrix(0, "x")?;
        Ok(vec![f32(&[t, c, 1, 1])])
    }

    fn eval(&self, a: &Args<'_>) -> Evaluated {
        map(a, |x| x)
    }
}

impl Operator for FromNchw {
    const NAMES: &'static [&'static str] = &["from_nchw"];
    const OPERANDS: &'static [Kind] = &[V];

    fn infer(&self, o: &Operands<'_>) -> Inferred {
        let x = o.nchw(0, "x")?;
        Ok(vec![f32(&[x.count, x.channels])])
    }

    fn eval(&self, a: &Args<'_>) -> Evaluated {
        map(a, |x| x)
    }
}
