//! Rows scaled by their positions.

use super::*;

impl Operator for ScaleByPosition {
    const NAMES: &'static [&'static str] = &["scale_by_position"];
    const OPERANDS: &'static [Kind] = &[V, V];

    fn infer(&self, o: &Operands<'_>) -> Inferred {
        let fits = |n: usize| i32::try_from(n).is_ok();
        o.require(self.every > 0 && fits(self.every) && fits(self.offset), || {
            format!("a factor for every {} positions from {} on", self.every, self.offset)
        })?;
        let [t, c] = o.matrix(0, "x")?;
        o.exact(1, "pos", &i32(&[t]))?;
        Ok(vec![f32(&[t, c])])
    }

    fn eval(&self, a: &Args<'_>) -> Evaluated {
        let (cols, pos) = (a.cols(0)?, a.i32(1)?);
        let factor = |pos: i32| {
            let steps = (i64::from(pos.max(0)) + self.offset as i64) / self.every as i64;
            (1.0 + f64::from(self.beta) * (steps as f64).ln_1p()) as f32
        };
        let rows = a.f32(0)?.chunks_exact(cols).zip(pos);
        Ok(one(rows.flat_map(|(row, &pos)| row.iter().map(move |x| x * factor(pos))).collect()))
    }
}
