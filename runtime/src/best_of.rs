//! Best-of-N sampling (PowerInfer-2, §4.1.3): several sequences after one prompt, of which the likeliest counts.
//!
//! The prompt is prefilled once, and what the states hold of it is copied to the slots of the other sequences. All are decoded
//! in one batch; as sequences end, the batch moves to the smallest entry point that holds what is left.

use crate::big_little::{Decoder, Fallbacks};
use crate::engine::{Engine, Want};
use crate::error::{Error, Result};
use crate::generate::{Request, check_room, rate};
use crate::sampler::{Sampler, Sampling, log_probability};
use crate::states;
use std::time::{Duration, Instant};

/// One of the sequences.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Candidate {
    /// Seed of its random numbers.
    pub seed: u64,
    /// The generated ids, an end token included.
    pub ids: Vec<u32>,
    /// Sum over the ids of `ln p`, with `p` the softmax of the logits that the id was drawn from: the model's own
    /// probability, whatever temperature and cuts it was drawn with.
    pub log_probability: f64,
    /// Whether it came to its end: an end token, or as many tokens as were asked for.
    pub ended: bool,
}

impl Candidate {
    /// Mean log-probability of a token, by which sequences of different lengths compare.
    pub fn score(&self) -> f64 {
        self.log_probability / self.ids.len().max(1) as f64
    }
}

/// Sequences, and how long they took.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct BestOf {
    /// In the order of their slots.
    pub candidates: Vec<Candidate>,
    /// Tokens of the prompt.
    pub prompt: usize,
    /// Time to the logits after the prompt, and to fill the slots of all sequences.
    pub prefill: Duration,
    /// Time of the calls that followed.
    pub decode: Duration,
    /// Sequences of each call that followed; never more than in the call before.
    pub calls: Vec<usize>,
    /// How many ids, but the first of each sequence, needed all experts; `None` where fewer are never tried.
    pub fallbacks: Option<Fallbacks>,
}

impl BestOf {
    /// Indices of the candidates: those that came to their end before the others, each by score, the best first; equal
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

    /// Generated tokens of all sequences per second, the first of each aside.
    pub fn decode_rate(&self) -> Option<f64> {
        rate(self.calls.iter().sum(), self.decode)
    }
}

/// Generates `many` sequences after a prompt, in the slots from `request.slot` on. Sequence `i` is drawn with the seed
/// `how.seed + i`: it is the one that [`crate::generate()`] draws with that seed. Their `n` and their end tokens are those of
/// the request.
///
/// # Errors
/// As [`crate::generate()`]; more sequences than there are slots; a temperature of 0, with which all would be the same.
pub fn best_of(
    engine: &mut Engine<'_>,
    request: &Request<'_>,
    many: usize,
    decoder: &mut Decoder,
    how: &Sampling,
) -> Result<BestOf> {
    let mut out = BestOf::default();
    best_of_into(engine, request, many, decoder, how, &mut out)?;
    Ok(out)
}

/// As [`best_of`]. What was drawn before an error, an interrupt among them, is in `out`; without a logit of the prompt
/// there is no candidate.
///
/// # Errors
/// As [`best_of`].
pub fn best_of_into(
    engine: &mut Engine<'_>,
    request: &Request<'_>,
    many: usize,
    decoder: &mut Decoder,
    how: &Sampling,
    out: &mut BestOf,
) -> Result<()> {
    let Request { slot: first, prompt, n, .. } = *request;
    *out = BestOf { prompt: prompt.len(), ..BestOf::default() };
    let model = &engine.program().model;
    check_room(prompt.len(), n, model.max_context as usize)?;
    let slots = model.slots;
    let room = slots.saturating_sub(first) as usize;
    if many > room {
        return Err(Error::FewSlots { needed: many.saturating_add(first as usize), slots });
    }
    if many > 1 && how.temperature <= 0.0 {
        let (range, found) = ("above 0 where several sequences are drawn", how.temperature.to_string());
        return Err(Error::Range { what: "temperature", range, found });
    }
    let before = decoder.fallbacks();
    let mut drawn: Vec<Drawn> = (0..many).map(|i| Drawn::new(i, how, prompt)).collect();
    let done = draw(engine, request, decoder, &mut drawn, out);
    out.candidates = drawn.into_iter().map(|d| d.candidate).filter(|c| !c.ids.is_empty()).collect();
    out.fallbacks = decoder.fallbacks().zip(before).map(|(after, before)| after.since(before));
    done
}

/// Draws all sequences to their ends; times and calls go to `out` as they come.
fn draw(
    engine: &mut Engine<'_>,
    request: &Request<'_>,
    decoder: &mut Decoder,
    drawn: &mut [Drawn],
    out: &mut BestOf,
) -> Result<()> {
    let Request { slot: first, prompt, n, .. } = *request;
    let start = Instant::now();
    share_prompt(engine, first, drawn.len(), prompt, &mut |logits| {
        drawn.iter_mut().try_for_each(|d| d.draw(logits, request))
    })?;
    out.prefill = start.elapsed();
    let start = Instant::now();
    let (mut rows, mut of): (Vec<(u32, usize, u32)>, Vec<usize>) = (Vec::new(), Vec::new());
    for made in 1..n {
        of.clear();
        of.extend((0..drawn.len()).filter(|&i| !drawn[i].candidate.ended));
        if of.is_empty() {
            break;
        }
        rows.clear();
        rows.extend(of.iter().filter_map(|&i| {
            let last = *drawn[i].candidate.ids.last()?;
            Some((first + i as u32, prompt.len() + made - 1, last))
        }));
        decoder.decode(engine, &rows, &mut |row, logits| drawn[of[row]].draw(logits, request))?;
        out.calls.push(rows.len());
        out.decode = start.elapsed();
    }
    Ok(())
}

/// A sequence that is being drawn.
struct Drawn {
    candidate: Candidate,
    sampler: Sampler,
}

impl Drawn {
    fn new(i: usize, how: &Sampling, prompt: &[u32]) -> Self {
        let seed = how.seed.wrapping_add(i as u64);
        let candidate = Candidate { seed, ..Candidate::default() };
        let mut sampler = Sampler::new(Sampling { seed, log_probabilities: None, ..how.clone() });
        sampler.begin(prompt);
        Self { candidate, sampler }
    }

    fn draw(&mut self, logits: &[f32], request: &Request<'_>) -> Result<()> {
        let id = self.sampler.sample(logits)?;
        let c = &mut self.candidate;
        c.log_probability += log_probability(logits, id);
        c.ids.push(id);
        c.ended = request.end.contains(&id) || c.ids.len() >= request.n;
        Ok(())
    }
}

/// Puts a prompt into the slots `first .. first + many`; `sink` gets the logits after it, once.
///
/// A static graph with a state keeps the cache of its layers in the unit, and so does a unit with a memory of its own, where
/// nothing copies it: the prompt then goes through every slot.
fn share_prompt(
    engine: &mut Engine<'_>,
    first: u32,
    many: usize,
    prompt: &[u32],
    sink: &mut dyn FnMut(&[f32]) -> Result<()>,
) -> Result<()> {
    let elsewhere = states::check_fork(engine.program()).is_err();
    engine.reset(first)?;
    engine.prefill(first, 0, prompt, Want::Last, &mut |_, logits| sink(logits))?;
    for slot in (first..).take(many).skip(1) {
        engine.reset(slot)?;
        if elsewhere {
            engine.prefill(slot, 0, prompt, Want::None, &mut |_, _| Ok(()))?;
        } else {
            engine.fork(first, slot)?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_best_has_the_highest_mean() {
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
        // One that was cut short stands behind all that were not, however likely.
        let done = BestOf {
            candidates: vec![of(1, -0.1, false), of(1, -9.0, true), of(1, -0.05, false)],
            ..BestOf::default()
        };
        assert_eq!(done.ranking(), [1, 2, 0]);
    }
}
