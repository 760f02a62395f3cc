//! Sampler: chooses the next token.
//!
//! In this order: logit bias, repetition penalty, presence and frequency penalties, the masks of constraints;
//! the largest logit where the temperature is 0; else temperature, softmax, top-k, top-p, min-p, typical-p,
//! one random choice. Ties go to the lowest id. The same seed, options and logits give the same tokens. The
//! stages are two tables in `stages`; `softmax` has the passes over whole vocabularies.

mod log_probabilities;
mod options;
mod random;
mod softmax;
mod stages;
#[cfg(test)]
mod tests;

use crate::error::{Error, Result};
pub use log_probabilities::LogProbabilities;
pub use options::{MAX_TOP_LOGPROBS, Sampling};
pub use random::SplitMix64;
use softmax::{Weights, largest, largest_k};
use stages::{CANDIDATE_FILTERS, Candidate, History, LOGITS_PROCESSORS};

/// Constraint on an answer: the tokens that may come next, given the previous ones.
pub trait Constraint: Send {
    /// Sets the logits of tokens that may not come next to −∞.
    ///
    /// # Errors
    /// The constraint cannot continue.
    fn mask(&mut self, logits: &mut [f32]) -> Result<()>;

    /// Records a chosen token.
    ///
    /// # Errors
    /// The token is not allowed there.
    fn accept(&mut self, id: u32) -> Result<()>;

    /// Whether the answer is complete, so that nothing may follow.
    fn ended(&self) -> bool;
}

/// Chooses tokens from logits, one after the other.
pub struct Sampler {
    sampling: Sampling,
    rng: SplitMix64,
    constraints: Vec<Box<dyn Constraint>>,
    /// Tokens of the prompt and of the answer.
    seen: History,
    last: Option<LogProbabilities>,
    /// Logits that stages have changed, kept for the next token.
    logits: Vec<f32>,
    buffers: Buffers,
}

/// Buffers of one sampling, reused for the next one.
#[derive(Default)]
struct Buffers {
    largest: Vec<(f32, u32)>,
    weights: Weights,
    candidates: Vec<Candidate>,
}

impl std::fmt::Debug for Sampler {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Sampler")
            .field("sampling", &self.sampling)
            .field("constraints", &self.constraints.len())
            .finish_non_exhaustive()
    }
}

impl Sampler {
    /// Creates a sampler at the start of its random numbers.
    pub fn new(sampling: Sampling) -> Self {
        let rng = SplitMix64(sampling.seed);
        Self {
            sampling,
            rng,
            constraints: Vec::new(),
            seen: History::new(),
            last: None,
            logits: Vec::new(),
            buffers: Buffers::default(),
        }
    }

    /// Adds a constraint on all tokens that the sampler chooses.
    #[must_use]
    pub fn constrained(mut self, constraint: Box<dyn Constraint>) -> Self {
        self.constraints.push(constraint);
        self
    }

    /// Its options.
    pub fn sampling(&self) -> &Sampling {
        &self.sampling
    }

    /// Begins an answer to a prompt: penalties count from here. Random numbers and constraints continue.
    pub fn begin(&mut self, prompt: &[u32]) {
        self.seen.clear();
        self.last = None;
        self.seen.extend(prompt.iter().map(|&id| (id, stages::Occurrences::default())));
    }

    /// The next token, given `logits` (`f32[vocab]`). NaN logits count as −∞. The token is recorded as
    /// chosen.
    ///
    /// # Errors
    /// [`Error::Model`] if the largest logit is not finite, [`Error::Request`] if no token may follow, and
    /// errors of constraints.
    pub fn sample(&mut self, logits: &[f32]) -> Result<u32> {
        let id = self.choose(logits)?;
        self.constraints.iter_mut().try_for_each(|c| c.accept(id))?;
        self.seen.entry(id).or_default().answer += 1;
        self.last = self.sampling.log_probabilities.map(|n| LogProbabilities::of(logits, id, n));
        Ok(id)
    }

    /// Log-probabilities at the last token, if the options request them.
    pub fn last(&self) -> Option<&LogProbabilities> {
        self.last.as_ref()
    }

    /// Whether a constraint reports that the answer is complete.
    pub fn ended(&self) -> bool {
        self.constraints.iter().any(|c| c.ended())
    }

    fn choose(&mut self, logits: &[f32]) -> Result<u32> {
        let Self { sampling, rng, constraints, seen, logits: changed, buffers, .. } = self;
        let active = LOGITS_PROCESSORS.iter().filter(|p| (p.is_active)(sampling));
        if constraints.is_empty() && active.clone().next().is_none() {
            return buffers.sample(sampling, rng, logits).ok_or_else(Error::not_finite);
        }
        // A fault of the model must not be attributed to the stages.
        largest(logits).ok_or_else(Error::not_finite)?;
        changed.clear();
        changed.extend_from_slice(logits);
        active.for_each(|p| (p.apply)(sampling, seen, changed));
        constraints.iter_mut().try_for_each(|c| c.mask(changed))?;
        buffers.sample(sampling, rng, changed).ok_or_else(|| {
            Error::request("no token may come next: biases or a grammar forbid all of them")
                .with_hint("give fewer biases of −∞, or a grammar that the vocabulary can write")
        })
    }
}

impl Buffers {
    /// Samples a token; `None` if the largest logit is not finite.
    ///
    /// The work over the whole vocabulary is minimal. Top-k takes exponentials of its results only, and top-p
    /// and min-p keep only tokens that can remain. Without cuts, no candidates are made.
    fn sample(&mut self, sampling: &Sampling, rng: &mut SplitMix64, logits: &[f32]) -> Option<u32> {
        let (best, max) = largest(logits)?;
        if sampling.temperature <= 0.0 {
            return Some(best);
        }
        let Self { largest, weights, candidates: c } = self;
        let mut total = if (1..logits.len()).contains(&sampling.top_k) {
            largest_k(logits, sampling.top_k, largest);
            let temperature = f64::from(sampling.temperature);
            c.clear();
            c.extend(largest.iter().map(|&(l, id)| ((f64::from(l - max) / temperature).exp(), id)));
            c.retain(|(w, _)| *w > 0.0);
            // The order of the remaining candidates decides which token a seed samples.
            c.sort_unstable_by(stages::likelier);
            stages::total(c)
        } else {
            weights.set(logits, max, sampling.temperature);
            if !CANDIDATE_FILTERS.iter().any(|filter| (filter.is_active)(sampling)) {
                return Some(weights.at(rng.unit()).unwrap_or(best));
            }
            weights.at_least(stages::floor(sampling, weights.total(), logits.len()), c);
            weights.total()
        };
        for filter in CANDIDATE_FILTERS.iter().filter(|filter| (filter.is_active)(sampling)) {
            (filter.apply)(sampling, c, total);
            total = stages::total(c);
        }
        let mut left = rng.unit() * total;
        for &(w, id) in &*c {
            left -= w;
            if left < 0.0 {
                return Some(id);
            }
        }
        // Rounding can leave a small remainder.
        Some(c.last().map_or(best, |&(_, id)| id))
    }
}
