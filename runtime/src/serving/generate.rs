//! Generation: tokens after a prompt.

use crate::error::Result;
use crate::exec::engine::Engine;
use crate::kv::unsupported::max_draft_tokens;
use crate::serving::big_little::{Decoder, Fallbacks};
use crate::serving::sampler::{LogProbabilities, Sampler};
pub use crate::serving::scheduler::check_context;
use crate::serving::scheduler::{End, Event, Job, Scheduler, Setting, Sharing, StepWork};
use crate::serving::speculate::DraftCounters;
use std::time::Duration;

/// Result of a generation, and its times.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Generation {
    /// The generated ids, an end token included.
    pub ids: Vec<u32>,
    /// Tokens of the prompt.
    pub prompt: usize,
    /// Tokens of the prompt that the slot held already.
    pub held: usize,
    /// Time to the logits after the prompt.
    pub prefill: Duration,
    /// Time of the later calls, one per id but the first.
    pub decode: Duration,
    /// Number of ids but the first that needed all experts; `None` if fewer are never tried.
    pub fallbacks: Option<Fallbacks>,
    /// Log-probabilities, one for each id; empty if the sampler's options do not request them.
    pub log_probabilities: Vec<LogProbabilities>,
}

impl Generation {
    /// Prompt tokens per second, without those that the slot held already.
    pub fn prefill_rate(&self) -> Option<f64> {
        rate(self.prompt.saturating_sub(self.held), self.prefill)
    }

    /// Generated tokens per second, without the first one; `None` if there was only that one.
    pub fn decode_rate(&self) -> Option<f64> {
        rate(self.ids.len().saturating_sub(1), self.decode)
    }
}

/// Tokens per second; `None` if there are none.
pub fn rate(tokens: usize, time: Duration) -> Option<f64> {
    (tokens > 0 && !time.is_zero()).then(|| tokens as f64 / time.as_secs_f64())
}

/// Request for a generation.
#[derive(Clone, Copy, Debug)]
pub struct Request<'a> {
    /// KV-cache slot; its contents are forgotten first.
    pub slot: u32,
    /// Token ids to continue.
    pub prompt: &'a [u32],
    /// Maximum number of tokens to generate.
    pub n: usize,
    /// Tokens that end the generation.
    pub end: &'a [u32],
}

/// Observer of the engine.
pub type AfterPrompt<'r> = dyn FnMut(&Engine<'_>) -> Result<()> + 'r;

/// Further options of a generation.
#[derive(Default)]
pub struct GenerateOptions<'w> {
    /// Contents of the slot: tokens that the prompt may begin with, computed as a part of a prompt.
    pub held: &'w [u32],
    /// Maximum number of draft tokens that are verified in a call; if not 0, the sampler takes the most
    /// probable token.
    pub draft_tokens: usize,
    /// Called with the engine after the prompt, before any other token.
    pub after_prompt: Option<&'w mut AfterPrompt<'w>>,
}

/// Generates up to `n` tokens after the prompt; fewer if an end token is chosen, or a constraint reports that
/// the answer is complete. `on_token` gets each id as it is chosen; its error ends the generation.
///
/// # Errors
/// Before any work: what [`check_context`] and [`Engine::prefill`] refuse. Then:
/// [`crate::Error::Interrupted`], NaN logits, and what `on_token` returns.
pub fn generate(
    engine: &mut Engine<'_>,
    request: &Request<'_>,
    decoder: &mut Decoder,
    sampler: &mut Sampler,
    on_token: &mut dyn FnMut(u32) -> Result<()>,
) -> Result<Generation> {
    generate_by(engine, request, GenerateOptions::default(), (decoder, sampler), on_token)
        .map(|(done, _)| done)
}

/// As [`generate`], with reuse of the slot's contents and with draft tokens; returns the counts of draft
/// tokens.
///
/// # Errors
/// As [`generate`], and what `options.after_prompt` returns. With draft tokens, before any work, [`crate::Error::State`]
/// for states that cannot take tokens back.
pub fn generate_by(
    engine: &mut Engine<'_>,
    request: &Request<'_>,
    options: GenerateOptions<'_>,
    (decoder, sampler): (&mut Decoder, &mut Sampler),
    on_token: &mut dyn FnMut(u32) -> Result<()>,
) -> Result<(Generation, DraftCounters)> {
    let Request { slot, prompt, n, end } = *request;
    let GenerateOptions { held, draft_tokens, mut after_prompt } = options;
    check_context(prompt.len(), n, engine.program().model.max_context as usize)?;
    if draft_tokens > 0 {
        max_draft_tokens(engine.program())?;
    }
    let before = decoder.fallbacks();
    sampler.begin(prompt);
    let mut out = Generation { prompt: prompt.len(), ..Generation::default() };
    // A caller that has filled the slot wants its contents used.
    let sharing = (!held.is_empty()).then_some(Sharing::All);
    let setting = Setting { slots: slot..slot.saturating_add(1), sharing, ..Setting::default() };
    let mut scheduler = Scheduler::new(engine, decoder, &setting)?;
    scheduler.hold(slot, held, held.len());
    let job = Job {
        prompt: prompt.to_vec(),
        samplers: vec![Box::new(sampler)],
        n,
        end: end.to_vec(),
        limit: None,
        scores: None,
        draft_tokens,
    };
    scheduler.submit(job)?;
    let mut failed = None;
    loop {
        let step = scheduler.step(&mut |_, event| match event {
            Event::Token { id, log_probabilities } => {
                out.ids.push(id);
                out.log_probabilities.extend(log_probabilities);
                failed = on_token(id).err();
                failed.is_none()
            }
            Event::Ended(End::Failed(e)) => {
                failed = Some(e);
                false
            }
            Event::Began { shared } => {
                out.held = shared;
                true
            }
            Event::Scored { .. } | Event::Ended(_) => true,
        })?;
        match step.done {
            StepWork::Idle => break,
            StepWork::Decode(_) => out.decode += step.took,
            StepWork::Placed | StepWork::Prompt(_) => out.prefill += step.took,
        }
        if let Some(e) = failed.take() {
            return Err(e);
        }
        if let Some(after_prompt) = after_prompt.take_if(|_| !out.ids.is_empty()) {
            after_prompt(scheduler.engine())?;
        }
    }
    let did = scheduler.speculated();
    drop(scheduler);
    out.fallbacks = decoder.fallbacks().zip(before).map(|(after, before)| after.since(before));
    Ok((out, did))
}
