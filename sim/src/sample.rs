//! Loads of experts, sampled by their shares.

/// Samples `k` distinct experts for each of `tokens` tokens by their shares, and adds the counts to `loads`,
/// one for each share. Experts without a share are never sampled. `unit` returns numbers from 0 to below 1.
pub fn sample_experts(
    unit: &mut dyn FnMut() -> f64,
    shares: &[f64],
    k: usize,
    tokens: usize,
    loads: &mut [u32],
) {
    let mut sum = 0.0;
    let add = |share: &f64| {
        sum += share;
        sum
    };
    let sums: Vec<f64> = shares.iter().map(add).collect();
    let mut last = vec![usize::MAX; shares.len()];
    let k = k.min(shares.iter().filter(|share| **share > 0.0).count());
    for token in 0..tokens {
        let mut left = k;
        while left > 0 {
            let x = unit() * sum;
            let expert = sums.partition_point(|&s| s <= x).min(shares.len() - 1);
            if last[expert] != token {
                last[expert] = token;
                loads[expert] += 1;
                left -= 1;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::sample_experts;

    /// Numbers from 0 to 1 in steps of the golden ratio.
    fn golden() -> impl FnMut() -> f64 {
        let mut at = 0.0_f64;
        move || {
            at = (at + 0.618_033_988_749_895).fract();
            at
        }
    }

    #[test]
    fn single_expert_per_token_follows_its_share() {
        let mut loads = [5, 0, 0, 0];
        sample_experts(&mut golden(), &[0.1, 0.4, 0.0, 0.3], 1, 8000, &mut loads);
        assert_eq!(loads.iter().sum::<u32>(), 8005);
        for (found, expected) in loads.into_iter().zip([1005_u32, 4000, 0, 3000]) {
            assert!(found.abs_diff(expected) < 20, "{loads:?}");
        }
    }

    #[test]
    fn token_experts_are_distinct_and_have_a_share() {
        let mut loads = [0; 4];
        sample_experts(&mut golden(), &[0.98, 0.0, 0.01, 0.01], 3, 50, &mut loads);
        assert_eq!(loads, [50, 0, 50, 50]);
        // More experts per token are requested than have a share.
        sample_experts(&mut golden(), &[0.5, 0.0, 0.0, 0.5], 3, 10, &mut loads);
        assert_eq!(loads, [60, 0, 50, 60]);
        sample_experts(&mut golden(), &[], 3, 10, &mut []);
    }
}
