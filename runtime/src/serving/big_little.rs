//! Big-little decoding (MoBiLE, §III): tokens get fewer experts where the model is confident anyway.
//!
//! A token is decoded in the little entry point first, whose routers choose fewer experts. If the largest
//! probability of its softmax exceeds γ, its logits are kept. Else the same position is decoded again with
//! all experts, which replaces the little pass's states at that position (Algorithm 1). Kept positions keep
//! the little pass's keys and values, as in the paper: their own sequence continues from them, but no other
//! one. A state that is not a cache goes back by a token, for which the engine takes a snapshot before each
//! little pass.

use crate::bundle::program::Program;
use crate::error::{Error, Result};
use crate::exec::engine::Engine;
use crate::kv::unsupported::check_snapshots;
use moec_ir::EntryKind;
use std::sync::atomic::{AtomicBool, Ordering};

/// Decodes the tokens of a batch: with all experts, or with fewer if that suffices.
#[derive(Clone, Debug, Default)]
pub struct Decoder {
    /// γ in `[0, 1)`, if fewer experts are tried first.
    gamma: Option<f32>,
    /// Counts; `None`: big-little decoding is off.
    fallbacks: Option<Fallbacks>,
}

/// Number of tokens that needed all experts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Fallbacks {
    /// Number of decoded tokens, without those of the prompt.
    pub tokens: usize,
    /// Those of them whose logits are the full model's.
    pub full: usize,
}

impl Fallbacks {
    /// The fallback ratio `r` of MoBiLE, equation 1; `None` without tokens.
    pub fn ratio(self) -> Option<f64> {
        (self.tokens > 0).then(|| self.full as f64 / self.tokens as f64)
    }

    /// Increase since `earlier`.
    #[must_use]
    pub fn since(self, earlier: Self) -> Self {
        Self { tokens: self.tokens - earlier.tokens, full: self.full - earlier.full }
    }
}

impl Decoder {
    /// Creates a decoder that uses all experts for every token.
    pub fn full() -> Self {
        Self::default()
    }

    /// Creates a decoder that tries fewer experts first, with γ in `[0, 1]`. No probability exceeds 1, so
    /// with γ = 1 every token is the full model's. The little one then does not run, and results are bitwise
    /// equal to those of [`Decoder::full`].
    ///
    /// # Errors
    /// [`Error::Usage`] if no little entry points were compiled, [`Error::Usage`] for another γ,
    /// [`Error::State`] for a state that cannot go back by a token, if the little one runs.
    pub fn big_little(program: &Program, gamma: f32) -> Result<Self> {
        if program.model.big_little.is_none() {
            return Err(Error::no_little());
        }
        if !(0.0..=1.0).contains(&gamma) {
            return Err(Error::range("gamma", "from 0 to 1", gamma.to_string()));
        }
        let gamma = Some(gamma).filter(|&g| g < 1.0);
        gamma.map_or(Ok(()), |_| check_snapshots(program))?;
        Ok(Self { gamma, fallbacks: Some(Fallbacks::default()) })
    }

    /// Creates the decoder that the bundle was built for: [`Decoder::big_little`] with the bundle's γ if it
    /// has little entry points.
    ///
    /// # Errors
    /// As [`Decoder::big_little`].
    pub fn of(program: &Program) -> Result<Self> {
        program.model.big_little.map_or_else(|| Ok(Self::full()), |b| Self::big_little(program, b.gamma))
    }

    /// Whether tokens may be decoded with fewer experts, so that keys and values of answers are
    /// approximations.
    pub(crate) fn is_reduced(&self) -> bool {
        self.gamma.is_some()
    }

    /// Number of tokens that needed all experts so far; `None` if fewer are never tried.
    pub fn fallbacks(&self) -> Option<Fallbacks> {
        self.fallbacks
    }

    /// As [`Engine::decode`]. `sink` gets every row of the batch once, with its final logits: first the rows
    /// of the little pass that are kept, then those that are decoded again, in one batch. It runs on the
    /// engine's threads, for several rows at once and in any order.
    ///
    /// # Errors
    /// As [`Engine::decode`].
    pub fn decode(
        &mut self,
        engine: &mut Engine<'_>,
        batch: &[(u32, usize, u32)],
        sink: &(dyn Fn(usize, &[f32]) + Sync),
    ) -> Result<()> {
        let full = match self.gamma {
            None => {
                engine.decode_on_threads(EntryKind::Decode, batch, sink)?;
                batch.len()
            }
            Some(gamma) => {
                let unsure: Vec<_> = batch.iter().map(|_| AtomicBool::new(false)).collect();
                engine.decode_on_threads(EntryKind::Little, batch, &|i, logits| {
                    if is_sure(logits, gamma) {
                        sink(i, logits);
                    } else {
                        unsure[i].store(true, Ordering::Relaxed);
                    }
                })?;
                let again: Vec<_> = (0..batch.len()).filter(|&i| unsure[i].load(Ordering::Relaxed)).collect();
                let rows: Vec<_> = again.iter().map(|&i| batch[i]).collect();
                engine.decode_on_threads(EntryKind::Decode, &rows, &|i, logits| sink(again[i], logits))?;
                again.len()
            }
        };
        if let Some(fallbacks) = &mut self.fallbacks {
            fallbacks.tokens += batch.len();
            fallbacks.full += full;
        }
        Ok(())
    }
}

/// Largest probability of the softmax of `logits`, which γ is compared with: `1 / Σ exp(z − max)`. `None` if
/// there are no logits, if one is NaN, or if the largest is infinite.
pub fn largest_probability(logits: &[f32]) -> Option<f64> {
    softmax_sum(logits, f64::INFINITY).map(|sum| 1.0 / sum)
}

/// Whether the largest probability of the softmax of `logits` exceeds `gamma`. False if there is none.
fn is_sure(logits: &[f32], gamma: f32) -> bool {
    softmax_sum(logits, 1.0 / f64::from(gamma)).is_some()
}

/// `Σ exp(z − max)`, if it is below `limit`; `None` for logits without a largest probability.
fn softmax_sum(logits: &[f32], limit: f64) -> Option<f64> {
    let max = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let mut sum = 0.0;
    for part in logits.chunks(1024) {
        sum += part.iter().map(|&z| f64::from(z - max).exp()).sum::<f64>();
        // The sum only grows; NaN compares false.
        if sum.is_nan() || sum >= limit {
            return None;
        }
    }
    (max.is_finite() && sum > 0.0).then_some(sum)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn token_is_confident_above_probability_gamma() {
        let logits = |p: &[f32]| p.iter().map(|p| p.ln() + 3.0).collect::<Vec<_>>();
        let of = |p: &[f32], gamma| is_sure(&logits(p), gamma);
        assert!(of(&[0.1, 0.71, 0.19], 0.7));
        assert!(!of(&[0.1, 0.69, 0.21], 0.7));
        // Above, not equal: two equal logits have exactly a half each.
        assert!(!is_sure(&[1.0, 1.0], 0.5) && is_sure(&[1.0, 1.0], 0.499_999));
        // A vocabulary of several blocks.
        let mut many = vec![0.0; 5000];
        assert!(!is_sure(&many, 0.01) && is_sure(&many, 0.0001));
        many[4321] = 20.0;
        assert!(is_sure(&many, 0.99));
    }

    #[test]
    fn gamma_0_accepts_all_logits_except_non_numbers() {
        assert!(is_sure(&vec![0.0; 100_000], 0.0));
        assert!(is_sure(&[-1e30, f32::NEG_INFINITY], 0.0));
        for bad in [&[f32::NAN, 0.0][..], &[f32::INFINITY, 0.0], &[f32::NEG_INFINITY; 2], &[]] {
            assert!(!is_sure(bad, 0.0) && !is_sure(bad, 0.5), "{bad:?}");
        }
    }

    #[test]
    fn largest_probability_is_that_of_the_softmax() {
        let p = largest_probability(&[0.1_f32.ln(), 0.65_f32.ln(), 0.25_f32.ln()]).unwrap_or_default();
        assert!((p - 0.65).abs() < 1e-6, "{p}");
        assert_eq!(largest_probability(&[1.0, 1.0]), Some(0.5));
        for bad in [&[f32::NAN, 0.0][..], &[f32::INFINITY, 0.0], &[f32::NEG_INFINITY; 2], &[]] {
            assert_eq!(largest_probability(bad), None, "{bad:?}");
        }
    }

    #[test]
    fn ratios() {
        let at = |tokens, full| Fallbacks { tokens, full };
        assert_eq!(at(0, 0).ratio(), None);
        assert_eq!(at(8, 2).ratio(), Some(0.25));
        assert_eq!(at(8, 2).since(at(5, 2)), at(3, 0));
    }
}
