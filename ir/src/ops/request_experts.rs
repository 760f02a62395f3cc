//! Request for the next experts, made to the executor of the graph.

use super::*;

/// Most scores of a [`Op::RequestExperts`]: those of its own layer and of three layers ahead (HybriMoE,
/// §IV-C).
pub const MAX_REQUEST_SCORES: usize = 4;

impl Operator for RequestExperts {
    const NAMES: &'static [&'static str] = &["request_experts"];
    const OPERANDS: &'static [Kind] = &[V];

    fn signature(&self) -> Vec<Kind> {
        // A plan has no more; a wrong number is found by inference.
        vec![V; 1 + self.scores.min(MAX_REQUEST_SCORES)]
    }

    fn infer(&self, o: &Operands<'_>) -> Inferred {
        let (scores, most) = (self.scores, MAX_REQUEST_SCORES);
        let [words] = o.shape(0, "dispatch", DType::I32)?;
        o.require((1..=most).contains(&scores), || format!("{scores} scores, not 1 to {most}"))?;
        let [t, _] = o.matrix(1, "scores")?;
        for i in 2..=scores {
            let [rows, _] = o.matrix(i, "scores ahead")?;
            o.require(rows == t, || format!("scores of {rows} rows ahead of {t}"))?;
        }
        Ok(vec![i32(&[words])])
    }

    fn eval(&self, a: &Args<'_>) -> Evaluated {
        Ok(vec![Data::I32(a.i32(0)?.to_vec())])
    }
}
