//! Scheduler of many sequences over one engine: assigns slots, chooses the next chunk of a prompt, and
//! batches decoding.
//!
//! **The rule of rounds.** A free slot goes to the request that has waited longest. A request of several
//! sequences then queues again for its next slot, so that neither it nor those after it wait until all slots
//! are free. A round computes chunks of prompts, the oldest prompt first, up to a budget of tokens and at
//! least one chunk. Then all running sequences decode one token together, in the smallest entry point that
//! takes them. So a prompt waits for one step of decoding per chunk, and a running sequence for one round's
//! chunks per token: neither starves. A sequence that ends frees its slot at once.
//!
//! **Equal prefixes are computed once.** A slot keeps its text when its sequence has ended. A prompt with the
//! same beginning takes over the slot, or a copy of it ([`Sharing`]). Recurrent states can only go
//! back to snapshots. These are made at the end of a call with a prompt, at the end of a chunk of an answer,
//! and where a prompt diverges from the contents of a slot. Several sequences after one prompt compute it
//! once. If answers are decoded with fewer experts, only whole chunks of prompts are shared, which all
//! experts have computed.
//!
//! **Effects of batching.** Kernels for several rows sum in another order than those for one. So an answer
//! may differ from that of the same sequence alone where two tokens are nearly equally likely. With
//! [`Setting::exact`] rows decode one by one and only whole chunks are shared: then every answer is bitwise
//! equal to that of the sequence alone. If experts are assigned to units at run time, the unit of an expert
//! depends on what ran before: then nothing is shared, and `exact` is an error.
//!
//! An error of one sequence ends only that sequence: a failed call is repeated row by row.

mod core;
mod job;
mod model;
mod slots;
mod speculative;
#[cfg(test)]
mod tests;

use self::core::{Action, Core};
use crate::error::{Error, Limit, Result};
use crate::exec::engine::{Engine, LogitRows};
use crate::serving::big_little::Decoder;
use crate::serving::sampler::LogProbabilities;
use crate::serving::speculate::DraftCounters;
pub use job::{Choose, End, Event, Id, Job, check_context};
use model::{Model, Served};
pub use slots::Sharing;
use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Settings of a scheduler.
#[derive(Clone, Debug)]
pub struct Setting {
    /// The slots that sequences may have; those beyond the plan's are ignored.
    pub slots: Range<u32>,
    /// Maximum number of sequences that wait for a slot.
    pub queue: usize,
    /// Maximum number of prompt tokens in a round; `None`: as many as the largest `prefill[T]` takes. At
    /// least one chunk is always computed.
    pub budget: Option<usize>,
    /// Whether each answer is bitwise equal to that of the sequence alone.
    pub exact: bool,
    /// Extent to which slots' contents are reused. `None`: as much as leaves every answer unchanged, except
    /// for rounding.
    pub sharing: Option<Sharing>,
}

impl Default for Setting {
    fn default() -> Self {
        Self { slots: 0..u32::MAX, queue: usize::MAX, budget: None, exact: false, sharing: None }
    }
}

/// Work of a call of [`Scheduler::step`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StepWork {
    /// Nothing: there are no sequences.
    Idle,
    /// A slot was brought to the initial state of a sequence.
    Placed,
    /// This many tokens of a prompt were computed.
    Prompt(usize),
    /// This many sequences got a token.
    Decode(usize),
}

/// A step, and the time of its engine calls, including the choice of tokens.
#[derive(Clone, Copy, Debug)]
pub struct Step {
    /// Work that was done.
    pub done: StepWork,
    /// Time.
    pub took: Duration,
}

/// Counters of a scheduler since it began.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// Tokens of prompts that were computed.
    pub prompt_tokens: u64,
    /// Tokens of prompts that were already in a slot.
    pub shared_tokens: u64,
    /// Sequences with shared tokens.
    pub shared_sequences: u64,
    /// Prompt tokens that were in a slot but were computed again: those between a snapshot and the position
    /// where the prompts diverge.
    pub reread_tokens: u64,
    /// Tokens that were chosen.
    pub tokens: u64,
    /// Steps of decoding.
    pub decodes: u64,
    /// Rows of all steps of decoding.
    pub rows: u64,
    /// Time of calls with prompts, including the choice of tokens.
    pub prompt_time: Duration,
    /// Time of steps of decoding, including the choice of tokens.
    pub decode_time: Duration,
    /// Sequences that have ended, in the order of [`End`].
    pub ended: [u64; 5],
}

/// Load of a scheduler.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Load {
    /// Number of sequences without a slot.
    pub waiting: usize,
    /// Number of sequences with a slot.
    pub running: usize,
    /// Number of slots that sequences may have.
    pub slots: usize,
    /// Number of free slots that keep text for later.
    pub kept: usize,
}

/// Receiver of sequences' events; returning false ends the sequence.
pub type Sink<'s> = dyn FnMut(Id, Event) -> bool + 's;

/// Many sequences over one engine.
pub struct Scheduler<'e, 'p, 'j> {
    inner: Inner<'j, Served<'e, 'p>>,
}

impl<'e, 'p, 'j> Scheduler<'e, 'p, 'j> {
    /// Creates a scheduler without knowledge of the slots' contents. Slots outside of `setting.slots` are
    /// left to others.
    ///
    /// # Errors
    /// No slot; [`Error::Usage`] if `exact` is impossible.
    pub fn new(engine: &'e mut Engine<'p>, decoder: &'e mut Decoder, setting: &Setting) -> Result<Self> {
        let program = engine.program();
        let model = &program.model;
        if setting.exact && !program.experts.policy.is_fixed() {
            return Err(Error::usage(
                "experts are assigned to units while the plan runs, so answers depend in their last bits on what ran before",
            )
            .with_hint("leave out `--exact`, or build for a target whose experts have one unit"));
        }
        let (context, slots) = (model.max_context as usize, model.slots);
        let range = setting.slots.start..setting.slots.end.min(slots);
        if range.is_empty() {
            return Err(Error::bad_slot(range.start, slots));
        }
        let served = Served { engine, decoder, exact: setting.exact, sharing: setting.sharing };
        Ok(Self { inner: Inner::new(served, setting, range, context) })
    }

    /// The engine.
    pub fn engine(&self) -> &Engine<'p> {
        self.inner.model.engine
    }

    /// Accepts the sequences of a job, and returns their names in the order of its samplers.
    ///
    /// # Errors
    /// [`Error::Limit`] if too many wait, or for more sequences than there are slots; errors of
    /// [`check_context`], for the positions of the context; [`Error::Usage`].
    pub fn submit(&mut self, job: Job<'j>) -> Result<Vec<Id>> {
        let program = self.inner.model.engine.program();
        let (vocab, slots) = (program.model.vocab, program.model.slots);
        if let Some(&id) = job.prompt.iter().find(|&&id| id >= vocab) {
            return Err(Error::bad_id(id, vocab));
        }
        self.inner.submit(job, slots)
    }

    /// Records that a free slot holds these tokens: the caller has put them there, as the first of a prompt
    /// of `whole` tokens. A prompt with this beginning takes them over.
    pub fn hold(&mut self, slot: u32, ids: &[u32], whole: usize) {
        self.inner.core.hold(slot, ids, whole);
    }

    /// Ends a sequence in any state. Its slot is free at once, and keeps the text. Its client is not
    /// notified.
    pub fn cancel(&mut self, id: Id) {
        self.inner.end(id, &End::Cancelled, false);
    }

    /// Does the next action: at most one call of the engine.
    ///
    /// # Errors
    /// [`Error::Interrupted`]. Errors of a sequence are its [`End`].
    pub fn step(&mut self, sink: &mut Sink<'_>) -> Result<Step> {
        self.inner.step(sink)
    }

    /// Steps until no sequence is left, or `each` returns false; `each` gets every step.
    ///
    /// # Errors
    /// As [`Scheduler::step`].
    pub fn run(&mut self, sink: &mut Sink<'_>, each: &mut dyn FnMut(Step) -> bool) -> Result<()> {
        loop {
            let step = self.step(sink)?;
            if !each(step) || step.done == StepWork::Idle {
                return Ok(());
            }
        }
    }

    /// Counters so far.
    pub fn counters(&self) -> Counters {
        self.inner.counters
    }

    /// Counts of draft tokens.
    pub fn speculated(&self) -> DraftCounters {
        self.inner.speculated
    }

    /// Load now.
    pub fn load(&self) -> Load {
        self.inner.load()
    }
}

/// A sequence that has not ended.
struct Live<'j> {
    sampler: Box<dyn Choose + 'j>,
    left: usize,
    end: std::sync::Arc<[u32]>,
    limit: Option<Duration>,
    /// Time when it expires: `limit` after it got its slot.
    deadline: Option<Instant>,
    /// Number of the most probable tokens at each token of the prompt, if these are requested.
    scores: Option<usize>,
    draft_tokens: usize,
}

/// A scheduler over any model.
struct Inner<'j, M> {
    model: M,
    core: Core,
    queue: usize,
    context: usize,
    live: BTreeMap<Id, Live<'j>>,
    counters: Counters,
    speculated: DraftCounters,
}

impl<'j, M: Model> Inner<'j, M> {
    fn new(model: M, setting: &Setting, slots: Range<u32>, context: usize) -> Self {
        let capabilities = model.kv_capabilities();
        let core = Core::new(slots, capabilities, setting.budget.unwrap_or(capabilities.chunk));
        let (counters, speculated) = (Counters::default(), DraftCounters::default());
        Self { model, core, queue: setting.queue, context, live: BTreeMap::new(), counters, speculated }
    }

    fn load(&self) -> Load {
        let slots = self.core.slots();
        let (waiting, running) = (self.core.waiting(), self.core.live());
        Load { waiting, running, slots: slots.len(), kept: slots.kept() }
    }

    fn submit(&mut self, job: Job<'j>, of_plan: u32) -> Result<Vec<Id>> {
        let Job { prompt, samplers, n, end, limit, scores, draft_tokens } = job;
        // The last token is returned and never fed back.
        check_context(prompt.len(), n.saturating_sub(1), self.context)?;
        let (many, slots) = (samplers.len(), self.core.slots().len());
        if many > slots {
            return Err(Error::few_slots(many + (of_plan as usize).saturating_sub(slots), of_plan));
        }
        let waiting = self.core.waiting();
        // A sequence that waits for no more than the next step takes a slot that is free now.
        if waiting + many > self.queue.saturating_add(self.core.slots().free()) {
            return Err(Error::limit(Limit::Queue, self.queue, format!("{waiting} sequences wait already"))
                .with_hint("ask again later, or let more wait"));
        }
        if many == 0 || n == 0 {
            return Ok(Vec::new());
        }
        let ids = self.core.submit(prompt, many, scores.is_some());
        let end: std::sync::Arc<[u32]> = end.into();
        for (&id, sampler) in ids.iter().zip(samplers) {
            let end = end.clone();
            self.live.insert(id, Live { sampler, left: n, end, limit, deadline: None, scores, draft_tokens });
        }
        Ok(ids)
    }

    fn step(&mut self, sink: &mut Sink<'_>) -> Result<Step> {
        self.expire(sink);
        let start = Instant::now();
        let Self { model, core, .. } = self;
        let next = core.next(&|slot, most| model.resumes(slot, most));
        let done = match next {
            Action::Idle => StepWork::Idle,
            Action::Place { id, place } => {
                match self.model.place(place.slot, place.from, place.keep) {
                    Ok(kept) => {
                        self.counters.shared_tokens += kept as u64;
                        self.counters.shared_sequences += u64::from(kept > 0);
                        self.counters.reread_tokens += place.equal.saturating_sub(kept) as u64;
                        self.core.placed(id, kept);
                        if kept > 0 {
                            self.model.snapshot(place.slot);
                        }
                        if let Some(live) = self.live.get_mut(&id) {
                            live.deadline = live.limit.and_then(|limit| start.checked_add(limit));
                        }
                        self.publish(id, Event::Began { shared: kept }, sink);
                    }
                    Err(e) => self.fail(id, e, sink)?,
                }
                StepWork::Placed
            }
            Action::Prompt { id, slot, range, whole, choose } => {
                self.prompt(id, slot, (range.clone(), whole), &choose, sink)?;
                StepWork::Prompt(range.len())
            }
            Action::Decode { rows } => {
                let speculated =
                    if let [row] = *rows { self.decode_speculatively(row, sink)? } else { false };
                if !speculated {
                    self.decode(&rows, sink)?;
                }
                StepWork::Decode(rows.len())
            }
        };
        let took = start.elapsed();
        match done {
            StepWork::Prompt(_) => self.counters.prompt_time += took,
            StepWork::Decode(_) => self.counters.decode_time += took,
            _ => {}
        }
        Ok(Step { done, took })
    }

    fn prompt(
        &mut self,
        id: Id,
        slot: u32,
        (range, whole): (Range<usize>, usize),
        choose: &[Id],
        sink: &mut Sink<'_>,
    ) -> Result<()> {
        let Self { model, live, core, .. } = self;
        let ids = core.ids(id, range.clone());
        let scores = live.get(&id).and_then(|live| live.scores);
        let logit_rows = match scores {
            Some(_) => LogitRows::All,
            None if choose.is_empty() => LogitRows::None,
            None => LogitRows::Last,
        };
        // Logits at a token are of the next one.
        let mut next = core.ids(id, range.start + 1..(range.end + 1).min(whole)).iter();
        let (mut chosen, mut scored) = (Vec::new(), Vec::new());
        let mut choice = |logits: &[f32]| match scores.zip(next.next()) {
            Some((top, &token)) => scored.push(LogProbabilities::of(logits, token, top)),
            None => chosen.extend(choose.iter().map(|id| (*id, pick(live.get_mut(id), logits)))),
        };
        match model.prompt(slot, range.start, ids, whole, logit_rows, &mut choice) {
            Ok(()) => {
                self.counters.prompt_tokens += range.len() as u64;
                self.model.snapshot(slot);
                if !scored.is_empty() {
                    for of in self.core.family(id) {
                        let (at, log_probabilities) = (range.start + 1, scored.clone());
                        self.publish(of, Event::Scored { at, log_probabilities }, sink);
                    }
                }
                self.core.prompted(id, range);
                chosen.into_iter().try_for_each(|(id, choice)| self.book(id, choice, sink))
            }
            Err(e) => self.fail(id, e, sink),
        }
    }

    fn decode(&mut self, rows: &[(Id, u32, usize, u32)], sink: &mut Sink<'_>) -> Result<()> {
        self.counters.decodes += 1;
        self.counters.rows += rows.len() as u64;
        let plain = |rows: &[(Id, u32, usize, u32)]| -> Vec<_> {
            rows.iter().map(|&(_, slot, pos, id)| (slot, pos, id)).collect()
        };
        // Tokens are chosen on the threads that have computed the logits: a row of a large vocabulary takes
        // up to milliseconds.
        let Self { model, live, .. } = self;
        let mut of_row: BTreeMap<Id, &mut Live<'_>> = live.iter_mut().map(|(id, live)| (*id, live)).collect();
        let cells: Vec<_> =
            rows.iter().map(|row| Mutex::new((of_row.remove(&row.0), None::<Choice>))).collect();
        let choose = |i: usize, logits: &[f32]| {
            let mut cell = cells[i].lock().unwrap_or_else(PoisonError::into_inner);
            let (live, choice) = &mut *cell;
            *choice = Some(pick(live.as_deref_mut(), logits));
        };
        let together = model.decode(&plain(rows), &choose);
        let mut failed: Vec<Option<Error>> = rows.iter().map(|_| None).collect();
        if let Err(e) = together {
            // Computing each row alone shows which one fails. Rows that have their logits have their states,
            // too.
            let mut first = Some(e);
            for (i, row) in rows.iter().enumerate() {
                if cells[i].lock().unwrap_or_else(PoisonError::into_inner).1.is_some() {
                    continue;
                }
                let alone = match first.take_if(|e| rows.len() == 1 || matches!(e, Error::Interrupted)) {
                    Some(e) => Err(e),
                    None => model.decode(&plain(std::slice::from_ref(row)), &|_, logits| choose(i, logits)),
                };
                match alone {
                    Err(Error::Interrupted) => return Err(Error::Interrupted),
                    Err(e) => failed[i] = Some(e),
                    Ok(()) => {}
                }
            }
        }
        let chosen: Vec<_> = cells
            .into_iter()
            .map(|cell| cell.into_inner().unwrap_or_else(PoisonError::into_inner).1)
            .collect();
        self.core.decoded(rows.iter().map(|row| row.0));
        for ((row, choice), failed) in rows.iter().zip(chosen).zip(failed) {
            match (choice, failed) {
                (Some(choice), _) => {
                    let (_, slot, pos, _) = *row;
                    if (pos + 1).is_multiple_of(self.core.chunk()) {
                        self.model.snapshot(slot);
                    }
                    self.book(row.0, choice, sink)?;
                }
                (None, failed) => self.fail(row.0, failed.unwrap_or_else(Error::not_finite), sink)?,
            }
        }
        Ok(())
    }

    /// Records the next token of a sequence, or the error that none can be chosen.
    fn book(&mut self, id: Id, choice: Choice, sink: &mut Sink<'_>) -> Result<()> {
        let (token, log_probabilities, ended) = match choice {
            Choice::Token { id, log_probabilities, ended } => (id, log_probabilities, ended),
            // The call succeeded: the slot's contents are right, unless they are NaN.
            Choice::None(e) => {
                let dirty = matches!(e, Error::Model { .. });
                return self.over(id, End::Failed(e), dirty, sink);
            }
        };
        let Some(live) = self.live.get_mut(&id) else { return Ok(()) };
        live.left -= 1;
        let end = if live.end.contains(&token) || ended {
            Some(End::Stop)
        } else {
            (live.left == 0).then_some(End::Length)
        };
        self.counters.tokens += 1;
        self.core.chosen(id, token);
        if self.publish(id, Event::Token { id: token, log_probabilities }, sink) {
            end.map_or(Ok(()), |end| self.over(id, end, false, sink))
        } else {
            Ok(())
        }
    }

    /// Ends a sequence whose call for it alone has failed.
    fn fail(&mut self, id: Id, e: Error, sink: &mut Sink<'_>) -> Result<()> {
        if matches!(e, Error::Interrupted) {
            return Err(e);
        }
        self.over(id, End::Failed(e), true, sink)
    }

    #[expect(clippy::unnecessary_wraps, reason = "the end of what may fail")]
    fn over(&mut self, id: Id, end: End, dirty: bool, sink: &mut Sink<'_>) -> Result<()> {
        if self.end(id, &end, dirty) {
            sink(id, Event::Ended(end));
        }
        Ok(())
    }

    /// Sends an event of a sequence; a sequence without a receiver ends. Returns whether there is a receiver.
    fn publish(&mut self, id: Id, event: Event, sink: &mut Sink<'_>) -> bool {
        let goes_on = sink(id, event);
        if !goes_on {
            self.end(id, &End::Cancelled, false);
        }
        goes_on
    }

    /// Ends a sequence; returns whether there was one.
    fn end(&mut self, id: Id, why: &End, dirty: bool) -> bool {
        self.live.remove(&id);
        let was = self.core.end(id, dirty);
        self.counters.ended[why.index()] += u64::from(was);
        was
    }

    /// Ends sequences whose time limit is over.
    fn expire(&mut self, sink: &mut Sink<'_>) {
        if self.live.values().all(|l| l.deadline.is_none()) {
            return;
        }
        let now = Instant::now();
        let late = |l: &Live<'_>| l.deadline.is_some_and(|d| d <= now);
        let late: Vec<Id> = self.live.iter().filter(|(_, l)| late(l)).map(|(id, _)| *id).collect();
        for id in late {
            if self.end(id, &End::Expired, false) {
                sink(id, Event::Ended(End::Expired));
            }
        }
    }
}

/// Result of choosing a token.
enum Choice {
    Token {
        id: u32,
        log_probabilities: Option<LogProbabilities>,
        /// Whether its sampler reports that the answer is complete.
        ended: bool,
    },
    /// No token can be chosen.
    None(Error),
}

/// Chooses the next token of a sequence.
fn pick(live: Option<&mut Live<'_>>, logits: &[f32]) -> Choice {
    let Some(live) = live else { return Choice::None(Error::not_finite()) };
    match live.sampler.choose(logits) {
        Ok(id) => {
            Choice::Token { id, log_probabilities: live.sampler.last().cloned(), ended: live.sampler.ended() }
        }
        Err(e) => Choice::None(e),
    }
}
