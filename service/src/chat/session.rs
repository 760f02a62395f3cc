//! A conversation over the scheduler, whose slots keep their text: only the new part of each prompt is
//! prefilled.

use moec_runtime::serving::scheduler::{self, Choose, Event, Job, Sharing, StepWork};
use moec_runtime::{Decoder, Engine, Error, Result, Sampler, Scheduler, Setting};
use std::time::Duration;

/// Reason that an answer ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    /// An end token.
    Token,
    /// A constraint reports that it is complete, or the callback wants no more.
    Enough,
    /// The maximum number of tokens.
    Length,
    /// An interrupt.
    Interrupted,
}

impl End {
    /// Converts an end of the scheduler. `token`: whether the last token is an end token.
    fn of(end: scheduler::End, token: bool) -> Result<Self> {
        match end {
            scheduler::End::Failed(e) => Err(e),
            scheduler::End::Length => Ok(Self::Length),
            scheduler::End::Stop if token => Ok(Self::Token),
            scheduler::End::Stop | scheduler::End::Cancelled | scheduler::End::Expired => Ok(Self::Enough),
        }
    }

    /// Name in the output of `--json`.
    pub fn name(self) -> &'static str {
        match self {
            Self::Token | Self::Enough => "stop",
            Self::Length => "length",
            Self::Interrupted => "interrupted",
        }
    }
}

/// Result and statistics of an answer.
#[derive(Clone, Debug, PartialEq)]
pub struct Answer {
    /// Its tokens, an end token included.
    pub ids: Vec<u32>,
    /// Tokens of the prompt.
    pub prompt: usize,
    /// Tokens of the prompt that were in the slot already.
    pub kept: usize,
    /// Time to the logits after the prompt.
    pub prefill: Duration,
    /// Time of the later calls.
    pub decode: Duration,
    /// Reason that it ended.
    pub end: End,
}

/// A conversation: the only client of a scheduler.
pub struct Session<'e, 'p> {
    scheduler: Scheduler<'e, 'p, 'static>,
}

impl<'e, 'p> Session<'e, 'p> {
    /// Creates an empty conversation.
    ///
    /// # Errors
    /// As [`Scheduler::new`].
    pub fn new(engine: &'e mut Engine<'p>, decoder: &'e mut Decoder) -> Result<Self> {
        // All text of a conversation is kept: its answers need not equal those of other runs.
        let setting = Setting { sharing: Some(Sharing::All), ..Setting::default() };
        Ok(Self { scheduler: Scheduler::new(engine, decoder, &setting)? })
    }

    /// Answers a prompt with up to `n` tokens. `on_token` gets each token except end tokens, and returns
    /// whether it wants more. An interrupt ends the answer; after the prompt it is no error.
    ///
    /// # Errors
    /// As [`moec_runtime::generate()`], and what `on_token` returns.
    pub fn answer(
        &mut self,
        prompt: &[u32],
        n: usize,
        ends: &[u32],
        mut sampler: Sampler,
        on_token: &mut dyn FnMut(u32) -> Result<bool>,
    ) -> Result<Answer> {
        sampler.begin(prompt);
        let samplers: Vec<Box<dyn Choose>> = vec![Box::new(sampler)];
        let job = Job {
            prompt: prompt.to_vec(),
            samplers,
            n,
            end: ends.to_vec(),
            limit: None,
            scores: None,
            draft_tokens: 0,
        };
        let names = self.scheduler.submit(job)?;
        let mut out = Answer {
            ids: Vec::new(),
            prompt: prompt.len(),
            kept: 0,
            prefill: Duration::ZERO,
            decode: Duration::ZERO,
            end: End::Length,
        };
        let mut over = None;
        while over.is_none() {
            let step = self.scheduler.step(&mut |_, event| match event {
                Event::Began { shared } => {
                    out.kept = shared;
                    true
                }
                Event::Token { id, .. } => {
                    out.ids.push(id);
                    // An end token is followed by the end.
                    let goes_on = if ends.contains(&id) { Ok(true) } else { on_token(id) };
                    over = match goes_on {
                        Ok(true) => None,
                        Ok(false) => Some(Ok(End::Enough)),
                        Err(e) => Some(Err(e)),
                    };
                    over.is_none()
                }
                Event::Scored { .. } => true,
                Event::Ended(end) => {
                    over = Some(End::of(end, out.ids.last().is_some_and(|id| ends.contains(id))));
                    true
                }
            });
            match step {
                // No token was requested.
                Ok(step) if step.done == StepWork::Idle => over = Some(Ok(End::Length)),
                Ok(step) if matches!(step.done, StepWork::Decode(_)) => out.decode += step.took,
                Ok(step) => out.prefill += step.took,
                Err(e) => {
                    for &name in &names {
                        self.scheduler.cancel(name);
                    }
                    let read = matches!(e, Error::Interrupted) && !out.ids.is_empty();
                    over = Some(if read { Ok(End::Interrupted) } else { Err(e) });
                }
            }
        }
        out.end = over.unwrap_or(Ok(End::Length))?;
        Ok(out)
    }
}
