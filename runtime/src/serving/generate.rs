//! Prompt in, tokens out.

use crate::error::Result;
use crate::exec::engine::Engine;
use crate::kv::cannot::most_guesses;
use crate::serving::big_little::{Decoder, Fallbacks};
use crate::serving::sampler::{LogProbabilities, Sampler};
pub use crate::serving::scheduler::check_room;
use crate::serving::scheduler::{Done, End, Event, Job, Scheduler, Setting, Sharing};
use crate::serving::speculate::Speculated;
use std::time::Duration;

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

/// What looks at an engine.
pub type Read<'r> = dyn FnMut(&Engine<'_>) -> Result<()> + 'r;

/// How a request is met beside what it asks for.
#[derive(Default)]
pub struct Way<'w> {
    /// What the slot holds already: tokens of a prompt that the other one may begin as, computed as a part of it.
    pub held: &'w [u32],
    /// Tokens that are guessed and checked in a call at most; with any, the sampler takes the likeliest.
    pub guesses: usize,
    /// Gets the engine when the prompt is read, in front of any other token.
    pub read: Option<&'w mut Read<'w>>,
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
    generate_by(engine, request, Way::default(), (decoder, sampler), on_token).map(|(done, _)| done)
}

/// As [`generate`], behind what the slot holds, and with guesses, of which it says what became.
///
/// # Errors
/// As [`generate`], and what `way.read` returns. With guesses, before any work, [`crate::Error::State`] for states that cannot take
/// tokens back.
pub fn generate_by(
    engine: &mut Engine<'_>,
    request: &Request<'_>,
    way: Way<'_>,
    (decoder, sampler): (&mut Decoder, &mut Sampler),
    on_token: &mut dyn FnMut(u32) -> Result<()>,
) -> Result<(Generation, Speculated)> {
    let Request { slot, prompt, n, end } = *request;
    let Way { held, guesses, mut read } = way;
    check_room(prompt.len(), n, engine.program().model.max_context as usize)?;
    if guesses > 0 {
        most_guesses(engine.program())?;
    }
    let before = decoder.fallbacks();
    sampler.begin(prompt);
    let mut out = Generation { prompt: prompt.len(), ..Generation::default() };
    // Whoever has put something into the slot wants it used.
    let sharing = (!held.is_empty()).then_some(Sharing::All);
    let setting = Setting { slots: slot..slot.saturating_add(1), sharing, ..Setting::default() };
    let mut scheduler = Scheduler::new(engine, decoder, &setting)?;
    scheduler.hold(slot, held, held.len());
    let job = Job {
        prompt: prompt.to_vec(),
        choosers: vec![Box::new(sampler)],
        n,
        end: end.to_vec(),
        limit: None,
        guesses,
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
            Event::Ended(_) => true,
        })?;
        match step.done {
            Done::Idle => break,
            Done::Decode(_) => out.decode += step.took,
            Done::Placed | Done::Prompt(_) => out.prefill += step.took,
        }
        if let Some(e) = failed.take() {
            return Err(e);
        }
        if let Some(read) = read.take_if(|_| !out.ids.is_empty()) {
            read(scheduler.engine())?;
        }
    }
    let did = scheduler.speculated();
    drop(scheduler);
    out.fallbacks = decoder.fallbacks().zip(before).map(|(after, before)| after.since(before));
    Ok((out, did))
}
