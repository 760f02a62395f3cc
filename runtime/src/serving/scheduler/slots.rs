//! Index of the slots' contents: chooses a sequence's slot, and finds the part of its prompt that is already
//! in a slot.
//!
//! A slot keeps its text when its sequence has ended, until another sequence takes the slot. So system
//! prompts and earlier turns of a conversation are found again. Text is compared with all slots, which are
//! few, token by token.

use super::Id;

/// Part of a prompt that may be taken from what a slot holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sharing {
    /// Nothing.
    None,
    /// Whole chunks that were computed as chunks of a prompt at these positions, so that the states are
    /// bitwise equal to computing them again.
    Chunks,
    /// All equal tokens, including those of answers. Decoding rounds differently from a prompt's chunks.
    All,
}

/// KV capabilities of a model's states.
#[derive(Clone, Copy, Debug)]
pub(super) struct KvCapabilities {
    pub(super) sharing: Sharing,
    /// Tokens of a chunk.
    pub(super) chunk: usize,
    /// Long-RoPE threshold: only prompts on the same side of it share states.
    pub(super) long_rope_threshold: Option<usize>,
    /// Whether a sequence can be copied between slots.
    pub(super) fork: bool,
    /// Whether a sequence can only go back to snapshots.
    pub(super) snapshots: bool,
}

/// The furthest position of a slot up to another one at which a sequence can go on, as
/// [`crate::Engine::resumes`] gives it.
pub(super) type Resumes<'r> = dyn Fn(u32, usize) -> usize + 'r;

/// Initial state of a sequence.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct SlotStart {
    pub(super) slot: u32,
    /// The slot whose sequence is copied first.
    pub(super) from: Option<u32>,
    /// Number of tokens that it has already; at 0 the slot is emptied.
    pub(super) keep: usize,
    /// Number of shareable tokens that some slot holds: more than `keep` if there is no snapshot after them.
    pub(super) equal: usize,
}

/// Contents of a slot.
#[derive(Clone, Debug, Default)]
pub(super) struct Slot {
    /// Its owner.
    pub(super) owner: Option<Id>,
    /// The tokens whose states are there.
    pub(super) held: Vec<u32>,
    /// Whether they belong to a prompt beyond the long-RoPE threshold.
    pub(super) long_rope: bool,
    /// Number of tokens, from the first on, that were computed in whole chunks of a prompt.
    pub(super) chunk_aligned: usize,
    /// Time when it was last taken or left; 0: never.
    used: u64,
}

/// All slots that sequences may have.
#[derive(Clone, Debug)]
pub(super) struct Slots {
    first: u32,
    all: Vec<Slot>,
    capabilities: KvCapabilities,
    clock: u64,
}

impl Slots {
    pub(super) fn new(range: std::ops::Range<u32>, capabilities: KvCapabilities) -> Self {
        Self { first: range.start, all: vec![Slot::default(); range.len()], capabilities, clock: 0 }
    }

    pub(super) fn len(&self) -> usize {
        self.all.len()
    }

    pub(super) fn free(&self) -> usize {
        self.all.iter().filter(|s| s.owner.is_none()).count()
    }

    pub(super) fn get_mut(&mut self, slot: u32) -> Option<&mut Slot> {
        self.all.get_mut(slot.checked_sub(self.first)? as usize)
    }

    /// Whether a prompt of this many tokens is beyond the long-RoPE threshold.
    pub(super) fn is_long_rope(&self, tokens: usize) -> bool {
        self.capabilities.long_rope_threshold.is_some_and(|threshold| tokens > threshold)
    }

    /// Chooses a free slot for a prompt and gives it to `owner`; `None` where none is free.
    ///
    /// The longest shared prefix counts. A slot that holds it and more is cut back only if a copy into the
    /// least recently used free slot would lose more tokens than that.
    pub(super) fn take(&mut self, owner: Id, prompt: &[u32], resumes: &Resumes<'_>) -> Option<SlotStart> {
        let free = |i: &usize| self.all[*i].owner.is_none();
        let victim = (0..self.all.len()).filter(free).min_by_key(|&i| (self.all[i].used, i))?;
        let lost = |i: usize, keep: usize| self.all[i].held.len() - keep;
        let usable = (0..self.all.len()).filter(|i| self.capabilities.fork || free(i));
        let shared: Vec<_> = usable.map(|i| (self.shared(i, prompt, resumes), i)).collect();
        let equal = shared.iter().map(|((_, equal), _)| *equal).max().unwrap_or(0);
        let best = shared
            .into_iter()
            .map(|((keep, _), i)| (keep, i))
            .filter(|(keep, _)| *keep > 0)
            // Among equal ones, the first free slot that loses the fewest tokens.
            .min_by_key(|&(keep, i)| {
                (std::cmp::Reverse(keep), self.all[i].owner.is_some(), lost(i, keep), i)
            });
        let place = match best {
            None => SlotStart { slot: victim as u32, from: None, keep: 0, equal },
            Some((keep, i)) => {
                let cheaper = || lost(i, keep) <= self.all[victim].held.len() || victim == i;
                let stays = self.all[i].owner.is_none() && (!self.capabilities.fork || cheaper());
                let from = (!stays).then_some(self.first + i as u32);
                SlotStart { slot: if stays { i } else { victim } as u32, from, keep, equal }
            }
        };
        let chunk_aligned = match best {
            Some((keep, i)) => self.all[i].chunk_aligned.min(keep),
            None => 0,
        };
        let slot = &mut self.all[place.slot as usize];
        slot.owner = Some(owner);
        slot.held.clear();
        slot.held.extend_from_slice(&prompt[..place.keep]);
        slot.chunk_aligned = chunk_aligned;
        self.clock += 1;
        slot.used = self.clock;
        Some(SlotStart { slot: self.first + place.slot, ..place })
    }

    /// Position where a prompt diverges from the contents of a slot, if a snapshot there would save the next
    /// prompt that diverges there an eighth of a chunk.
    pub(super) fn parts(&self, place: SlotStart, kept: usize) -> Option<usize> {
        let saves = place.equal.saturating_sub(kept) >= (self.capabilities.chunk / 8).max(1);
        (self.capabilities.snapshots && self.capabilities.sharing == Sharing::All && saves)
            .then_some(place.equal)
    }

    /// Frees the slot; its contents stay until it is taken.
    pub(super) fn leave(&mut self, slot: u32) {
        self.clock += 1;
        let clock = self.clock;
        if let Some(slot) = self.get_mut(slot) {
            slot.owner = None;
            slot.used = clock;
        }
    }

    /// Records that a slot's contents are unreliable.
    pub(super) fn forget(&mut self, slot: u32) {
        if let Some(slot) = self.get_mut(slot) {
            slot.held.clear();
            slot.chunk_aligned = 0;
        }
    }

    /// Number of a prompt's tokens that a slot provides, and the number that may be shared. The last token is
    /// always computed, for its logits.
    fn shared(&self, i: usize, prompt: &[u32], resumes: &Resumes<'_>) -> (usize, usize) {
        let slot = &self.all[i];
        if slot.long_rope != self.is_long_rope(prompt.len()) {
            return (0, 0);
        }
        let most = prompt.len().saturating_sub(1);
        let equal = slot.held.iter().zip(prompt).take_while(|(a, b)| a == b).count().min(most);
        let chunk = self.capabilities.chunk.max(1);
        let (equal, step) = match self.capabilities.sharing {
            Sharing::None => (0, 1),
            Sharing::Chunks => (equal.min(slot.chunk_aligned) / chunk * chunk, chunk),
            Sharing::All => (equal, 1),
        };
        let mut keep = equal;
        while keep > 0 {
            let at = resumes(self.first + i as u32, keep);
            if at.is_multiple_of(step) {
                return (at, equal);
            }
            keep = at / step * step;
        }
        (0, equal)
    }

    /// Number of free slots that keep the text of ended sequences.
    pub(super) fn kept(&self) -> usize {
        self.all.iter().filter(|s| s.owner.is_none() && !s.held.is_empty()).count()
    }
}
