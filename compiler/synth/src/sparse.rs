//! Gates that leave zeros.
//!
//! With the first number of its row a gate reads the channel that is the same in every token: `relu(b + z)`
//! with `z` normal is more than 0 for a share `Φ(b)` of the tokens. Some neurons are requested much more
//! often than others, as in trained models: the frequency of a neuron falls with its rank to the power of
//! [`FALL`] (as the synthetic activations of `docs/neuron-cache.md`), and the ranks are drawn anew
//! for every expert. Tokens that follow each other request no more of the same neurons than these frequencies
//! make them.

use super::GRID;
use super::{Numbers, probit};

/// By which power of its rank a neuron's frequency falls.
const FALL: f64 = 0.6;
/// The most often that a neuron is active.
const MOST: f64 = 0.999;

/// Biases of a gate's rows, in standard deviations of their random part, so that `zeros` of `count` neurons
/// are 0 in the mean: the most frequent neuron first.
pub(super) fn biases(zeros: f64, count: usize) -> Vec<f64> {
    let often = |top: f64, rank: usize| (top * (rank as f64 + 1.0).powf(-FALL)).min(MOST);
    let mean = |top: f64| (0..count).map(|r| often(top, r)).sum::<f64>() / count.max(1) as f64;
    // The mean grows with the factor: it is found by halving.
    let (mut low, mut high) = (0.0, (count as f64 + 1.0).powf(FALL));
    for _ in 0..64 {
        let middle = f64::midpoint(low, high);
        if mean(middle) < 1.0 - zeros { low = middle } else { high = middle }
    }
    (0..count).map(|r| probit(often(high, r))).collect()
}

/// The biases in an order that follows from a seed (Fisher and Yates).
pub(super) fn shuffled(biases: &[f64], seed: u64) -> Vec<f64> {
    let (mut own, mut numbers) = (biases.to_vec(), Numbers(seed));
    for i in (1..own.len()).rev() {
        own.swap(i, (numbers.next() % (i as u64 + 1)) as usize);
    }
    own
}

/// Mean sum of squares of `relu(g) · u` over neurons with these biases, for `g` and `u` of standard deviation
/// `std`.
pub(super) fn power(biases: &[f64], std: f64) -> f64 {
    let normal: Vec<f64> = (0..GRID).map(|i| probit((f64::from(i) + 0.5) / f64::from(GRID))).collect();
    let square = |b: &f64| normal.iter().map(|z| (b + z).max(0.0).powi(2)).sum::<f64>() / f64::from(GRID);
    std.powi(4) * biases.iter().map(square).sum::<f64>()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Share of a normal variable below a number, by halving.
    fn phi(x: f64) -> f64 {
        let (mut low, mut high) = (0.0, 1.0);
        for _ in 0..60 {
            let middle = f64::midpoint(low, high);
            if probit(middle) < x { low = middle } else { high = middle }
        }
        low
    }

    #[test]
    fn frequencies_fall_and_have_the_mean_that_is_requested() {
        for zeros in [0.05, 0.5, 0.7, 0.9, 0.99] {
            let biases = biases(zeros, 1024);
            assert!(biases.is_sorted_by(|a, b| a >= b));
            let active = biases.iter().map(|b| phi(*b)).sum::<f64>() / 1024.0;
            assert!((active - (1.0 - zeros)).abs() < 1e-3, "{zeros}: {active}");
        }
        let (hot, cold) = (phi(biases(0.9, 1024)[0]), phi(biases(0.9, 1024)[1023]));
        assert!(hot > 0.9 && cold < 0.1, "{hot} {cold}");
    }

    #[test]
    fn every_expert_has_the_same_biases_in_its_own_order() {
        let biases = biases(0.7, 100);
        let [one, other] = [1, 2].map(|seed| shuffled(&biases, seed));
        assert_ne!(one, other);
        assert_eq!(one, shuffled(&biases, 1));
        let mut back = one;
        back.sort_by(|a, b| b.total_cmp(a));
        assert_eq!(back, biases);
    }

    #[test]
    fn gate_power_follows_its_bias() {
        assert!((power(&[0.0, 0.0], 1.0) - 1.0).abs() < 2e-3);
        assert!((power(&[9.0], 1.0) - 82.0).abs() < 0.1);
    }
}
