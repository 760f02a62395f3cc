//! Rows, chosen by index.

use super::*;

impl Operator for GatherRows {
    const NAMES: &'static [&'static str] = &["gather_rows"];
    const OPERANDS: &'static [Kind] = &[V, V];

    fn infer(&self, o: &Operands<'_>) -> Inferred {
        let [_, c] = o.matrix(0, "x")?;
        let [r] = o.shape(1, "rows", DType::I32)?;
        Ok(vec![f32(&[r, c])])
    }

    fn eval(&self, a: &Args<'_>) -> Evaluated {
        let (rows, cols, x) = (a.rows(0)?, a.cols(0)?, a.f32(0)?);
        let mut out = Vec::new();
        for &row in a.i32(1)? {
            if row < 0 {
                out.extend(std::iter::repeat_n(0.0, cols));
            } else {
                let row = a.index("row", row, rows)?;
                out.extend_from_slice(&x[row * cols..(row + 1) * cols]);
            }
        }
        Ok(one(out))
    }
}
