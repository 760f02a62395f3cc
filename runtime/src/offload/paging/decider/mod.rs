//! Decisions on frames: the expert in each, the next read, and evictions. Nothing is carried out here.
//!
//! A [`Decider`] receives events, each with its time, and returns decisions. It reads no byte, does not wait,
//! holds no lock and looks at no clock: its decisions are a function of its [`Event`]s. So the pager, which
//! reads and waits (`pager`), a replay of recorded events (`journal`), and a simulation on modelled units
//! (`simulate`) get the same decisions for the same events.
//!
//! * `event`: its events and decisions.
//! * `request`: requests of a layer for its experts and for those of the next layers.
//! * `prefetched`: experts that were read ahead for one layer.
//! * `reads`: pending reads, reads in flight, and their results.
//!
//! The cache decides which experts stay ([`Cache::step`]); a decider gives frames to those that are read.
//! Nothing here allocates after [`Decider::new`].

mod event;
mod prefetched;
mod reads;
mod request;
#[cfg(test)]
mod tests;

pub use super::ahead::DiskProgress;
pub use event::{Decision, Event, ExpertRequest, FrameEvent, Scores};

use super::ahead::Ahead;
use crate::error::{Error, Result};
use crate::offload::cache::{
    self, Cache, CachedLayer, EvictedExpertCounts, ExpertIndex, Key, Ranking, Setting,
};
use crate::offload::disk::Priority;
use moec_ir::plan::{self, PagedLayer};
use std::collections::VecDeque;
use std::time::Duration;

/// Bits of an expert whose two parts have both arrived.
const WHOLE: u8 = 3;

/// Experts of a layer.
#[derive(Clone, Copy, Debug)]
struct LayerInfo {
    /// Number of its first expert.
    first: usize,
    shape: PagedLayer,
    /// Bytes of an expert.
    bytes: u64,
}

/// Location of an expert.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum ExpertState {
    /// On the disk.
    #[default]
    OnDisk,
    /// To be read as soon as a frame is free.
    Requested,
    /// Being read into a frame.
    Reading(u32),
    /// In a frame.
    InFrame(u32),
}

/// A read that is to be started: `parts` of an expert from `first` on.
#[derive(Clone, Copy, Debug)]
struct PendingRead {
    id: usize,
    first: u8,
    parts: u8,
}

/// State of a frame.
#[derive(Clone, Copy, Debug, Default)]
enum FrameState {
    #[default]
    Free,
    /// An expert is read into it.
    Reading(PendingRead),
    /// It holds an expert.
    Full,
    /// A read that failed or was cancelled may still write to it.
    Draining,
}

/// Reason for reading an expert.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum ReadReason {
    /// A step has requested it.
    #[default]
    Requested,
    /// It is one of those that the cache begins with.
    Start,
    /// A later layer may request it.
    Prefetched,
}

/// An expert of the layer of the request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RequestedExpert {
    /// Position in the dispatch table.
    pub place: usize,
    /// Number of the expert, consecutive over the layers.
    pub id: usize,
    /// Whether it bypasses the cache.
    pub bypasses: bool,
}

/// Counters of decisions so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Experts that were requested and in memory, or being read.
    pub hits: u64,
    /// Experts that were requested and had to be read.
    pub misses: u64,
    /// Of the hits: experts that were read ahead, and requested as predicted.
    pub predicted: u64,
    /// Experts that were read ahead.
    pub ahead: u64,
    /// Misses that the cache did not keep.
    pub streamed: u64,
    /// Experts that the cache began with and that had arrived before they were requested.
    pub preloaded: u64,
    /// Experts of tokens that were decoded again.
    pub second_pass: EvictedExpertCounts,
}

/// Settings of a decider that are not in the plan.
#[derive(Clone, Copy, Debug)]
pub struct DeciderOptions<'a> {
    /// Bytes of an expert, by layer.
    pub bytes: &'a [u64],
    /// Experts that another memory holds permanently ([`plan::Plan::experts_off_disk`]).
    pub elsewhere: &'a [(u32, u32)],
    /// Layers ahead whose experts are read before they are requested.
    pub ahead: usize,
    /// Whether the cache begins with the experts that recorded routing used most.
    pub preload: bool,
}

/// Maps events to decisions on frames.
pub struct Decider {
    layers: Vec<LayerInfo>,
    /// Layer and index of every expert.
    keys: Vec<Key>,
    /// Pinned experts, in the order of the plan, and how often recorded routing used each expert.
    pinned: Vec<Key>,
    uses: Vec<u32>,
    staging: usize,
    predicts: bool,
    /// Experts that other memories hold permanently, ascending.
    elsewhere: Vec<Key>,
    cache: Cache,
    ranking: Ranking,
    /// By number of the expert: its location, and which of its parts may be used.
    locations: Vec<ExpertState>,
    parts: Vec<u8>,
    frames: Vec<FrameState>,
    /// Free frames; the last is taken first.
    free: Vec<u32>,
    /// Pending reads: on demand, and ahead.
    queues: [VecDeque<PendingRead>; 2],
    events: Vec<cache::Event>,
    chosen: Vec<u16>,
    /// Reason for reading each expert, until it is requested; by number.
    read_reasons: Vec<ReadReason>,
    /// Prefetched experts in staging frames, outside of the cache.
    prefetched: Vec<usize>,
    /// Number of experts of the last layer that bypass the cache, and whether they exceed the staging frames:
    /// then each is read in two parts.
    streams: usize,
    split: bool,
    order: Vec<RequestedExpert>,
    /// Whether gate and up are computed, by position in the order; and the first position where they are not.
    gate_up_done: Vec<bool>,
    next: usize,
    ahead: Ahead,
    /// Whether a requested expert could not be read.
    broken: bool,
    counts: Counts,
    out: Vec<Decision>,
}

impl Decider {
    /// Creates a decider for the experts and frames of a plan.
    ///
    /// # Errors
    /// [`Error::Bundle`] for an unknown policy, a pinned expert that does not exist, or no layers.
    pub fn new(paging: &plan::Paging, options: DeciderOptions<'_>) -> Result<Self> {
        let wrong = |e: &dyn std::fmt::Display| Error::plan(e.to_string());
        // All have the same size: the cache counts frames.
        let layer = |l: &PagedLayer| CachedLayer { experts: l.experts as usize, k: l.k as usize, bytes: 1 };
        let layers: Vec<CachedLayer> = paging.layers.iter().map(layer).collect();
        let experts = ExpertIndex::new(&layers).map_err(|e| wrong(&e))?;
        let setting: Setting = paging.policy.parse().map_err(|e| wrong(&e))?;
        let key = |&(layer, expert): &(u32, u32)| {
            Some(Key { layer: layer.try_into().ok()?, expert: expert.try_into().ok()? })
        };
        let pinned: Option<Vec<Key>> = paging.pinned.iter().map(key).collect();
        let pinned = pinned.ok_or_else(|| wrong(&"a pinned expert that there is not"))?;
        let cache = Cache::with_pinned(&experts, u64::from(paging.frames), &setting, &pinned);
        let cache = cache.map_err(|e| wrong(&e))?;
        let (mut places, mut keys) = (Vec::new(), Vec::new());
        for (i, &shape) in paging.layers.iter().enumerate() {
            places.push(LayerInfo {
                first: keys.len(),
                shape,
                bytes: options.bytes.get(i).copied().unwrap_or(0),
            });
            keys.extend((0..shape.experts).map(|e| Key { layer: i as u16, expert: e as u16 }));
        }
        let most = layers.iter().map(|l| l.experts).max().unwrap_or(0);
        let count = keys.len();
        let frames = paging.frames.saturating_add(paging.staging);
        Ok(Self {
            layers: places,
            keys,
            pinned,
            uses: if options.preload { paging.uses.clone() } else { Vec::new() },
            staging: paging.staging as usize,
            predicts: options.ahead > 0,
            ranking: Ranking::new(most, cache.depth()),
            cache,
            locations: vec![ExpertState::OnDisk; count],
            parts: vec![0; count],
            frames: vec![FrameState::Free; frames as usize],
            free: (0..frames).rev().collect(),
            elsewhere: options.elsewhere.iter().filter_map(key).collect(),
            queues: std::array::from_fn(|_| VecDeque::with_capacity(2 * count)),
            events: Vec::with_capacity(4 * most),
            chosen: Vec::with_capacity(most),
            read_reasons: vec![ReadReason::Requested; count],
            prefetched: Vec::with_capacity(paging.staging as usize),
            streams: 0,
            split: false,
            order: Vec::with_capacity(most),
            gate_up_done: vec![false; most],
            next: 0,
            ahead: Ahead::new(&layers, options.ahead),
            broken: false,
            counts: Counts::default(),
            // Twice an eviction and a load per expert.
            out: Vec::with_capacity(4 * count),
        })
    }

    /// Handles an event and returns the decisions. Time never runs backwards.
    ///
    /// # Errors
    /// [`Error::Bundle`] for a layer that the cache does not have.
    pub fn handle(&mut self, now: Duration, event: Event<'_>) -> Result<&[Decision]> {
        self.out.clear();
        match event {
            Event::Requested(request) => self.requested(now, request)?,
            Event::Frame(event) => match event {
                FrameEvent::Began => self.begin(),
                FrameEvent::Arrived { frame, part } => self.arrived(frame, part),
                FrameEvent::Done { frame } => self.done(frame),
                FrameEvent::Failed { frame } => self.failed(frame),
                FrameEvent::Released { frame } => self.released(frame),
                FrameEvent::Computed { at, part } => self.computed(at, part),
            },
        }
        Ok(&self.out)
    }

    /// Decisions on the last event.
    pub fn decisions(&self) -> &[Decision] {
        &self.out
    }

    /// The experts of the layer of the last request, in the order in which they are computed.
    pub fn order(&self) -> &[RequestedExpert] {
        &self.order
    }

    /// Whether more of them bypass the cache than there are staging frames: then each is read twice, one part
    /// at a time.
    pub fn split(&self) -> bool {
        self.split
    }

    /// Experts of the layer of the last request.
    pub fn chosen(&self) -> &[u16] {
        &self.chosen
    }

    /// Whether a part of an expert may be used.
    pub fn is_ready(&self, id: usize, part: usize) -> bool {
        self.parts.get(id).is_some_and(|parts| parts & (1 << part) != 0)
    }

    /// Whether a requested expert could not be read: the call has to end, and the next one starts afresh.
    pub fn is_broken(&self) -> bool {
        self.broken
    }

    /// Whether the cache keeps an expert.
    pub fn keeps(&self, key: Key) -> bool {
        self.cache.contains(key)
    }

    /// Counters of decisions so far.
    pub fn counts(&self) -> Counts {
        Counts { second_pass: self.ahead.again(), ..self.counts }
    }

    /// Layer and expert by number.
    pub fn keys(&self) -> &[Key] {
        &self.keys
    }

    /// Maximum number of experts in the cache.
    pub fn capacity(&self) -> u64 {
        self.cache.capacity()
    }

    /// Starts to read pinned experts, in the order of the plan, then as many others as the cache holds, the
    /// most used in recorded routing first. They are read after everything that a step requests. One that is
    /// missing when a step needs it is read like any other expert.
    fn begin(&mut self) {
        for at in 0..self.pinned.len() {
            // Their frames are reserved, so none is evicted.
            if matches!(self.cache.ahead(self.pinned[at], |_| {}), Ok(true)) {
                self.begin_with(self.pinned[at]);
            }
        }
        let uses = std::mem::take(&mut self.uses);
        let mut hottest = Vec::new();
        if !uses.is_empty() {
            self.cache.warm(&uses, |key| hottest.push(key));
        }
        for key in hottest {
            self.begin_with(key);
        }
        self.start_reads();
    }

    /// It was not requested: a failed read is not an error, and is done again on demand.
    fn begin_with(&mut self, key: Key) {
        let id = self.id(key);
        self.read_reasons[id] = ReadReason::Start;
        self.enqueue_read(PendingRead { id, first: 0, parts: 2 }, Priority::Prefetch, false);
    }

    /// Number of an expert, consecutive over the layers.
    pub fn id(&self, key: Key) -> usize {
        self.layers.get(usize::from(key.layer)).map_or(0, |p| p.first) + usize::from(key.expert)
    }

    fn layer_info(&self, id: usize) -> &LayerInfo {
        &self.layers[usize::from(self.keys[id].layer)]
    }
}
