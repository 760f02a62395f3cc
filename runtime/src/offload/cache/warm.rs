//! Initial expectations of a cache, from recorded uses of every expert.
//!
//! PowerInfer-2 (§4.2) fills its hot region from a profile before it starts. HybriMoE (§IV-D) begins with the
//! experts that a warm-up chose. Here nothing is fixed: a policy treats recorded uses as observed ones and
//! goes on counting.

use super::experts::ExpertIndex;

/// Maximum number of tokens that recorded routing counts for: as many observed tokens outweigh it.
pub(super) const MAX_RECORDED_WEIGHT: f64 = 1024.0;

/// Expectation from recorded routing for every expert, by its number.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Expected {
    /// Probability that a token uses it.
    pub(super) probability: Vec<f64>,
    /// Number of tokens that the probability counts for, by layer.
    pub(super) tokens: Vec<f64>,
}

/// Reads `uses`, `[layer][expert]`. A layer without recorded uses has no expectations.
pub(super) fn expected(experts: &ExpertIndex, uses: &[u32]) -> Expected {
    let (mut probability, mut tokens) = (vec![0.0; experts.count()], Vec::new());
    for (l, layer) in experts.layers().iter().enumerate() {
        let ids = experts.ids(l);
        let (first, last) = (ids.start as usize, ids.end as usize);
        let own = uses.get(first..last).unwrap_or_default();
        let seen = own.iter().map(|&n| f64::from(n)).sum::<f64>() / layer.k as f64;
        tokens.push(seen.min(MAX_RECORDED_WEIGHT));
        if seen > 0.0 {
            for (p, &n) in probability[first..last].iter_mut().zip(own) {
                *p = (f64::from(n) / seen).min(1.0);
            }
        }
    }
    Expected { probability, tokens }
}

#[cfg(test)]
mod tests {
    use super::super::CachedLayer;
    use super::*;

    #[test]
    fn uses_become_probabilities() {
        let layer = |experts, k| CachedLayer { experts, k, bytes: 1 };
        let experts = ExpertIndex::new(&[layer(3, 1), layer(2, 2), layer(2, 1)]).unwrap();
        let found = expected(&experts, &[6, 3, 1, 5, 5, 0, 0]);
        assert_eq!(found.probability, [0.6, 0.3, 0.1, 1.0, 1.0, 0.0, 0.0]);
        assert_eq!(found.tokens, [10.0, 5.0, 0.0]);
        let none = expected(&experts, &[]);
        assert!(none.probability.iter().chain(&none.tokens).all(|p| *p == 0.0));
        // More uses than are taken into account.
        let many = expected(&experts, &[4_000_000, 0, 0, 1, 1, 0, 0]);
        assert_eq!((many.tokens[0], many.probability[0]), (MAX_RECORDED_WEIGHT, 1.0));
    }
}
