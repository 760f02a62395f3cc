//! Conversion of a router's logits to the scores that policies read.

use moec_ir::op::Score;

/// Finds the largest scores of a layer. Ranking does not allocate.
#[derive(Clone, Debug)]
pub struct Ranking {
    /// All experts, then only those with the largest scores.
    all: Vec<(u16, f32)>,
    depth: usize,
}

impl Ranking {
    /// Creates a ranking for layers of up to `experts` experts, of which the `depth` largest scores are
    /// needed.
    pub fn new(experts: usize, depth: usize) -> Self {
        Self { all: Vec::with_capacity(experts), depth }
    }

    /// The largest scores for logits `f32[experts]`, in descending order, the lower index first among equals,
    /// as shares of 1. A softmax sums to 1 already; sigmoids are divided by their sum; if a router's scores
    /// are the logits themselves, their softmax is taken. NaN logits count as −∞.
    pub fn of_logits(&mut self, logits: &[f32], score: Score) -> &[(u16, f32)] {
        self.of_rows(1, &|_| logits, score)
    }

    /// As [`Ranking::of_logits`], for the mean of the shares of several rows with as many experts each.
    pub fn of_rows<'s>(
        &mut self,
        rows: usize,
        logits: &dyn Fn(usize) -> &'s [f32],
        score: Score,
    ) -> &[(u16, f32)] {
        self.all.clear();
        for row in 0..rows {
            let logits = logits(row);
            let max = logits.iter().copied().filter(|z| !z.is_nan()).fold(f32::NEG_INFINITY, f32::max);
            let value = |z: f32| match score {
                _ if z.is_nan() => 0.0,
                Score::Softmax | Score::Identity if max.is_infinite() => f32::from(u8::from(z == max)),
                Score::Softmax | Score::Identity => (z - max).exp(),
                Score::Sigmoid => 1.0 / (1.0 + (-z).exp()),
            };
            let sum: f32 = logits.iter().map(|&z| value(z)).sum();
            let share = if sum > 0.0 { 1.0 / sum } else { 0.0 } / rows as f32;
            if row == 0 {
                self.all.extend((0..).map(|e| (e, 0.0)).take(logits.len()));
            }
            self.all.iter_mut().zip(logits).for_each(|(of, &z)| of.1 += value(z) * share);
        }
        let larger = |a: &(u16, f32), b: &(u16, f32)| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0));
        if self.depth < self.all.len() {
            if self.depth > 0 {
                self.all.select_nth_unstable_by(self.depth - 1, larger);
            }
            self.all.truncate(self.depth);
        }
        self.all.sort_unstable_by(larger);
        &self.all
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_have_the_mean_of_their_shares() {
        let rows = [[0.0, 0.0, 0.0, f32::NEG_INFINITY], [f32::NEG_INFINITY, 5.0, 5.0, f32::NEG_INFINITY]];
        let mut ranking = Ranking::new(4, 3);
        let found = ranking.of_rows(2, &|row| &rows[row], Score::Softmax);
        let expected = [(1, 5.0 / 12.0), (2, 5.0 / 12.0), (0, 1.0 / 6.0)];
        for (found, expected) in found.iter().zip(expected) {
            assert!(found.0 == expected.0 && (found.1 - expected.1).abs() < 1e-6, "{found:?}");
        }
        assert!(ranking.of_rows(0, &|_| &[], Score::Softmax).is_empty());
    }

    #[test]
    fn ranks_shares_of_one() {
        let mut ranking = Ranking::new(4, 4);
        let logits = [1.0, 3.0, f32::NAN, 3.0];
        let found = ranking.of_logits(&logits, Score::Softmax).to_vec();
        assert_eq!(found.iter().map(|r| r.0).collect::<Vec<_>>(), [1, 3, 0, 2]);
        let total: f32 = found.iter().map(|r| r.1).sum();
        assert!((total - 1.0).abs() < 1e-6);
        assert!((found[0].1 / found[2].1 - 2.0_f32.exp()).abs() < 1e-4);
        let sigmoid = ranking.of_logits(&[0.0, 0.0, 0.0, 100.0], Score::Sigmoid);
        assert_eq!(sigmoid[0], (3, 0.4));
        assert_eq!(Ranking::new(4, 1).of_logits(&logits, Score::Softmax).len(), 1);
        assert!(Ranking::new(4, 0).of_logits(&logits, Score::Softmax).is_empty());
        assert_eq!(
            Ranking::new(2, 2).of_logits(&[f32::NEG_INFINITY, f32::INFINITY], Score::Softmax)[0],
            (1, 1.0)
        );
    }
}
