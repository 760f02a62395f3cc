//! Choices of zero-computation experts.

use super::*;

impl Operator for ZeroExperts {
    const NAMES: &'static [&'static str] = &["zero_experts"];
    const OPERANDS: &'static [Kind] = &[V, V];

    fn infer(&self, o: &Operands<'_>) -> Inferred {
        let [t, k] = o.shape(0, "ids", DType::I32)?;
        o.exact(1, "weights", &f32(&[t, k]))?;
        let all = self.experts.checked_add(self.zero).and_then(|n| i32::try_from(n).ok());
        o.require(all.is_some(), || format!("{} experts and {} more", self.experts, self.zero))?;
        Ok(vec![i32(&[t, k]), f32(&[t, 1])])
    }

    fn eval(&self, a: &Args<'_>) -> Evaluated {
        let (k, ids, weights) = (a.cols(0)?, a.i32(0)?, a.f32(1)?);
        let is_zero = |id: i32| {
            usize::try_from(id).is_ok_and(|id| (self.experts..self.experts + self.zero).contains(&id))
        };
        let rows = ids.chunks_exact(k).zip(weights.chunks_exact(k));
        let sum = |(ids, weights): (&[i32], &[f32])| -> f32 {
            let zeros = ids.iter().zip(weights).filter(|(id, _)| is_zero(**id));
            zeros.map(|(_, w)| f64::from(*w)).sum::<f64>() as f32
        };
        let served = ids.iter().map(|&id| if is_zero(id) { -1 } else { id }).collect();
        Ok(vec![Data::I32(served), Data::F32(rows.map(sum).collect())])
    }
}
