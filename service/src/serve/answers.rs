//! Answers to a request, as pieces of text.

use super::Server;
use super::error::{Answer, ApiError};
use super::log::Record;
use super::request::Options;
use super::worker::{Command, Reply, Submission, Ticket};
use axum::http::StatusCode;
use moec_runtime::serving::sampler::{Constraint, LogProbabilities};
use moec_runtime::serving::scheduler::{Choose, End, Event, Job};
use moec_runtime::serving::stops::{StopCondition, Stops};
use moec_runtime::serving::text::TextStream;
use moec_runtime::{Sampler, Sampling, Text};
use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use tokio::sync::mpsc::{UnboundedReceiver, unbounded_channel};

/// A piece of an answer.
#[derive(Debug, Default)]
pub(super) struct Piece {
    /// Index of the answer.
    pub(super) choice: usize,
    /// Text that is certain by now.
    pub(super) text: String,
    /// Log-probabilities of its token.
    pub(super) log_probabilities: Option<LogProbabilities>,
    /// The first token of a prompt, if its text is that of this piece and log-probabilities are requested.
    pub(super) first: Option<u32>,
    /// Number of characters before that token's own text, certain or not.
    pub(super) offset: usize,
    /// Reason that it is the last piece.
    pub(super) finish: Option<&'static str>,
}

/// Tokens of a request.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Usage {
    pub(super) prompt: usize,
    pub(super) answers: usize,
    /// Prompt tokens served from the KV cache.
    pub(super) shared: usize,
}

impl Usage {
    pub(super) fn json(self) -> serde_json::Value {
        serde_json::json!({
            "prompt_tokens": self.prompt,
            "completion_tokens": self.answers,
            "total_tokens": self.prompt + self.answers,
            "prompt_tokens_details": {"cached_tokens": self.shared},
        })
    }
}

/// One answer in progress.
struct Choice<'t> {
    text: Option<TextStream<'t>>,
    stops: Stops,
    /// Number of characters of its tokens so far.
    chars: usize,
    /// The prompt that comes before it, if it is requested and not yet complete.
    echo: Option<Echo<'t>>,
    /// Whether the prompt is all that is requested: its own token is dropped.
    prompt_only: bool,
}

impl Choice<'_> {
    /// Appends pieces of the prompt; those with nothing to say are left out.
    fn put(&mut self, index: usize, pieces: Option<Vec<Piece>>, ready: &mut VecDeque<Piece>) {
        for piece in pieces.into_iter().flatten() {
            let (choice, offset) = (index, self.chars);
            self.chars += piece.text.chars().count();
            if !piece.text.is_empty() || piece.log_probabilities.is_some() || piece.first.is_some() {
                ready.push_back(Piece { choice, offset, ..piece });
            }
        }
    }
}

/// A prompt as the beginning of an answer.
struct Echo<'t> {
    ids: Vec<u32>,
    stream: TextStream<'t>,
    /// Number of tokens that are written.
    done: usize,
    /// Whether its tokens have log-probabilities. Nothing predicts the first.
    scored: bool,
}

impl Echo<'_> {
    /// The pieces up to the last of these tokens, which begin at position `at`. Those that are written are left
    /// out.
    fn scored(&mut self, at: usize, found: Vec<LogProbabilities>) -> Answer<Vec<Piece>> {
        let mut pieces = Vec::new();
        if self.done == 0 {
            pieces.push(self.token(None)?);
        }
        for of in found.into_iter().skip(self.done.saturating_sub(at)) {
            pieces.push(self.token(Some(of))?);
        }
        Ok(pieces)
    }

    /// The piece of the next token.
    fn token(&mut self, log_probabilities: Option<LogProbabilities>) -> Answer<Piece> {
        let Some(&id) = self.ids.get(self.done) else { return Ok(Piece::default()) };
        self.done += 1;
        let first = (self.scored && log_probabilities.is_none()).then_some(id);
        Ok(Piece { text: self.stream.push(id)?, log_probabilities, first, ..Piece::default() })
    }

    /// The pieces of all other tokens.
    fn rest(mut self) -> Answer<Vec<Piece>> {
        let mut pieces = Vec::new();
        while self.done < self.ids.len() {
            pieces.push(self.token(None)?);
        }
        let text = self.stream.finish()?;
        pieces.push(Piece { text, ..Piece::default() });
        Ok(pieces)
    }
}

/// All answers to a request. Unfinished ones are cancelled when it is dropped.
pub(super) struct Answers<'t> {
    events: UnboundedReceiver<Reply>,
    _tickets: Vec<Ticket>,
    choices: Vec<Choice<'t>>,
    ready: VecDeque<Piece>,
    /// Tokens that end an answer.
    end: Vec<u32>,
    /// Number of answers to each prompt.
    each: usize,
    pub(super) usage: Usage,
    record: Arc<Record>,
}

impl<'t> Answers<'t> {
    /// Requests `options.n` answers to each prompt, and waits until all are accepted. `constraints`: one for
    /// each answer, in order, or empty.
    ///
    /// # Errors
    /// Prompts that do not fit, and errors of the scheduler.
    pub(super) async fn submit(
        server: &Server,
        text: &'t Arc<Text>,
        prompts: Vec<Vec<u32>>,
        options: &Options,
        constraints: Vec<Box<dyn Constraint>>,
    ) -> Answer<Self> {
        let (replies, events) = unbounded_channel();
        let end = if options.ignore_eos { Vec::new() } else { server.eos.clone() };
        let (mut tickets, mut choices, mut usage) = (Vec::new(), Vec::new(), Usage::default());
        let mut constraints = constraints.into_iter();
        let submitted = prompts.len();
        for (p, prompt) in prompts.into_iter().enumerate() {
            let n = options.room(prompt.len(), server.context)?;
            usage.prompt += prompt.len();
            options.record.prompt(prompt.len());
            let mut samplers: Vec<Box<dyn Choose>> = Vec::new();
            for i in 0..options.n {
                let seed = options.sampling.seed.wrapping_add((p * options.n + i) as u64);
                let mut sampler = Sampler::new(Sampling { seed, ..options.sampling.clone() });
                if let Some(constraint) = constraints.next() {
                    sampler = sampler.constrained(constraint);
                }
                if !options.stop.is_empty() {
                    // It ends with the token that completes a stop string, even if its text is read later.
                    let stream =
                        if options.special { text.own_stream_with_special() } else { text.own_stream() };
                    let stream = answer_stream(stream, &prompt, options)?;
                    sampler = sampler.constrained(Box::new(StopCondition::new(stream, &options.stop)));
                }
                sampler.begin(&prompt);
                samplers.push(Box::new(sampler));
                let stream = if options.special { text.stream_with_special() } else { text.stream() };
                let stream = answer_stream(stream, &prompt, options)?;
                choices.push(Choice {
                    text: Some(stream),
                    stops: Stops::new(options.stop.clone()),
                    chars: 0,
                    echo: options.echo.then(|| Echo {
                        ids: prompt.clone(),
                        stream: if options.special { text.stream_with_special() } else { text.stream() },
                        done: 0,
                        scored: options.scores().is_some(),
                    }),
                    prompt_only: options.prompt_only,
                });
            }
            let job = Job {
                prompt,
                samplers,
                n,
                end: end.clone(),
                limit: Some(server.limit),
                scores: options.scores(),
                draft_tokens: 0,
            };
            let number = server.tickets.fetch_add(1, Ordering::Relaxed);
            let submission =
                Submission { ticket: number, job, first: p * options.n, replies: replies.clone() };
            server.worker.send(Command::Submit(submission)).map_err(|_| server_stopped())?;
            tickets.push(Ticket { number, worker: server.worker.clone() });
        }
        let (ready, each) = (VecDeque::new(), options.n);
        let record = Arc::clone(&options.record);
        let mut answers = Self { events, _tickets: tickets, choices, ready, end, each, usage, record };
        let mut accepted = 0;
        while accepted < submitted {
            match answers.events.recv().await {
                Some(Reply::Accepted) => accepted += 1,
                Some(Reply::Refused(e)) => return Err(e.into()),
                Some(Reply::Event(choice, event)) => answers.take(choice, event)?,
                None => return Err(server_stopped()),
            }
        }
        Ok(answers)
    }

    /// The next piece of any answer; `None` when all are done.
    ///
    /// # Errors
    /// An answer that cannot go on; the others are cancelled with it.
    pub(super) async fn next(&mut self) -> Answer<Option<Piece>> {
        loop {
            if let Some(piece) = self.ready.pop_front() {
                return Ok(Some(piece));
            }
            if self.choices.iter().all(|c| c.text.is_none()) {
                return Ok(None);
            }
            match self.events.recv().await {
                Some(Reply::Event(choice, event)) => self.take(choice, event)?,
                Some(Reply::Refused(e)) => return Err(e.into()),
                Some(Reply::Accepted) => {}
                None => return Err(server_stopped()),
            }
        }
    }

    /// Ends an answer: it gets no more pieces. Once all have ended, the rest of them is cancelled when the
    /// value is dropped.
    pub(super) fn end(&mut self, choice: usize) {
        if let Some(choice) = self.choices.get_mut(choice) {
            choice.text = None;
        }
        self.ready.retain(|piece| piece.choice != choice);
    }

    /// Converts an event of a choice to pieces.
    fn take(&mut self, index: usize, event: Event) -> Answer<()> {
        let Some(choice) = self.choices.get_mut(index) else { return Ok(()) };
        if choice.text.is_none() {
            return Ok(());
        }
        let mut piece = Piece { choice: index, ..Piece::default() };
        match event {
            Event::Began { shared } if index.is_multiple_of(self.each) => {
                self.usage.shared += shared;
                self.record.cached(shared);
            }
            // The other answers to a prompt copy its states from the first one.
            Event::Began { .. } => {}
            Event::Scored { at, log_probabilities } => {
                let pieces = choice.echo.as_mut().map(|echo| echo.scored(at, log_probabilities));
                choice.put(index, pieces.transpose()?, &mut self.ready);
            }
            Event::Token { .. } if choice.prompt_only => {
                let pieces = choice.echo.take().map(Echo::rest);
                choice.put(index, pieces.transpose()?, &mut self.ready);
            }
            Event::Token { id, log_probabilities } => {
                let pieces = choice.echo.take().map(Echo::rest);
                choice.put(index, pieces.transpose()?, &mut self.ready);
                let Some(stream) = &mut choice.text else { return Ok(()) };
                self.usage.answers += 1;
                self.record.token();
                piece.log_probabilities = log_probabilities;
                let new = if self.end.contains(&id) { String::new() } else { stream.push(id)? };
                piece.offset = choice.chars;
                choice.chars += new.chars().count();
                piece.text = choice.stops.push(&new);
                let hit = choice.stops.found().is_some();
                if hit {
                    piece.finish = Some("stop");
                    choice.text = None;
                }
                if hit || !piece.text.is_empty() || piece.log_probabilities.is_some() {
                    self.ready.push_back(piece);
                }
            }
            Event::Ended(End::Failed(e)) => return Err(e.into()),
            Event::Ended(end) => {
                let pieces = choice.echo.take().map(Echo::rest);
                choice.put(index, pieces.transpose()?, &mut self.ready);
                let rest = choice.text.take().map(TextStream::finish).transpose()?.unwrap_or_default();
                let mut text = choice.stops.push(&rest);
                let hit = choice.stops.found().is_some();
                if !hit {
                    text += &std::mem::take(&mut choice.stops).finish();
                }
                // An answer that expires is a cut answer.
                let truncated = matches!(end, End::Length | End::Expired) && !hit;
                let why = if truncated { "length" } else { "stop" };
                self.ready.push_back(Piece { text, finish: Some(why), ..piece });
            }
        }
        Ok(())
    }
}

/// The stream of an answer's text: as a continuation of the prompt, or as a text of its own.
fn answer_stream<'t>(stream: TextStream<'t>, prompt: &[u32], options: &Options) -> Answer<TextStream<'t>> {
    Ok(if options.continues_prompt { stream.continue_after(prompt)? } else { stream })
}

fn server_stopped() -> ApiError {
    ApiError::new(StatusCode::SERVICE_UNAVAILABLE, "the server is shutting down")
}

/// Ids of a text.
///
/// # Errors
/// As [`Text::encode`].
pub(super) async fn encode(server: &Server, text: &Arc<Text>, prompt: String) -> Answer<Vec<u32>> {
    let text = Arc::clone(text);
    Ok(server.on_core(move || text.encode(&prompt)).await??)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::grammar::tests::{END, tokenizer};

    /// An answer that expires ends with its text so far.
    #[test]
    fn expired_answers_end_with_their_text_so_far() {
        let text = Text::parse(tokenizer().as_bytes(), None).unwrap();
        let (_sender, events) = unbounded_channel();
        let (text_of, stops) = (Some(text.stream()), Stops::new(Vec::new()));
        let choice = Choice { text: text_of, stops, chars: 0, echo: None, prompt_only: false };
        let mut answers = Answers {
            events,
            _tickets: Vec::new(),
            choices: vec![choice],
            ready: VecDeque::new(),
            end: vec![END],
            each: 1,
            usage: Usage::default(),
            record: Arc::default(),
        };
        for id in [104, 105] {
            answers.take(0, Event::Token { id, log_probabilities: None }).unwrap();
        }
        answers.take(0, Event::Ended(End::Expired)).unwrap();
        let text: String = answers.ready.iter().map(|piece| &*piece.text).collect();
        assert_eq!((&*text, answers.ready.back().unwrap().finish), ("hi", Some("length")));
        assert!(answers.choices[0].text.is_none());
    }
}
