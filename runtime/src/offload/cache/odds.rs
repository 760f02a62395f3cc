//! Frequency with which predicted experts are requested, by their place in the prediction.
//!
//! A prediction ranks the experts of a layer. The first is nearly always right. The last of those that a
//! token uses is right about half of the time, and missed experts rank right after it. These shares are
//! measured as the model runs, only for experts that would have to be read: the others cost nothing.

/// Weight of the newest of many measurements.
const NEWEST: f64 = 0.01;
/// Number of measurements that the initial estimate counts for.
const PRIOR: f64 = 4.0;

/// Shares by rank in the prediction.
#[derive(Clone, Debug, Default)]
pub(crate) struct Odds {
    right: Vec<f64>,
    seen: Vec<f64>,
}

impl Odds {
    /// Creates the shares for `places` ranks, of which a token uses `k`. Initially half of the predicted
    /// experts count as right, and few of those ranked after them.
    pub(crate) fn new(places: usize, k: usize) -> Self {
        let belief = |place| if place < k { 0.5 } else { 0.1 };
        Self { right: (0..places).map(belief).collect(), seen: vec![PRIOR; places] }
    }

    /// Probability that the expert at a rank is requested.
    pub(crate) fn of(&self, place: usize) -> f64 {
        self.right.get(place).copied().unwrap_or(0.0)
    }

    /// Records whether the expert at a rank was requested.
    pub(crate) fn learn(&mut self, place: usize, right: bool) {
        if let (Some(share), Some(seen)) = (self.right.get_mut(place), self.seen.get_mut(place)) {
            *seen += 1.0;
            *share += (f64::from(u8::from(right)) - *share) * (1.0 / *seen).max(NEWEST);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn estimated_odds_converge_to_observed_frequencies() {
        let mut odds = Odds::new(4, 2);
        assert_eq!([0, 1, 2, 3, 4].map(|place| odds.of(place)), [0.5, 0.5, 0.1, 0.1, 0.0]);
        for i in 0..4000 {
            odds.learn(0, true);
            odds.learn(1, i % 4 == 0);
            odds.learn(9, true);
        }
        assert!(odds.of(0) > 0.98 && (odds.of(1) - 0.25).abs() < 0.1, "{odds:?}");
        assert_eq!(odds.of(2), 0.1);
    }
}
