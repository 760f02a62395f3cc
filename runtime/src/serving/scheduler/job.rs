//! Requests to a scheduler, and its events.

use crate::error::{Error, Limit, Result};
use crate::serving::sampler::{LogProbabilities, Sampler};
use std::time::Duration;

/// Fails if a prompt and a number of tokens do not fit the context together.
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

/// Error for a prompt that fits the context, but not together with the tokens after it.
fn no_room(prompt: usize, n: usize, max: usize) -> Error {
    let what = format!("the context holds {max} tokens; the prompt has {prompt}, and {n} more are requested");
    Error::limit(Limit::Context, max, what).with_hint(match max.saturating_sub(prompt) {
        0 => "shorten the prompt, or build with a larger `max_context`".to_owned(),
        left => format!(
            "up to {left} fit after this prompt; request no more, shorten the prompt, or build with a larger `max_context`"
        ),
    })
}

/// Name of a sequence of a scheduler.
pub type Id = u64;

/// Chooses the tokens of a sequence.
pub trait Choose: Send {
    /// The next token, given the logits (`f32[vocab]`).
    ///
    /// # Errors
    /// No token can be chosen; the sequence ends with this error.
    fn choose(&mut self, logits: &[f32]) -> Result<u32>;

    /// Whether the sequence is complete.
    fn ended(&self) -> bool {
        false
    }

    /// Log-probabilities at the last token, if they were requested.
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
    /// Maximum number of tokens of a sequence.
    pub n: usize,
    /// Tokens that end a sequence.
    pub end: Vec<u32>,
    /// Time limit of a sequence, from when it gets its slot.
    pub limit: Option<Duration>,
    /// Requests the log-probabilities of the prompt's tokens after the first, with so many of the most probable
    /// ones at each. The whole prompt is then computed, whatever slots hold.
    pub scores: Option<usize>,
    /// Maximum number of draft tokens that are verified in a call, when the sequence decodes alone. Its
    /// sampler then takes the most probable token. Without effect if states cannot take tokens back.
    pub draft_tokens: usize,
}

/// Event of a sequence.
#[derive(Debug)]
pub enum Event {
    /// It has a slot from now on; `shared`: the number of its prompt's tokens that were in a slot already.
    Began {
        /// Number of tokens.
        shared: usize,
    },
    /// Log-probabilities of tokens of its prompt, if its job requests them.
    Scored {
        /// Position of the first of them.
        at: usize,
        /// Of each token.
        log_probabilities: Vec<LogProbabilities>,
    },
    /// Its next token, an end token included.
    Token {
        /// The token.
        id: u32,
        /// Log-probabilities at this token, if its sampler gives them.
        log_probabilities: Option<LogProbabilities>,
    },
    /// The sequence is over.
    Ended(End),
}

/// Reason for which a sequence is over.
#[derive(Debug)]
pub enum End {
    /// An end token, or its sampler reports that it is complete.
    Stop,
    /// It has the requested number of tokens.
    Length,
    /// The client no longer wants it.
    Cancelled,
    /// Its time limit is over.
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
