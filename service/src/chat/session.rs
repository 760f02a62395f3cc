//! A conversation in a slot: only what is new of each prompt is prefilled.

use moec_runtime::{Decoder, Engine, Error, Result, Sampler, Want};
use std::time::{Duration, Instant};

/// Why an answer ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    /// An end token.
    Token,
    /// A constraint says that it is complete, or who reads it has enough.
    Enough,
    /// As many tokens as were allowed.
    Length,
    /// An interrupt.
    Interrupted,
}

impl End {
    /// In a word, as `--json` has it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Token | Self::Enough => "stop",
            Self::Length => "length",
            Self::Interrupted => "interrupted",
        }
    }
}

/// What an answer took.
#[derive(Clone, Debug, PartialEq)]
pub struct Answer {
    /// Its tokens, an end token included.
    pub ids: Vec<u32>,
    /// Tokens of the prompt.
    pub prompt: usize,
    /// Those of them that were in the slot already.
    pub kept: usize,
    /// Time to the logits after the prompt.
    pub prefill: Duration,
    /// Time of the calls that followed.
    pub decode: Duration,
    /// Why it ended.
    pub end: End,
}

/// A slot of an engine, and the tokens that it holds.
pub struct Session<'e, 'p> {
    engine: &'e mut Engine<'p>,
    slot: u32,
    decoder: Decoder,
    held: Vec<u32>,
    /// Where the states were kept, for those that go back to no other place.
    snapshot: Option<usize>,
}

impl<'e, 'p> Session<'e, 'p> {
    /// An empty one.
    ///
    /// # Errors
    /// [`Error::BadSlot`].
    pub fn new(engine: &'e mut Engine<'p>, slot: u32, decoder: Decoder) -> Result<Self> {
        engine.reset(slot)?;
        Ok(Self { engine, slot, decoder, held: Vec::new(), snapshot: None })
    }

    /// Answers a prompt with up to `n` tokens. `on_token` gets each but an end token, and says whether it wants more. An interrupt
    /// ends the answer, and is no error once the prompt was read.
    ///
    /// # Errors
    /// As [`moec_runtime::generate()`], and what `on_token` returns.
    pub fn answer(
        &mut self,
        prompt: &[u32],
        n: usize,
        ends: &[u32],
        sampler: &mut Sampler,
        on_token: &mut dyn FnMut(u32) -> Result<bool>,
    ) -> Result<Answer> {
        moec_runtime::generate::check_room(
            prompt.len(),
            n,
            self.engine.program().model.max_context as usize,
        )?;
        sampler.begin(prompt);
        let start = Instant::now();
        let kept = self.go_back(prompt)?;
        let mut next = Err(Error::NotFinite);
        let read = self.engine.prefill(self.slot, kept, &prompt[kept..], Want::Last, &mut |_, logits| {
            next = sampler.sample(logits);
            Ok(())
        });
        self.held.truncate(kept);
        // What an interrupt leaves is there.
        let there = self.engine.len(self.slot).min(prompt.len());
        self.held.extend(prompt.get(kept..there).unwrap_or_default());
        read?;
        self.snapshot = self.engine.snapshot(self.slot).ok();
        let (prefill, start) = (start.elapsed(), Instant::now());
        let mut out = Answer {
            ids: Vec::new(),
            prompt: prompt.len(),
            kept,
            prefill,
            decode: Duration::ZERO,
            end: End::Length,
        };
        loop {
            let id = std::mem::replace(&mut next, Err(Error::NotFinite))?;
            out.ids.push(id);
            out.decode = start.elapsed();
            if ends.contains(&id) {
                out.end = End::Token;
            } else if !on_token(id)? || sampler.ended() {
                out.end = End::Enough;
            }
            if out.end != End::Length || out.ids.len() >= n {
                return Ok(out);
            }
            let row = (self.slot, self.held.len(), id);
            let called = self.decoder.decode(self.engine, &[row], &mut |_, logits| {
                next = sampler.sample(logits);
                Ok(())
            });
            match called {
                Ok(()) => self.held.push(id),
                Err(Error::Interrupted) => {
                    out.end = End::Interrupted;
                    return Ok(out);
                }
                Err(e) => return Err(e),
            }
        }
    }

    /// Goes back to where the slot and the prompt differ, at the latest to the last token of the prompt, or as far further as the
    /// states need. Gives the tokens that stay.
    fn go_back(&mut self, prompt: &[u32]) -> Result<usize> {
        let same = self.held.iter().zip(prompt).take_while(|(a, b)| a == b).count();
        let same = same.min(prompt.len().saturating_sub(1)).min(self.engine.len(self.slot));
        for at in [Some(same), self.snapshot.filter(|&at| at < same)].into_iter().flatten() {
            match self.engine.rewind(self.slot, at) {
                Ok(()) => return Ok(at),
                // A state that does not go back there.
                Err(Error::State { .. }) => {}
                Err(e) => return Err(e),
            }
        }
        self.snapshot = None;
        self.engine.reset(self.slot)?;
        Ok(0)
    }
}
