//! State machine over sequences and slots: chooses the next call, and calls nothing itself.
//!
//! [`Core::next`] returns the next action. Its result is passed back by [`Core::placed`], [`Core::prompted`],
//! [`Core::decoded`], [`Core::chosen`] and [`Core::end`]. It has no clock and no randomness, so the same
//! calls give the same answers.

use super::Id;
use super::slots::{KvCapabilities, Resumes, SlotStart, Slots};
use std::collections::VecDeque;
use std::ops::Range;

/// Next action.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Action {
    /// There is no work.
    Idle,
    /// Brings a slot to the state where a sequence begins.
    Place { id: Id, place: SlotStart },
    /// Computes these tokens of a prompt.
    Prompt {
        id: Id,
        slot: u32,
        range: Range<usize>,
        /// Tokens of the prompt.
        whole: usize,
        /// Sequences whose first tokens are chosen from the logits after it; empty before the prompt's end.
        choose: Vec<Id>,
    },
    /// Decodes these rows together: sequence, slot, position, token.
    Decode { rows: Vec<(Id, u32, usize, u32)> },
}

/// Progress of a sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    /// Its slot is not yet in its initial state.
    Unplaced(SlotStart),
    /// Its prompt is being computed. `chooses`: its first token is chosen from the logits after it.
    Prompt { chooses: bool },
    /// It waits for a sequence that computes the same prompt.
    Waits { on: Id },
    /// It decodes.
    Runs,
}

/// A sequence with a slot.
#[derive(Debug)]
struct Sequence {
    id: Id,
    slot: u32,
    stage: Stage,
    /// Prompt and answer.
    ids: Vec<u32>,
    prompt: usize,
    /// Number of tokens whose states are in the slot.
    filled: usize,
    /// Position where its prompt diverges from the contents of a slot; a chunk ends there for a snapshot.
    diverges_at: Option<usize>,
}

/// Sequences after one prompt that have no slots yet.
#[derive(Debug)]
struct Waiting {
    ids: VecDeque<Id>,
    prompt: Vec<u32>,
    /// Whether the whole prompt is computed, although a slot may hold its beginning.
    whole: bool,
    /// The first of them that got a slot: the others wait while it computes the prompt.
    first: Option<Id>,
}

/// The state machine.
#[derive(Debug)]
pub(super) struct Core {
    slots: Slots,
    chunk: usize,
    fork: bool,
    /// Maximum number of prompt tokens between two steps of decoding; one chunk is always computed.
    budget: usize,
    /// Prompt tokens computed since the last step of decoding.
    spent: usize,
    /// The next free slot is for the first one, which then goes to the back if it needs more.
    waiting: VecDeque<Waiting>,
    /// In order of arrival.
    live: Vec<Sequence>,
    next: Id,
}

impl Core {
    pub(super) fn new(slots: Range<u32>, capabilities: KvCapabilities, budget: usize) -> Self {
        let (chunk, fork) = (capabilities.chunk.max(1), capabilities.fork);
        let slots = Slots::new(slots, capabilities);
        Self { slots, chunk, fork, budget, spent: 0, waiting: VecDeque::new(), live: Vec::new(), next: 0 }
    }

    /// Number of tokens of a chunk.
    pub(super) fn chunk(&self) -> usize {
        self.chunk
    }

    /// Slots that sequences may have.
    pub(super) fn slots(&self) -> &Slots {
        &self.slots
    }

    /// Number of sequences without a slot.
    pub(super) fn waiting(&self) -> usize {
        self.waiting.iter().map(|w| w.ids.len()).sum()
    }

    /// Number of sequences with a slot.
    pub(super) fn live(&self) -> usize {
        self.live.len()
    }

    /// Accepts `many` sequences after a prompt, both at least one, and returns their names. `whole`: nothing of
    /// the prompt is taken from slots.
    pub(super) fn submit(&mut self, prompt: Vec<u32>, many: usize, whole: bool) -> Vec<Id> {
        let ids: Vec<Id> = (self.next..).take(many).collect();
        self.next += many as u64;
        self.waiting.push_back(Waiting { ids: ids.iter().copied().collect(), prompt, whole, first: None });
        ids
    }

    /// Next action. Returns the same until it gets the result.
    ///
    /// The rule of rounds: free slots go to the waiting requests, one to each in turn. Then come chunks of
    /// prompts, the oldest prompt first, up to the budget and at least one; then one step of decoding of all
    /// that run.
    pub(super) fn next(&mut self, resumes: &Resumes<'_>) -> Action {
        // One after the other: what a slot is said to hold is there when the next sequence looks for its
        // prompt.
        loop {
            if let Some((id, place)) = self.unplaced() {
                return Action::Place { id, place };
            }
            if !self.admit(resumes) {
                break;
            }
        }
        let prompt = self.live.iter().find(|s| matches!(s.stage, Stage::Prompt { .. }));
        let runs = self.live.iter().any(|s| s.stage == Stage::Runs);
        if let Some(s) = prompt {
            // Chunks begin at multiples of their length, as if the sequence ran alone.
            let end = ((s.filled / self.chunk + 1) * self.chunk).min(s.prompt);
            let end = s.diverges_at.filter(|&at| s.filled < at).map_or(end, |at| end.min(at));
            let fits = self.spent == 0 || self.spent + (end - s.filled) <= self.budget;
            if fits || !runs {
                let last = end == s.prompt && s.stage == Stage::Prompt { chooses: true };
                let choose = if last { self.family(s.id) } else { Vec::new() };
                return Action::Prompt {
                    id: s.id,
                    slot: s.slot,
                    range: s.filled..end,
                    whole: s.prompt,
                    choose,
                };
            }
        }
        let rows = self.live.iter().filter(|s| s.stage == Stage::Runs);
        let rows: Vec<_> =
            rows.filter_map(|s| Some((s.id, s.slot, s.filled, *s.ids.get(s.filled)?))).collect();
        if rows.is_empty() { Action::Idle } else { Action::Decode { rows } }
    }

    /// A sequence and those that wait for its prompt.
    pub(super) fn family(&self, id: Id) -> Vec<Id> {
        let waits = self.live.iter().filter(|s| s.stage == Stage::Waits { on: id });
        [id].into_iter().chain(waits.map(|s| s.id)).collect()
    }

    /// The first sequence whose slot is not yet in its initial state.
    fn unplaced(&self) -> Option<(Id, SlotStart)> {
        self.live.iter().find_map(|s| match s.stage {
            Stage::Unplaced(place) => Some((s.id, place)),
            _ => None,
        })
    }

    /// Gives a free slot to one sequence of the next request; returns whether there were both.
    ///
    /// A request of many sequences does not block others: its other sequences wait after the requests that
    /// have arrived meanwhile. No request gets a second slot before each has got one.
    fn admit(&mut self, resumes: &Resumes<'_>) -> bool {
        let Some(mut request) = self.waiting.pop_front_if(|_| self.slots.free() > 0) else { return false };
        let computes = |s: &&Sequence| matches!(s.stage, Stage::Unplaced(_) | Stage::Prompt { .. });
        let first = self.live.iter().filter(computes).map(|s| s.id).find(|&id| request.first == Some(id));
        // A sequence that waits copies the prompt once it is computed.
        let shared: &[u32] = if first.is_some() || request.whole { &[] } else { &request.prompt };
        let Some(id) = request.ids.pop_front() else { return true };
        let Some(place) = self.slots.take(id, shared, resumes) else { return false };
        let stage = first.map_or(Stage::Unplaced(place), |on| Stage::Waits { on });
        let ids = request.prompt.clone();
        let (slot, prompt) = (place.slot, ids.len());
        self.live.push(Sequence { id, slot, stage, prompt, ids, filled: 0, diverges_at: None });
        if first.is_none() {
            request.first = Some(id);
        }
        if !request.ids.is_empty() {
            self.waiting.push_back(request);
        }
        true
    }

    /// Tokens of a sequence.
    pub(super) fn ids(&self, id: Id, range: Range<usize>) -> &[u32] {
        let found = self.live.iter().find(|s| s.id == id);
        found.and_then(|s| s.ids.get(range)).unwrap_or_default()
    }

    /// Prompt and answer of a sequence.
    pub(super) fn text(&self, id: Id) -> &[u32] {
        self.ids(id, 0..self.live.iter().find(|s| s.id == id).map_or(0, |s| s.ids.len()))
    }

    /// Records that a caller has filled a free slot with these tokens of a prompt of `whole` tokens.
    pub(super) fn hold(&mut self, slot: u32, ids: &[u32], whole: usize) {
        let long_rope = self.slots.is_long_rope(whole);
        if let Some(slot) = self.slots.get_mut(slot).filter(|slot| slot.owner.is_none()) {
            slot.held = ids.to_vec();
            (slot.long_rope, slot.chunk_aligned) = (long_rope, 0);
        }
    }

    /// Records that a slot is in the initial state of a sequence, with its first `kept` tokens.
    pub(super) fn placed(&mut self, id: Id, kept: usize) {
        let Some(s) = self.live.iter_mut().find(|s| s.id == id) else { return };
        let Stage::Unplaced(place) = s.stage else { return };
        s.filled = kept;
        s.diverges_at = self.slots.parts(place, kept);
        // A sequence with its first token has its whole prompt, or computes the rest without choosing again.
        let chosen = s.ids.len() > s.prompt;
        let long_rope = self.slots.is_long_rope(s.prompt);
        s.stage = if kept == s.prompt { Stage::Runs } else { Stage::Prompt { chooses: !chosen } };
        if let Some(slot) = self.slots.get_mut(s.slot) {
            slot.held.clear();
            slot.held.extend_from_slice(&s.ids[..kept]);
            slot.long_rope = long_rope;
            slot.chunk_aligned = if place.keep == kept { slot.chunk_aligned } else { 0 };
        }
    }

    /// Records that tokens of a prompt are computed.
    pub(super) fn prompted(&mut self, id: Id, range: Range<usize>) {
        let Some(i) = self.live.iter().position(|s| s.id == id) else { return };
        let s = &mut self.live[i];
        self.spent += range.len();
        s.filled = range.end;
        let (from, prompt) = (s.slot, s.prompt);
        if let Some(slot) = self.slots.get_mut(from) {
            slot.held.extend_from_slice(&s.ids[range.clone()]);
            if slot.chunk_aligned == range.start && range.end.is_multiple_of(self.chunk) {
                slot.chunk_aligned = range.end;
            }
        }
        if range.end < prompt {
            return;
        }
        s.stage = Stage::Runs;
        let chunk_aligned = self.slots.get_mut(from).map_or(0, |s| s.chunk_aligned);
        for s in self.live.iter_mut().filter(|s| s.stage == (Stage::Waits { on: id })) {
            let place = if self.fork {
                SlotStart { slot: s.slot, from: Some(from), keep: prompt, equal: prompt }
            } else {
                SlotStart { slot: s.slot, ..SlotStart::default() }
            };
            s.stage = Stage::Unplaced(place);
            if let Some(slot) = self.slots.get_mut(s.slot) {
                slot.chunk_aligned = if self.fork { chunk_aligned } else { 0 };
            }
        }
    }

    /// Records the end of a step of decoding; the last tokens of these sequences are in their slots.
    pub(super) fn decoded(&mut self, ids: impl Iterator<Item = Id>) {
        self.spent = 0;
        for id in ids {
            let Some(s) = self.live.iter_mut().find(|s| s.id == id) else { continue };
            if let (Some(slot), Some(&last)) = (self.slots.get_mut(s.slot), s.ids.get(s.filled)) {
                slot.held.push(last);
                s.filled += 1;
            }
        }
    }

    /// Records the next token of a sequence.
    pub(super) fn chosen(&mut self, id: Id, token: u32) {
        if let Some(s) = self.live.iter_mut().find(|s| s.id == id) {
            s.ids.push(token);
        }
    }

    /// Ends a sequence in any stage, and frees its slot; `dirty`: the contents of the slot are unreliable.
    /// Returns whether there was such a sequence.
    pub(super) fn end(&mut self, id: Id, dirty: bool) -> bool {
        if let Some(i) = self.live.iter().position(|s| s.id == id) {
            let s = self.live.remove(i);
            if dirty {
                self.slots.forget(s.slot);
            }
            // A slot that was not yet brought to the initial state of its sequence does not hold what is
            // recorded.
            if matches!(s.stage, Stage::Unplaced(_) | Stage::Waits { .. }) {
                self.slots.forget(s.slot);
            }
            self.slots.leave(s.slot);
            if s.stage != Stage::Runs {
                self.reassign_prompt(id);
            }
            return true;
        }
        for i in 0..self.waiting.len() {
            let ids = &mut self.waiting[i].ids;
            if let Some(at) = ids.iter().position(|&x| x == id) {
                ids.remove(at);
                if ids.is_empty() {
                    self.waiting.remove(i);
                }
                return true;
            }
        }
        false
    }

    /// Makes the first of the sequences that waited for the prompt of a removed sequence compute it itself.
    fn reassign_prompt(&mut self, removed: Id) {
        let mut successor = None;
        for s in self.live.iter_mut().filter(|s| s.stage == (Stage::Waits { on: removed })) {
            s.stage = match successor {
                None => Stage::Unplaced(SlotStart { slot: s.slot, ..SlotStart::default() }),
                Some(on) => Stage::Waits { on },
            };
            successor.get_or_insert(s.id);
        }
    }
}
