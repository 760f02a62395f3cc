//! Rows of a table.

use super::*;

impl Operator for Embed {
    const NAMES: &'static [&'static str] = &["embed"];
    const OPERANDS: &'static [Kind] = &[V, W];

    fn infer(&self, o: &Operands<'_>) -> Inferred {
        let [t] = o.shape(0, "ids", DType::I32)?;
        let [_, h] = o.matrix(1, "table")?;
        Ok(vec![f32(&[t, h])])
    }

    fn eval(&self, a: &Args<'_>) -> Evaluated {
        let (vocab, hidden, table) = (a.rows(1)?, a.cols(1)?, a.f32(1)?);
        let mut out = Vec::new();
        for &id in a.i32(0)? {
            let id = a.index("id", id, vocab)?;
            out.extend_from_slice(&table[id * hidden..(id + 1) * hidden]);
        }
        Ok(one(out))
    }
}
