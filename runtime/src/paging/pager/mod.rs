//! Which frame holds which expert, and what is read next.
//!
//! The cache decides ([`Cache::step`]); the pager moves bytes. A frame is a buffer of [`Flash`]. An expert is in one of four
//! states ([`Held`]); whether a part of it may be used is a bit that lanes look at without a lock. Nothing here allocates
//! after [`Pager::new`], apart from what errors say.
//!
//! * `preload`: pinned experts, and those that recorded routing used most, from the start.
//! * `ask`: a layer asks for its experts, and for those of the next layers.
//! * `guests`: experts that were read ahead for one layer.
//! * `reads`: what is to be read, what is being read, and what became of it.
//! * `lanes`: who computes waits for an expert, and lets one go that only passed through.
//! * `report`: what was done.

mod ask;
mod guests;
mod lanes;
mod preload;
mod reads;
mod report;

use super::ahead::Ahead;
use super::options::Paging;
use super::stage::Stage;
use super::tables::Tables;
use crate::cache::{self, Cache, Experts, Key, Layer, Ranking, Setting, Trace};
use crate::error::{Error, Result};
use crate::flash::{Flash, Loaded, ReadError, Ticket};
use crate::memory::Addr;
use crate::program::Program;
use crate::timeline::Timeline;
use moec_ir::plan::{self, PagedLayer};
use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, RwLock};
use std::time::Instant;

pub(super) use ask::Asked;
pub use report::Report;

/// Experts of a layer.
struct Place {
    /// Number of its first expert.
    first: usize,
    shape: PagedLayer,
    /// Bytes from the beginning of an expert to its down matrix.
    gap: usize,
    /// Bytes of an expert.
    bytes: u64,
}

/// Where an expert is.
#[derive(Debug, Default)]
enum Held {
    /// On flash.
    #[default]
    No,
    /// To be read as soon as a frame is free.
    Wanted,
    Reading(Ticket),
    Here(
        #[expect(dead_code, reason = "held so that the frame is its own; dropping it frees the frame")]
        Loaded,
    ),
}

/// A read that is to be started: `parts` of an expert from `first` on.
#[derive(Clone, Copy, Debug)]
struct Want {
    id: usize,
    first: u8,
    parts: u8,
}

/// A read that was started.
#[derive(Clone, Copy, Debug)]
struct Reading {
    ticket: Ticket,
    want: Want,
    base: Addr,
    since: Instant,
    ahead: bool,
}

/// Why an expert is read.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Why {
    /// A step has asked for it.
    #[default]
    Asked,
    /// It is one of those that the cache begins with.
    Start,
    /// A later layer may ask for it.
    Guessed,
}

/// What changes, in one hand at a time.
struct State {
    cache: Cache,
    ranking: Ranking,
    /// By number of the expert.
    held: Vec<Held>,
    /// By buffer.
    reading: Vec<Option<Reading>>,
    /// To be read now, and ahead.
    queues: [VecDeque<Want>; 2],
    events: Vec<cache::Event>,
    chosen: Vec<u16>,
    /// Why it was read, until somebody asks for it; by number.
    why: Vec<Why>,
    /// Who was read ahead and is not the cache's.
    guests: Vec<usize>,
    /// Experts of the last layer that pass through.
    streams: usize,
    /// Where gate and up are computed, by place in the stage; and the first place where they are not.
    passed: Vec<bool>,
    next: usize,
    ahead: Ahead,
    /// Routing so far, and of the token under way.
    record: Option<(Trace, Vec<u16>)>,
    error: Option<Box<ReadError>>,
    report: Report,
}

/// Experts on flash and in frames.
pub(crate) struct Pager {
    flash: Flash,
    places: Vec<Place>,
    tables: Arc<Tables>,
    /// By number of the expert: which parts may be used.
    ready: Vec<AtomicU8>,
    /// Layer and index of every expert.
    keys: Vec<Key>,
    spare: usize,
    state: Mutex<State>,
    stage: RwLock<Stage>,
    broken: AtomicBool,
    /// Whether anything is read before it is asked for.
    foresees: bool,
    /// Nanoseconds that the first lane has waited.
    stalled: AtomicU64,
    timeline: OnceLock<Arc<Timeline>>,
}

impl Pager {
    pub(super) fn new(
        program: &Program,
        paging: &plan::Paging,
        flash: Flash,
        tables: Arc<Tables>,
        options: &Paging,
    ) -> Result<Self> {
        let wrong = |e: &dyn std::fmt::Display| Error::Plan(e.to_string());
        let layers: Vec<Layer> = paging
            .layers
            .iter()
            // Of one size each: what counts is frames.
            .map(|l| Layer { experts: l.experts as usize, k: l.k as usize, bytes: 1 })
            .collect();
        let experts = Experts::new(&layers).map_err(|e| wrong(&e))?;
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
            let first = keys.len();
            keys.extend((0..shape.experts).map(|e| Key { layer: i as u16, expert: e as u16 }));
            let segment = |s: u32| program.segments.get(s as usize);
            let (gate_up, down) =
                segment(shape.gate_up).zip(segment(shape.down)).ok_or_else(|| wrong(&"no such segment"))?;
            let gap = down.offset.saturating_sub(gate_up.offset);
            let bytes = gap + down.matrix_bytes().unwrap_or(0);
            places.push(Place { first, shape, gap: gap as usize, bytes });
        }
        let most = paging.layers.iter().map(|l| l.experts as usize).max().unwrap_or(0);
        let count = keys.len();
        let report = Report {
            reader: flash.describe().to_owned(),
            policy: paging.policy.clone(),
            block_bytes: paging.block_bytes,
            budget: paging.budget,
            frames: paging.frames,
            frame_bytes: flash.buffers().bytes() as u64,
            pinned: paging.pinned.len() as u32,
            pinned_bytes: paging.frame_bytes.saturating_mul(paging.pinned.len() as u64),
            ..Report::default()
        };
        let state = State {
            ranking: Ranking::new(most, cache.depth()),
            cache,
            held: std::iter::repeat_with(Held::default).take(count).collect(),
            reading: vec![None; flash.buffers().len()],
            queues: std::array::from_fn(|_| VecDeque::with_capacity(2 * count)),
            events: Vec::with_capacity(4 * most),
            chosen: Vec::with_capacity(most),
            why: vec![Why::Asked; count],
            guests: Vec::with_capacity(paging.spare as usize),
            streams: 0,
            passed: vec![false; most],
            next: 0,
            ahead: Ahead::new(&layers, options.ahead),
            record: options.record.then(|| (Trace::new(experts.clone(), false), Vec::new())),
            error: None,
            report,
        };
        let pager = Self {
            places,
            tables,
            ready: (0..count).map(|_| AtomicU8::new(0)).collect(),
            keys,
            spare: paging.spare as usize,
            state: Mutex::new(state),
            stage: RwLock::new(Stage::new(most)),
            broken: AtomicBool::new(false),
            foresees: options.ahead > 0,
            stalled: AtomicU64::new(0),
            timeline: OnceLock::new(),
            flash,
        };
        pager.preload(&pinned, if options.preload { &paging.uses } else { &[] });
        Ok(pager)
    }

    /// Experts and experts per token of a layer.
    pub(super) fn shape(&self, layer: usize) -> Option<(usize, usize)> {
        self.places.get(layer).map(|p| (p.shape.experts as usize, p.shape.k as usize))
    }

    /// Writes down from now on what is read and waited for. Once only.
    pub(crate) fn watch(&self, timeline: Arc<Timeline>) {
        let _ = self.timeline.set(timeline);
    }

    /// Layer and expert.
    fn name(&self, id: usize) -> (u32, u32) {
        (self.keys[id].layer.into(), self.keys[id].expert.into())
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn id(&self, key: Key) -> usize {
        self.places.get(usize::from(key.layer)).map_or(0, |p| p.first) + usize::from(key.expert)
    }

    fn place(&self, id: usize) -> &Place {
        &self.places[usize::from(self.keys[id].layer)]
    }
}
