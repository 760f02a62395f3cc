//! The sum of what experts gave.

use super::*;

impl Operator for Combine {
    const NAMES: &'static [&'static str] = &["combine"];
    const OPERANDS: &'static [Kind] = &[V, V, V];

    fn infer(&self, o: &Operands<'_>) -> Inferred {
        let [slots, h] = o.matrix(0, "y")?;
        let [words] = o.shape(1, "dispatch", DType::I32)?;
        let [t, k] = o.matrix(2, "weights")?;
        let want = o.mul(t, k)?;
        o.require(slots == want, || format!("y has {slots} rows, the weights {t} · {k}"))?;
        // The number of experts is not an operand: the table must fit for some number ≥ 1.
        let rest = slots.checked_mul(2).and_then(|s| words.checked_sub(s));
        o.require(rest.is_some_and(|r| r >= 7 && r % 2 == 1), || {
            format!("dispatch of {words} words does not hold {slots} slots")
        })?;
        Ok(vec![f32(&[t, h])])
    }

    /// Rows past those that the table counts are padding, and 0.
    fn eval(&self, a: &Args<'_>) -> Evaluated {
        let (slots, hidden, y, table) = (a.rows(0)?, a.cols(0)?, a.f32(0)?, a.i32(1)?);
        let (rows, k, weights) = (a.rows(2)?, a.cols(2)?, a.f32(2)?);
        // The slots of the pairs are the last words of the table.
        let of_pair = &table[table.len() - slots..];
        let valid = a.index("number of slots", table[1], slots + 1)? / k;
        let mut out = Vec::new();
        for row in 0..rows {
            let mut sum = vec![0.0_f64; hidden];
            if row < valid {
                for pair in (row * k..(row + 1) * k).filter(|&pair| !(self.partial && of_pair[pair] == -1)) {
                    let slot = a.index("slot", of_pair[pair], slots)?;
                    for (s, &y) in sum.iter_mut().zip(&y[slot * hidden..(slot + 1) * hidden]) {
                        *s += f64::from(weights[pair]) * f64::from(y);
                    }
                }
            }
            out.extend(sum.into_iter().map(|s| s as f32));
        }
        Ok(one(out))
    }
}
