//! Prompt in, tokens out.

use crate::big_little::{Decoder, Fallbacks};
use crate::engine::{Engine, Want};
use crate::error::{Error, Result};
use crate::sampler::{LogProbabilities, Sampler};
pub use crate::scheduler::check_room;
use crate::scheduler::{Done, End, Event, Job, Scheduler, Setting};
use std::time::{Duration, Instant};

/// What a generation has produced and how long it took.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Generation {
    /// The generated ids, an end token included.
    pub ids: Vec<u32>,
    /// Tokens of the prompt.
    pub prompt: usize,
    /// Those of them that the slot held already.
    pub held: usize,
    /// Time to the logits after the prompt.
    pub prefill: Duration,
    /// Time of the calls that followed, one per id but the first.
    pub decode: Duration,
    /// How many ids but the first needed all experts; `None` where fewer are never tried.
    pub fallbacks: Option<Fallbacks>,
    /// Log-probabilities, one for each id; empty where the sampler's options ask for none.
    pub log_probabilities: Vec<LogProbabilities>,
}

impl Generation {
    /// Prompt tokens per second, those that the slot held already aside.
    pub fn prefill_rate(&self) -> Option<f64> {
        rate(self.prompt.saturating_sub(self.held), self.prefill)
    }

    /// Generated tokens per second, the first one aside; none if there was only that one.
    pub fn decode_rate(&self) -> Option<f64> {
        rate(self.ids.len().saturating_sub(1), self.decode)
    }
}

/// Per second; none of nothing.
pub fn rate(tokens: usize, time: Duration) -> Option<f64> {
    (tokens > 0 && !time.is_zero()).then(|| tokens as f64 / time.as_secs_f64())
}

/// What to generate.
#[derive(Clone, Copy, Debug)]
pub struct Request<'a> {
    /// KV-cache slot; what it holds is forgotten first.
    pub slot: u32,
    /// Token ids to continue.
    pub prompt: &'a [u32],
    /// Tokens to generate at most.
    pub n: usize,
    /// Tokens that end it.
    pub end: &'a [u32],
}

/// A prompt that has been read: the first token behind it is known.
#[derive(Debug)]
pub struct Begun {
    out: Generation,
    first: Result<u32>,
}

impl Begun {
    /// What has been done so far, and the first token.
    pub(crate) fn split(self) -> (Generation, Result<u32>) {
        (self.out, self.first)
    }
}

/// Reads the prompt of a request, of which the slot holds the first `held` tokens already; without any it is reset. Chooses the
/// token that follows. What comes behind it is [`crate::speculate::go_on`]'s.
///
/// # Errors
/// As [`generate`], before the first token.
pub fn begin(
    engine: &mut Engine<'_>,
    request: &Request<'_>,
    held: usize,
    sampler: &mut Sampler,
) -> Result<Begun> {
    let Request { slot, prompt, n, .. } = *request;
    check_room(prompt.len(), n, engine.program().model.max_context as usize)?;
    if held == 0 {
        engine.reset(slot)?;
    }
    sampler.begin(prompt);
    let fresh = prompt.get(held..).unwrap_or_default();
    let mut out = Generation { prompt: prompt.len(), held, ..Generation::default() };
    let mut first = Err(Error::NotFinite);
    let start = Instant::now();
    engine.prefill(slot, held, fresh, Want::Last, &mut |_, logits| {
        first = sampler.sample(logits);
        Ok(())
    })?;
    out.prefill = start.elapsed();
    Ok(Begun { out, first })
}

/// Generates up to `n` tokens after the prompt; fewer if an end token comes up, or a constraint says that all is
/// said. `on_token` gets each id as it is chosen; its error ends the work.
///
/// # Errors
/// Before any work: what [`check_room`] and [`Engine::prefill`] refuse. Then: [`crate::Error::Interrupted`],
/// logits that are no numbers, and what `on_token` returns.
pub fn generate(
    engine: &mut Engine<'_>,
    request: &Request<'_>,
    decoder: &mut Decoder,
    sampler: &mut Sampler,
    on_token: &mut dyn FnMut(u32) -> Result<()>,
) -> Result<Generation> {
    let Request { slot, prompt, n, end } = *request;
    check_room(prompt.len(), n, engine.program().model.max_context as usize)?;
    let before = decoder.fallbacks();
    sampler.begin(prompt);
    let mut out = Generation { prompt: prompt.len(), ..Generation::default() };
    let setting = Setting { slots: slot..slot.saturating_add(1), ..Setting::default() };
    let mut scheduler = Scheduler::new(engine, decoder, &setting)?;
    let job = Job {
        prompt: prompt.to_vec(),
        choosers: vec![Box::new(sampler)],
        n,
        end: end.to_vec(),
        deadline: None,
    };
    scheduler.submit(job)?;
    let (mut ids, mut chances, mut failed) = (Vec::new(), Vec::new(), None);
    let mut sink = |_, event| match event {
        Event::Token { id, log_probabilities } => {
            ids.push(id);
            chances.extend(log_probabilities);
            failed = on_token(id).err();
            failed.is_none()
        }
        Event::Ended(End::Failed(e)) => {
            failed = Some(e);
            false
        }
        Event::Began { .. } | Event::Ended(_) => true,
    };
    let done = scheduler.run(&mut sink, &mut |step| {
        match step.done {
            Done::Decode(_) => out.decode += step.took,
            _ => out.prefill += step.took,
        }
        true
    });
    drop(scheduler);
    done?;
    failed.map_or(Ok(()), Err)?;
    (out.ids, out.log_probabilities) = (ids, chances);
    out.fallbacks = decoder.fallbacks().zip(before).map(|(after, before)| after.since(before));
    Ok(out)
}
