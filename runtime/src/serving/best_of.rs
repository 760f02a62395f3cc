//! Best-of-N sampling (PowerInfer-2, §4.1.3): several sequences after one prompt, of which the most probable
//! is the result.
//!
//! The prompt is prefilled once, and its states are copied to the slots of the other sequences. All are
//! decoded in one batch. As sequences end, the batch moves to the smallest entry point that holds the
//! remaining ones.

use crate::error::{Error, Result};
use crate::exec::engine::Engine;
use crate::serving::big_little::{Decoder, Fallbacks};
use crate::serving::generate::{Request, check_context, rate};
use crate::serving::sampler::{Sampler, Sampling};
use crate::serving::scheduler::{Choose, End, Event, Job, Scheduler, Setting, StepWork};
use std::cell::RefCell;
use std::time::Duration;

/// One of the sequences.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Candidate {
    /// Seed of its random numbers.
    pub seed: u64,
    /// The generated ids, an end token included.
    pub ids: Vec<u32>,
    /// Sum over the ids of `ln p`, where `p` is the softmax of the model's logits at the id, without
    /// temperature and cuts.
    pub log_probability: f64,
    /// Whether it is complete: with an end token, or with as many tokens as were requested.
    pub ended: bool,
}

impl Candidate {
    /// Mean log-probability of a token, by which sequences of different lengths compare.
    pub fn score(&self) -> f64 {
        self.log_probability / self.ids.len().max(1) as f64
    }
}

/// Sequences, with their times.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct BestOf {
    /// In the order of their slots.
    pub candidates: Vec<Candidate>,
    /// Tokens of the prompt.
    pub prompt: usize,
    /// Time to the logits after the prompt, and to fill the slots of all sequences.
    pub prefill: Duration,
    /// Time of the later calls.
    pub decode: Duration,
    /// Number of sequences in each later call; never more than in the call before.
    pub calls: Vec<usize>,
    /// Number of ids, without the first of each sequence, that needed all experts; `None` if fewer are never
    /// tried.
    pub fallbacks: Option<Fallbacks>,
}

impl BestOf {
    /// Indices of the candidates, complete ones first; within both groups by score, the best first, equal
    /// ones in order.
    pub fn ranking(&self) -> Vec<usize> {
        let mut order: Vec<usize> = (0..self.candidates.len()).collect();
        order.sort_by(|&a, &b| {
            let [a, b] = [a, b].map(|i| &self.candidates[i]);
            b.ended.cmp(&a.ended).then(b.score().total_cmp(&a.score()))
        });
        order
    }

    /// Prompt tokens per second.
    pub fn prefill_rate(&self) -> Option<f64> {
        rate(self.prompt, self.prefill)
    }

    /// Generated tokens of all sequences per second, without the first of each.
    pub fn decode_rate(&self) -> Option<f64> {
        rate(self.calls.iter().sum(), self.decode)
    }
}

/// Generates `many` sequences after a prompt, in the slots from `request.slot` on. Sequence `i` is sampled
/// with the seed `sampling.seed + i`. It equals the result of [`crate::generate()`] with that seed, except where
/// kernels for several rows, which sum in another order, change a choice. `n` and the end tokens are those of
/// the request.
///
/// # Errors
/// As [`crate::generate()`]; more sequences than there are slots; a temperature of 0, with which all
/// sequences would be equal.
pub fn best_of(
    engine: &mut Engine<'_>,
    request: &Request<'_>,
    many: usize,
    decoder: &mut Decoder,
    sampling: &Sampling,
) -> Result<BestOf> {
    let mut out = BestOf::default();
    best_of_into(engine, request, many, decoder, (sampling, &mut |sampler| Ok(sampler)), &mut out)?;
    Ok(out)
}

/// Function that changes a sequence's sampler before it samples, for example to add constraints.
pub type ConfigureSampler<'m> = dyn FnMut(Sampler) -> Result<Sampler> + 'm;

/// As [`best_of`], with each sampler changed by `made`. `out` keeps what was sampled before an error or an
/// interrupt; there are no candidates before the logits of the prompt.
///
/// # Errors
/// As [`best_of`], and those of `made`.
pub fn best_of_into(
    engine: &mut Engine<'_>,
    request: &Request<'_>,
    many: usize,
    decoder: &mut Decoder,
    (sampling, made): (&Sampling, &mut ConfigureSampler<'_>),
    out: &mut BestOf,
) -> Result<()> {
    let Request { slot: first, prompt, n, .. } = *request;
    *out = BestOf { prompt: prompt.len(), ..BestOf::default() };
    let model = &engine.program().model;
    check_context(prompt.len(), n, model.max_context as usize)?;
    let slots = model.slots;
    let room = slots.saturating_sub(first) as usize;
    if many > room {
        return Err(Error::few_slots(many.saturating_add(first as usize), slots));
    }
    if many > 1 && sampling.temperature <= 0.0 {
        let (range, found) =
            ("above 0 where several sequences are sampled", sampling.temperature.to_string());
        return Err(Error::range("temperature", range, found));
    }
    let before = decoder.fallbacks();
    let done = sample(engine, request, many, decoder, (sampling, made), out);
    out.candidates.retain(|c| !c.ids.is_empty());
    out.fallbacks = decoder.fallbacks().zip(before).map(|(after, before)| after.since(before));
    done
}

/// Samples all sequences to their ends; writes ids, times and calls to `out`.
fn sample(
    engine: &mut Engine<'_>,
    request: &Request<'_>,
    many: usize,
    decoder: &mut Decoder,
    (sampling, made): (&Sampling, &mut ConfigureSampler<'_>),
    out: &mut BestOf,
) -> Result<()> {
    let Request { slot: first, prompt, n, end } = *request;
    let seeds = (0..many as u64).map(|i| sampling.seed.wrapping_add(i));
    out.candidates = seeds.map(|seed| Candidate { seed, ..Candidate::default() }).collect();
    let samplers = out.candidates.iter().map(|c| {
        let sampling = Sampling { seed: c.seed, log_probabilities: Some(0), ..sampling.clone() };
        let mut sampler = made(Sampler::new(sampling))?;
        sampler.begin(prompt);
        Ok(Box::new(sampler) as Box<dyn Choose>)
    });
    let samplers = samplers.collect::<Result<_>>()?;
    let job = Job {
        prompt: prompt.to_vec(),
        samplers,
        n,
        end: end.to_vec(),
        limit: None,
        scores: None,
        draft_tokens: 0,
    };
    let setting = Setting { slots: first..first.saturating_add(many as u32), ..Setting::default() };
    let mut scheduler = Scheduler::new(engine, decoder, &setting)?;
    let ids = scheduler.submit(job)?;
    let BestOf { candidates, prefill, decode, calls, .. } = out;
    // An error of one sequence ends all: the rest would not be the best of as many.
    let failed = RefCell::new(None);
    let mut sink = |id, event| {
        let Some(c) = ids.iter().position(|&x| x == id).and_then(|i| candidates.get_mut(i)) else {
            return false;
        };
        match event {
            Event::Began { .. } | Event::Scored { .. } => {}
            Event::Token { id, log_probabilities } => {
                c.ids.push(id);
                c.log_probability += log_probabilities.map_or(0.0, |l| l.chosen);
            }
            Event::Ended(End::Failed(e)) => {
                failed.borrow_mut().get_or_insert(e);
            }
            Event::Ended(_) => c.ended = true,
        }
        true
    };
    scheduler.run(&mut sink, &mut |step| {
        match step.done {
            StepWork::Decode(rows) => {
                *decode += step.took;
                calls.push(rows);
            }
            // Including the copies for the other sequences.
            _ => *prefill += step.took,
        }
        failed.borrow().is_none()
    })?;
    failed.into_inner().map_or(Ok(()), Err)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn best_candidate_has_the_highest_mean() {
        let of = |ids: usize, log_probability, ended| Candidate {
            seed: 0,
            ids: vec![0; ids],
            log_probability,
            ended,
        };
        let done = BestOf {
            candidates: vec![of(2, -4.0, true), of(4, -4.0, true), of(1, -1.0, true), of(1, -0.5, true)],
            ..BestOf::default()
        };
        assert_eq!(done.ranking(), [3, 1, 2, 0]);
        // An incomplete one ranks after all complete ones, however probable.
        let done = BestOf {
            candidates: vec![of(1, -0.1, false), of(1, -9.0, true), of(1, -0.05, false)],
            ..BestOf::default()
        };
        assert_eq!(done.ranking(), [1, 2, 0]);
    }
}
