//! Log-probabilities of tokens.

/// The log-probabilities at one position: `ln softmax` of the model's own logits, in nats, independent of the
/// sampling options.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct LogProbabilities {
    /// The token that was chosen.
    pub id: u32,
    /// Its log-probability.
    pub chosen: f64,
    /// The most probable tokens with theirs, the most probable first, equal ones by id.
    pub most_probable: Vec<(u32, f64)>,
}

impl LogProbabilities {
    /// Computes the log-probabilities for `logits` (`f32[vocab]`): of the token `id`, and of the `n` most
    /// probable tokens. NaN logits count as −∞.
    pub fn of(logits: &[f32], id: u32, n: usize) -> Self {
        let norm = norm(logits);
        let of = |&z: &f32| if z.is_nan() { f64::NEG_INFINITY } else { f64::from(z) - norm };
        let mut all: Vec<(u32, f32)> = Vec::new();
        if n > 0 {
            all.extend(logits.iter().enumerate().filter(|(_, z)| !z.is_nan()).map(|(id, &z)| (id as u32, z)));
            let likelier = |a: &(u32, f32), b: &(u32, f32)| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0));
            if n < all.len() {
                all.select_nth_unstable_by(n - 1, likelier);
                all.truncate(n);
            }
            all.sort_unstable_by(likelier);
        }
        let most_probable = all.iter().map(|(id, z)| (*id, of(z))).collect();
        Self { id, chosen: logits.get(id as usize).map_or(f64::NEG_INFINITY, of), most_probable }
    }
}

/// `ln Σ exp(logits)`.
fn norm(logits: &[f32]) -> f64 {
    let max = logits.iter().copied().filter(|z| !z.is_nan()).fold(f32::NEG_INFINITY, f32::max);
    let sum: f64 = logits.iter().filter(|z| !z.is_nan()).map(|&z| f64::from(z - max).exp()).sum();
    f64::from(max) + sum.ln()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn log_probabilities_match_the_softmax() {
        let p = [0.05f32, 0.3, 0.5, 0.15];
        let logits: Vec<f32> = p.iter().map(|p| p.ln() - 7.0).collect();
        for (id, p) in p.into_iter().enumerate() {
            assert!((LogProbabilities::of(&logits, id as u32, 0).chosen - f64::from(p.ln())).abs() < 1e-6);
        }
        assert_eq!(LogProbabilities::of(&[0.0, f32::NAN], 0, 0).chosen, 0.0);
        let found = LogProbabilities::of(&logits, 0, 2);
        assert_eq!(found.most_probable.iter().map(|(id, _)| *id).collect::<Vec<_>>(), [2, 1]);
        assert!((found.most_probable[0].1 - 0.5f64.ln()).abs() < 1e-6);
        assert_eq!(LogProbabilities::of(&logits, 0, 9).most_probable.len(), 4);
        // A token outside of the vocabulary; of equal ones, the first.
        let found = LogProbabilities::of(&[1.0, 1.0], 7, 1);
        assert_eq!((found.chosen, found.most_probable[0].0), (f64::NEG_INFINITY, 0));
    }
}
