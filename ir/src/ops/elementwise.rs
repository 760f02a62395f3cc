//! Elementwise operators, but for activations.

use super::math::{map, zip};
use super::*;

impl Operator for Add {
    const NAMES: &'static [&'static str] = &["add"];
    const OPERANDS: &'static [Kind] = &[V, V];

    fn infer(&self, o: &Operands<'_>) -> Inferred {
        let a = o.rows(0, "a")?.ty();
        o.exact(1, "b", &a)?;
        Ok(vec![a])
    }

    fn eval(&self, a: &Args<'_>) -> Evaluated {
        zip(a, |x, y| x + y)
    }
}

impl Operator for Mul {
    const NAMES: &'static [&'static str] = &["mul"];
    const OPERANDS: &'static [Kind] = &[V, V];

    fn infer(&self, o: &Operands<'_>) -> Inferred {
        let (a, b) = (o.rows(0, "a")?, o.rows(1, "b")?);
        o.require(b == a || b == RowShape { channels: 1, ..a }, || {
            format!("b is {}, expected {} or {}", b.ty(), a.ty(), a.of(1))
        })?;
        Ok(vec![a.ty()])
    }

    fn eval(&self, a: &Args<'_>) -> Evaluated {
        let (cols, b_cols, b) = (a.cols(0)?, a.cols(1)?, a.f32(1)?);
        let factor = |i: usize| if b_cols == cols { b[i] } else { b[i / cols] };
        Ok(one(a.f32(0)?.iter().enumerate().map(|(i, &x)| x * factor(i)).collect()))
    }
}

impl Operator for Scale {
    const NAMES: &'static [&'static str] = &["scale"];
    const OPERANDS: &'static [Kind] = &[V];

    fn infer(&self, o: &Operands<'_>) -> Inferred {
        Ok(vec![o.rows(0, "x")?.ty()])
    }

    fn eval(&self, a: &Args<'_>) -> Evaluated {
        map(a, |x| x * self.factor)
    }
}

impl Operator for ScaleCols {
    const NAMES: &'static [&'static str] = &["scale_cols"];
    const OPERANDS: &'static [Kind] = &[V, W];

    fn infer(&self, o: &Operands<'_>) -> Inferred {
        let x = o.rows(0, "x")?;
        o.exact(1, "w", &f32(&[x.channels]))?;
        Ok(vec![x.ty()])
    }

    fn eval(&self, a: &Args<'_>) -> Evaluated {
        let w = a.f32(1)?;
        Ok(one(a.f32(0)?.iter().enumerate().map(|(i, &x)| x * w[i % w.len()]).collect()))
    }
}

impl Operator for Clamp {
    const NAMES: &'static [&'static str] = &["clamp"];
    const OPERANDS: &'static [Kind] = &[V];

    fn infer(&self, o: &Operands<'_>) -> Inferred {
        let (lo, hi) = (self.lo, self.hi);
        o.require(lo <= hi, || format!("bounds {lo:?} .. {hi:?} are empty"))?;
        Ok(vec![o.rows(0, "x")?.ty()])
    }

    fn eval(&self, a: &Args<'_>) -> Evaluated {
        map(a, |x| x.max(self.lo).min(self.hi))
    }
}

impl Operator for MulHeads {
    const NAMES: &'static [&'static str] = &["mul_heads"];
    const OPERANDS: &'static [Kind] = &[V, V];

    fn infer(&self, o: &Operands<'_>) -> Inferred {
        let [t, c] = o.matrix(0, "a")?;
        o.part(c, self.heads, "heads")?;
        o.exact(1, "b", &f32(&[t, self.heads]))?;
        Ok(vec![f32(&[t, c])])
    }

    fn eval(&self, a: &Args<'_>) -> Evaluated {
        let (each, b) = (a.cols(0)? / self.heads, a.f32(1)?);
        let heads = a.f32(0)?.chunks_exact(each).zip(b);
        Ok(one(heads.flat_map(|(head, b)| head.iter().map(move |x| x * b)).collect()))
    }
}

impl Operator for SoftCap {
    const NAMES: &'static [&'static str] = &["soft_cap"];
    const OPERANDS: &'static [Kind] = &[V];

    fn infer(&self, o: &Operands<'_>) -> Inferred {
        o.require(self.cap > 0.0, || format!("a cap of {:?}", self.cap))?;
        Ok(vec![o.rows(0, "x")?.ty()])
    }

    fn eval(&self, a: &Args<'_>) -> Evaluated {
        map(a, |x| (f64::from(self.cap) * f64::from(x / self.cap).tanh()) as f32)
    }
}

impl Operator for Softplus {
    const NAMES: &'static [&'static str] = &["softplus"];
    const OPERANDS: &'static [Kind] = &[V];

    fn infer(&self, o: &Operands<'_>) -> Inferred {
        Ok(vec![o.rows(0, "x")?.ty()])
    }

    /// In f64, without overflow.
    fn eval(&self, a: &Args<'_>) -> Evaluated {
        map(a, |x| {
            let x = f64::from(x);
            (x.max(0.0) + (-x.abs()).exp().ln_1p()) as f32
        })
    }
}
