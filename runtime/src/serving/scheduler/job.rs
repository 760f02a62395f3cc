//! Requests to a scheduler, and its events.

use crate::error::{Error, Limit, Result};
use crate::serving::sampler::{LogProbabilities, Sampler};
use std::time::Duration;

/// Refuses a prompt and a number of tokens that do not fit the context together.
///
/// # Errors
/// [`Error::Usage`] for an empty prompt, else [`Error::Limit`].
pub fn check_context(prompt: usize, n: usize, max: usize) -> Result<()> {
    match prompt.saturating_add(n) {
        _ if prompt == 0 => Err(Error::empty_prompt()),
        _ if prompt > max => Err(Error::context("the prompt has", prompt, max)),
        needed if needed > max => Err(no_room(prompt, n, max)),
        _ => Ok(()),
    }
}

/// A prompt fits the context, and what is to follow it does not.
fn no_room(prompt: usize, n: usize, max: usize) -> Error {
    let what = format!("the context holds {max} tokens; the prompt has {prompt}, and {n} more are requested");
    Error::limit(Limit::Context, max, what).with_hint(match max.saturating_sub(prompt) {
        0 => "shorten the prompt, or build with a larger `max_context`".to_owned(),
        left => format!(
            "up to {left} fit after this prompt; request no more, shorten the prompt, or build with a larger `max_context`"
        ),
    })
}

/// Names a sequence of a scheduler.
pub type Id = u64;

/// Chooses the tokens of a sequence.
pub trait Choose: Send {
    /// The next token, given the logits (`f32[vocab]`).
    ///
    /// # Errors
    /// None can be chosen; the sequence ends with it.
    fn choose(&mut self, logits: &[f32]) -> Result<u32>;

    /// Whether the sequence is complete.
    fn ended(&self) -> bool {
        false
    }

    /// Log-probabilities where the last token was chosen, if they were requested.
    fn last(&self) -> Option<&LogProbabilities> {
        None
    }
}

impl Choose for Sampler {
    fn choose(&mut self, logits: &[f32]) -> Result<u32> {
        self.sample(logits)
    }

    fn ended(&self) -> bool {
        Sampler::ended(self)
    }

    fn last(&self) -> Option<&LogProbabilities> {
        Sampler::last(self)
    }
}

impl<C: Choose + ?Sized> Choose for &mut C {
    fn choose(&mut self, logits: &[f32]) -> Result<u32> {
        (**self).choose(logits)
    }

    fn ended(&self) -> bool {
        (**self).ended()
    }

    fn last(&self) -> Option<&LogProbabilities> {
        (**self).last()
    }
}

/// Sequences after one prompt.
pub struct Job<'j> {
    /// Token ids to continue.
    pub prompt: Vec<u32>,
    /// Sampler of each sequence; at least one.
    pub samplers: Vec<Box<dyn Choose + 'j>>,
    /// Tokens of a sequence at most.
    pub n: usize,
    /// Tokens that end a sequence.
    pub end: Vec<u32>,
    /// Time after which a sequence ends that is not done, from when it has its slot.
    pub limit: Option<Duration>,
    /// Most draft tokens of a sequence that are verified in a call, where it decodes alone. Its sampler takes the most probable
    /// token then. Where states cannot take tokens back, none are.
    pub draft_tokens: usize,
}

/// Event of a sequence.
#[derive(Debug)]
pub enum Event {
    /// It has slots from now on; `shared`: so many tokens of its prompt were there already.
    Began {
        /// Tokens.
        shared: usize,
    },
    /// Its next token, an end token included.
    Token {
        /// The token.
        id: u32,
        /// Log-probabilities where it was chosen, if its sampler gives them.
        log_probabilities: Option<LogProbabilities>,
    },
    /// It is over.
    Ended(End),
}

/// Reason that a sequence is over.
#[derive(Debug)]
pub enum End {
    /// An end token, or its sampler says that it is complete.
    Stop,
    /// It has as many tokens as were requested.
    Length,
    /// The client no longer wants it.
    Cancelled,
    /// Its time is over.
    Expired,
    /// It cannot go on.
    Failed(Error),
}

impl End {
    /// Names in metrics, in the order of [`End::index`].
    pub const NAMES: [&'static str; 5] = ["stop", "length", "cancelled", "expired", "failed"];

    /// Its place in [`End::NAMES`].
    pub fn index(&self) -> usize {
        match self {
            Self::Stop => 0,
            Self::Length => 1,
            Self::Cancelled => 2,
            Self::Expired => 3,
            Self::Failed(_) => 4,
        }
    }
}
