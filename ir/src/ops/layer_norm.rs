//! Norm by mean and variance.

use super::*;

impl Operator for LayerNorm {
    const NAMES: &'static [&'static str] = &["layer_norm"];
    const OPERANDS: &'static [Kind] = &[V, W, W];

    fn infer(&self, o: &Operands<'_>) -> Inferred {
        let [t, c] = o.matrix(0, "x")?;
        o.exact(1, "weight", &f32(&[c]))?;
        o.exact(2, "bias", &f32(&[c]))?;
        Ok(vec![f32(&[t, c])])
    }

    fn eval(&self, a: &Args<'_>) -> Evaluated {
        let (width, weight, bias) = (a.cols(0)?, a.f32(1)?, a.f32(2)?);
        let mut out = Vec::new();
        for row in a.f32(0)?.chunks_exact(width) {
            let mean = row.iter().map(|&x| f64::from(x)).sum::<f64>() / width as f64;
            let variance = row.iter().map(|&x| (f64::from(x) - mean).powi(2)).sum::<f64>() / width as f64;
            let factor = 1.0 / (variance + f64::from(self.eps)).sqrt();
            for (c, &x) in row.iter().enumerate() {
                let y = (f64::from(x) - mean) * factor * f64::from(weight[c]) + f64::from(bias[c]);
                out.push(y as f32);
            }
        }
        Ok(one(out))
    }
}
