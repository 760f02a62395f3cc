//! Chooses the next token.

use crate::error::{Error, Result};

/// How tokens are chosen.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sampling {
    /// Divides the logits; 0 chooses the largest one.
    pub temperature: f32,
    /// Only the likeliest tokens that together have at least this probability stay; 1 keeps all.
    pub top_p: f32,
    /// Only this many of the likeliest tokens stay; 0 keeps all.
    pub top_k: usize,
    /// Of the random numbers.
    pub seed: u64,
}

impl Default for Sampling {
    fn default() -> Self {
        Self { temperature: 0.0, top_p: 1.0, top_k: 0, seed: 0 }
    }
}

/// SplitMix64 (Steele, Lea, Flood 2014), written out so that a seed means the same in every version.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SplitMix64(pub(crate) u64);

impl SplitMix64 {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// Uniform in `[0, 1)`, with 53 bits.
    pub(crate) fn unit(&mut self) -> f64 {
        (self.next() >> 11) as f64 / (1u64 << 53) as f64
    }
}

/// Chooses tokens from logits, one after the other.
///
/// In this order: temperature, top-k, softmax over what is left, top-p, one draw. Ties go to the lowest
/// id. The same seed and logits give the same tokens.
#[derive(Clone, Debug)]
pub struct Sampler {
    how: Sampling,
    rng: SplitMix64,
    candidates: Vec<(f64, u32)>,
}

impl Sampler {
    /// A sampler at the start of its random numbers.
    pub fn new(how: Sampling) -> Self {
        Self { how, rng: SplitMix64(how.seed), candidates: Vec::new() }
    }

    /// The next token, given `logits` (`f32[vocab]`). Logits that are not numbers count as −∞.
    ///
    /// # Errors
    /// [`Error::NotFinite`] if the largest logit is not finite.
    pub fn sample(&mut self, logits: &[f32]) -> Result<u32> {
        let (best, max) = argmax(logits).ok_or(Error::NotFinite)?;
        if self.how.temperature <= 0.0 {
            return Ok(best);
        }
        let temperature = f64::from(self.how.temperature);
        let weight = |l: f32| if l.is_nan() { 0.0 } else { (f64::from(l - max) / temperature).exp() };
        let weights = logits.iter().enumerate().map(|(id, &l)| (weight(l), id as u32));
        let c = &mut self.candidates;
        c.clear();
        c.extend(weights.filter(|(w, _)| *w > 0.0));
        let likelier = |a: &(f64, u32), b: &(f64, u32)| b.0.total_cmp(&a.0).then(a.1.cmp(&b.1));
        if self.how.top_k > 0 && self.how.top_k < c.len() {
            c.select_nth_unstable_by(self.how.top_k - 1, likelier);
            c.truncate(self.how.top_k);
            // The order of what is left decides which token a seed draws.
            c.sort_unstable_by(likelier);
        }
        let mut total: f64 = c.iter().map(|(w, _)| w).sum();
        if self.how.top_p < 1.0 {
            // All tokens below this share together stay under 1 − p, so none of them is ever needed;
            // without them there is little to sort.
            let floor = (1.0 - f64::from(self.how.top_p)) * total / c.len() as f64;
            c.retain(|(w, _)| *w >= floor);
            c.sort_unstable_by(likelier);
            let enough = f64::from(self.how.top_p) * total;
            let mut sum = 0.0;
            let mut keep = 0;
            while keep < c.len() && sum < enough {
                sum += c[keep].0;
                keep += 1;
            }
            c.truncate(keep.max(1));
            total = c.iter().map(|(w, _)| w).sum();
        }
        let mut left = self.rng.unit() * total;
        for &(w, id) in &*c {
            left -= w;
            if left < 0.0 {
                return Ok(id);
            }
        }
        // Rounding can leave a hair.
        Ok(c.last().map_or(best, |&(_, id)| id))
    }
}

/// The lowest id of the largest logit, and that logit; none if it is not finite.
fn argmax(logits: &[f32]) -> Option<(u32, f32)> {
    let mut best: Option<(u32, f32)> = None;
    for (id, &l) in logits.iter().enumerate() {
        if best.is_none_or(|(_, b)| l > b) && !l.is_nan() {
            best = Some((id as u32, l));
        }
    }
    best.filter(|(_, l)| l.is_finite())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn draws(how: Sampling, logits: &[f32], n: usize) -> Vec<u32> {
        let mut sampler = Sampler::new(how);
        (0..n).map(|_| sampler.sample(logits).unwrap()).collect()
    }

    fn shares(ids: &[u32], vocab: usize) -> Vec<f64> {
        let mut count = vec![0.0; vocab];
        for &id in ids {
            count[id as usize] += 1.0 / ids.len() as f64;
        }
        count
    }

    const HOT: Sampling = Sampling { temperature: 1.0, top_p: 1.0, top_k: 0, seed: 7 };

    #[test]
    fn greedy_takes_the_lowest_of_the_largest() {
        assert_eq!(draws(Sampling::default(), &[0.0, 3.0, 3.0, f32::NAN], 2), [1, 1]);
        assert_eq!(draws(Sampling::default(), &[f32::NAN, f32::NEG_INFINITY, -2.0], 1), [2]);
    }

    #[test]
    fn no_numbers_no_token() {
        for bad in [vec![f32::NAN; 3], vec![f32::NEG_INFINITY; 2], vec![0.0, f32::INFINITY], vec![]] {
            assert!(matches!(Sampler::new(HOT).sample(&bad), Err(Error::NotFinite)), "{bad:?}");
        }
    }

    #[test]
    fn draws_follow_the_softmax() {
        let p = [0.5f32, 0.3, 0.15, 0.05];
        let logits: Vec<f32> = p.iter().map(|p| p.ln() + 4.0).collect();
        let found = shares(&draws(HOT, &logits, 40_000), 4);
        for (found, expected) in found.iter().zip(p) {
            assert!((found - f64::from(expected)).abs() < 0.01, "{found} {expected}");
        }
        // Half the temperature squares the odds.
        let found = shares(&draws(Sampling { temperature: 0.5, ..HOT }, &logits, 40_000), 4);
        let total: f32 = p.iter().map(|p| p * p).sum();
        for (found, expected) in found.iter().zip(p.map(|p| p * p / total)) {
            assert!((found - f64::from(expected)).abs() < 0.01, "{found} {expected}");
        }
    }

    #[test]
    fn cuts() {
        let logits: Vec<f32> = [0.5f32, 0.3, 0.15, 0.05].iter().map(|p| p.ln()).collect();
        let kept = |how| shares(&draws(how, &logits, 4000), 4).iter().filter(|&&s| s > 0.0).count();
        assert_eq!(kept(Sampling { top_k: 2, ..HOT }), 2);
        assert_eq!(kept(Sampling { top_p: 0.4, ..HOT }), 1);
        assert_eq!(kept(Sampling { top_p: 0.79, ..HOT }), 2);
        assert_eq!(kept(Sampling { top_p: 0.94, ..HOT }), 3);
        assert_eq!(kept(Sampling { top_p: 1e-9, ..HOT }), 1);
    }

    #[test]
    fn a_seed_is_a_sequence() {
        let logits = [0.0; 1000];
        assert_eq!(draws(HOT, &logits, 50), draws(HOT, &logits, 50));
        assert_ne!(draws(HOT, &logits, 50), draws(Sampling { seed: 8, ..HOT }, &logits, 50));
        // The published values for seed 1234567: a change here changes every user's texts.
        let mut rng = SplitMix64(1_234_567);
        assert_eq!([rng.next(), rng.next()], [6_457_827_717_110_365_317, 3_203_168_211_198_807_973]);
    }
}
