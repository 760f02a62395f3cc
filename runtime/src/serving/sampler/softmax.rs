//! Passes over the logits of a whole vocabulary, in f32, a block at a time so that the compiler vectorizes
//! them. Sums are taken in a fixed order, so every machine gives the same bits.

/// Logits of a block.
const BLOCK: usize = 64;

/// The largest of some logits; NaN counts as −∞.
fn max(logits: &[f32]) -> f32 {
    logits.iter().fold(f32::NEG_INFINITY, |max, &l| if l > max { l } else { max })
}

/// The lowest id of the largest logit, and that logit; none if it is not finite. NaN counts as −∞.
pub(super) fn largest(logits: &[f32]) -> Option<(u32, f32)> {
    let mut best = (0, f32::NEG_INFINITY);
    for (number, block) in logits.chunks(BLOCK).enumerate() {
        let max = max(block);
        if max > best.1 {
            let at = block.iter().position(|&l| l == max).unwrap_or(0);
            best = (number * BLOCK + at, max);
        }
    }
    best.1.is_finite().then_some((best.0 as u32, best.1))
}

/// The `k` largest logits with their ids, in any order; of equal ones those of the lowest ids. NaN and −∞ are
/// left out. `found` is a reused buffer.
pub(super) fn largest_k(logits: &[f32], k: usize, found: &mut Vec<(f32, u32)>) {
    let before = |a: &(f32, u32), b: &(f32, u32)| b.0.total_cmp(&a.0).then(a.1.cmp(&b.1));
    let room = (4 * k).max(2 * BLOCK);
    let mut floor = f32::NEG_INFINITY;
    found.clear();
    for (number, block) in logits.chunks(BLOCK).enumerate() {
        // Ids ascend, so a logit that equals the smallest of the `k` has a higher id and loses.
        if max(block) <= floor {
            continue;
        }
        let ids = (number * BLOCK) as u32..;
        found.extend(block.iter().copied().zip(ids).filter(|&(l, _)| l > floor));
        if found.len() >= room {
            found.select_nth_unstable_by(k - 1, before);
            found.truncate(k);
            floor = found[k - 1].0;
        }
    }
    if found.len() > k {
        found.select_nth_unstable_by(k - 1, before);
        found.truncate(k);
    }
}

/// Weights of all tokens, in proportion to their probabilities.
#[derive(Debug, Default)]
pub(super) struct Weights {
    /// `exp((logit − max) / temperature)`, by id; the largest is 1.
    all: Vec<f32>,
    /// Sums of the weights, by block.
    sums: Vec<f32>,
    /// Sum of all weights.
    total: f64,
}

impl Weights {
    /// Computes the weights of `logits`, whose largest is `max`.
    pub(super) fn set(&mut self, logits: &[f32], max: f32, temperature: f32) {
        let Self { all, sums, total } = self;
        all.resize(logits.len(), 0.0);
        sums.clear();
        let scale = temperature.recip();
        for (weights, block) in all.chunks_mut(BLOCK).zip(logits.chunks(BLOCK)) {
            for (w, &l) in weights.iter_mut().zip(block) {
                *w = exp((l - max) * scale);
            }
            let mut lanes = [0.0_f32; 8];
            for part in weights.chunks(8) {
                lanes.iter_mut().zip(part).for_each(|(sum, w)| *sum += w);
            }
            sums.push(lanes.iter().sum());
        }
        *total = sums.iter().map(|&sum| f64::from(sum)).sum();
    }

    /// Sum of all weights.
    pub(super) fn total(&self) -> f64 {
        self.total
    }

    /// Writes the weights of at least `floor` that are above 0, with their ids, in the order of ids.
    pub(super) fn at_least(&self, floor: f64, found: &mut Vec<(f64, u32)>) {
        found.clear();
        let weights = (0..).zip(&self.all).map(|(id, &w)| (f64::from(w), id));
        found.extend(weights.filter(|&(w, _)| w > 0.0 && w >= floor));
    }

    /// The token at a share in `0 .. 1` of the total, in the order of ids; none where rounding leaves none.
    pub(super) fn at(&self, share: f64) -> Option<u32> {
        let mut left = share * self.total;
        for (number, (block, &sum)) in self.all.chunks(BLOCK).zip(&self.sums).enumerate() {
            if left >= f64::from(sum) {
                left -= f64::from(sum);
                continue;
            }
            for (at, &w) in block.iter().enumerate() {
                left -= f64::from(w);
                if left < 0.0 {
                    return Some((number * BLOCK + at) as u32);
                }
            }
        }
        None
    }
}

/// `eˣ` of a number that is 0 or less, within 2 units in the last place; 0 below −87, and of NaN.
///
/// `x = n · ln 2 + r`; `eʳ` by its Taylor polynomial of degree 6, `2ⁿ` by the exponent's bits.
fn exp(x: f32) -> f32 {
    /// 1.5 · 2²³: a sum with it is rounded to an integer, which its low bits hold.
    const ROUND: f32 = 12_582_912.0;
    /// ln 2 in two parts: products of the first with small integers are exact.
    const LN_2: [f32; 2] = [0.693_359_4, -2.121_944_4e-4];
    let rounded = x * std::f32::consts::LOG2_E + ROUND;
    let n = rounded - ROUND;
    let r = (x - n * LN_2[0]) - n * LN_2[1];
    let terms = [1.0 / 120.0, 1.0 / 24.0, 1.0 / 6.0, 0.5, 1.0, 1.0];
    let e = terms.iter().fold(1.0 / 720.0, |sum, term| sum * r + term);
    let power = f32::from_bits((rounded.to_bits() << 23).wrapping_add(1.0_f32.to_bits()));
    if x >= -87.0 { e * power } else { 0.0 }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn exponential_is_accurate_to_the_last_digits() {
        for i in 0..=870_000 {
            let x = -(i as f32) / 10_000.0;
            let want = f64::from(x).exp();
            let found = f64::from(exp(x));
            assert!((found - want).abs() <= 3e-7 * want, "{x}: {found}, not {want}");
        }
        assert_eq!([exp(0.0), exp(-87.1), exp(f32::NEG_INFINITY), exp(f32::NAN)], [1.0, 0.0, 0.0, 0.0]);
    }

    fn logits() -> impl Strategy<Value = Vec<f32>> {
        let one = prop_oneof![
            8 => -30.0..30.0_f32,
            // Ties.
            4 => (-3..3_i32).prop_map(|i| i as f32),
            1 => Just(f32::NAN),
            1 => Just(f32::NEG_INFINITY),
        ];
        proptest::collection::vec(one, 0..700)
    }

    proptest! {
        #[test]
        fn largest_logits_match_a_full_sort(logits in logits(), k in 1..90_usize) {
            let mut sorted: Vec<(f32, u32)> =
                logits.iter().copied().zip(0..).filter(|(l, _)| *l > f32::NEG_INFINITY).collect();
            sorted.sort_by(|a, b| b.0.total_cmp(&a.0).then(a.1.cmp(&b.1)));
            // Zeros of both signs are equal for a sampler.
            let first = sorted.iter().copied().reduce(|a, b| if b.0 > a.0 || b.0 == a.0 && b.1 < a.1 { b } else { a });
            prop_assert_eq!(largest(&logits), first.map(|(l, id)| (id, l)));
            let mut found = Vec::new();
            largest_k(&logits, k, &mut found);
            found.sort_by(|a, b| b.0.total_cmp(&a.0).then(a.1.cmp(&b.1)));
            sorted.truncate(k);
            prop_assert_eq!(found, sorted);
        }

        #[test]
        fn share_of_the_total_weight_selects_a_token(logits in logits(), share in 0.0..1.0_f64) {
            let Some((_, max)) = largest(&logits) else { return Ok(()) };
            let mut weights = Weights::default();
            weights.set(&logits, max, 0.7);
            let of = |l: f32| if l.is_nan() { 0.0 } else { (f64::from(l - max) / 0.7_f32 as f64).exp() };
            let total: f64 = logits.iter().map(|&l| of(l)).sum();
            prop_assert!((weights.total() - total).abs() <= 1e-6 * total);
            let Some(id) = weights.at(share) else { return Ok(()) };
            let before: f64 = logits[..id as usize].iter().map(|&l| of(l)).sum();
            let own = of(logits[id as usize]);
            prop_assert!(before <= share * total + 1e-6 * total && share * total <= before + own + 1e-6 * total);
            prop_assert!(own > 0.0);
        }
    }
}
