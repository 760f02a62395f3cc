//! Which frame holds which expert, and what is read next.
//!
//! The cache decides ([`Cache::step`]); the pager moves bytes. A frame is a buffer of [`Flash`]. An expert is in one of four
//! states ([`Held`]); whether a part of it may be used is a bit that lanes look at without a lock. Nothing here allocates
//! after [`Pager::new`], apart from what errors say.

use super::ahead::Ahead;
use super::options::Paging;
use super::stage::Stage;
use super::tables::Tables;
use crate::cache::{self, Cache, Experts, Key, Layer, Ranking, Setting, Trace};
use crate::error::{Error, Result};
use crate::flash::{self, Flash, Loaded, Priority, ReadError, Stats, Ticket};
use crate::memory::Addr;
use crate::program::{PagedLayer, PagingRef, Program};
use crate::timeline::{Timeline, What};
use crate::unit::{Half, Lane, Launch, StepFault};
use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, RwLock};
use std::time::{Duration, Instant};

/// Bits of an expert whose two parts are there.
const WHOLE: u8 = 3;
/// Most tokens that are recorded.
const RECORDED: usize = 1 << 14;
/// How long a lane waits for news before it looks whether another lane has taken them.
const NEWS: Duration = Duration::from_micros(200);

/// What the store did since it was opened.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Report {
    /// Experts that were asked for and in memory, or on their way.
    pub hits: u64,
    /// Experts that were asked for and had to be read.
    pub misses: u64,
    /// Of those that were there: read ahead, and asked for as foreseen.
    pub foreseen: u64,
    /// Experts that were read ahead.
    pub ahead: u64,
    /// Misses that the cache did not keep.
    pub streamed: u64,
    /// Time in which the first lane waited for flash.
    pub stalled: Duration,
    /// What was read.
    pub flash: Stats,
    /// Which reader it is.
    pub reader: String,
    /// Policy of the cache with its parameters.
    pub policy: String,
    /// Bytes that a cache which knows what comes (Belady's) would have read for the tokens that were decoded one by one, and
    /// what was asked for them in all; where routing was recorded.
    pub belady: Option<(u64, u64)>,
    /// Most bytes of one read.
    pub block_bytes: u32,
    /// Bytes that the run may take.
    pub budget: u64,
    /// Frames of the cache.
    pub frames: u32,
    /// Bytes of all frames, those for experts that pass through included.
    pub frame_bytes: u64,
}

/// What a step asks for.
#[derive(Clone, Copy, Debug)]
pub(super) struct Asked<'a> {
    pub(super) layer: usize,
    /// Experts in the order of the dispatch table.
    pub(super) active: &'a [i32],
    /// Rows of the call.
    pub(super) rows: usize,
    /// Experts per token of the call.
    pub(super) k: usize,
    /// Layers whose scores there are, its own first.
    pub(super) scores: usize,
    pub(super) lanes: usize,
}

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
    /// Read ahead and not asked for yet, by number.
    guessed: Vec<bool>,
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
        program: &Program<'_>,
        paging: &PagingRef<'_>,
        flash: Flash,
        tables: Arc<Tables>,
        options: &Paging,
    ) -> Result<Self> {
        let plan = |e: &dyn std::fmt::Display| Error::Plan(e.to_string());
        let layers: Vec<Layer> = paging
            .layers
            .iter()
            // Of one size each: what counts is frames.
            .map(|l| Layer { experts: l.experts as usize, k: l.k as usize, bytes: 1 })
            .collect();
        let experts = Experts::new(&layers).map_err(|e| plan(&e))?;
        let setting: Setting = paging.policy.parse().map_err(|e| plan(&e))?;
        let cache = Cache::new(&experts, u64::from(paging.frames), &setting);
        let (mut places, mut keys) = (Vec::new(), Vec::new());
        for (i, &shape) in paging.layers.iter().enumerate() {
            let first = keys.len();
            keys.extend((0..shape.experts).map(|e| Key { layer: i as u16, expert: e as u16 }));
            let segment = |s: u32| program.segments.get(s as usize).copied();
            let (gate_up, down) =
                segment(shape.gate_up).zip(segment(shape.down)).ok_or_else(|| plan(&"no such segment"))?;
            let gap = down.offset.saturating_sub(gate_up.offset);
            let bytes = gap + down.matrix_bytes().unwrap_or(0);
            places.push(Place { first, shape, gap: gap as usize, bytes });
        }
        let most = paging.layers.iter().map(|l| l.experts as usize).max().unwrap_or(0);
        let count = keys.len();
        let report = Report {
            reader: flash.describe().to_owned(),
            policy: paging.policy.to_owned(),
            block_bytes: options.flash.block_bytes,
            budget: paging.budget,
            frames: paging.frames,
            frame_bytes: flash.buffers().bytes() as u64,
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
            guessed: vec![false; count],
            passed: vec![false; most],
            next: 0,
            ahead: Ahead::new(&layers, options.ahead),
            record: options.record.then(|| (Trace::new(experts.clone(), false), Vec::new())),
            error: None,
            report,
        };
        Ok(Self {
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
        })
    }

    /// Experts and experts per token of a layer.
    pub(super) fn shape(&self, layer: usize) -> Option<(usize, usize)> {
        self.places.get(layer).map(|p| (p.shape.experts as usize, p.shape.k as usize))
    }

    /// What was done so far.
    pub(crate) fn report(&self) -> Report {
        let mut report = self.lock().report.clone();
        report.belady = self.belady();
        report.flash = self.flash.stats();
        report.stalled = Duration::from_nanos(self.stalled.load(Ordering::Relaxed));
        report
    }

    /// What Belady's cache would have read, and what was used.
    fn belady(&self) -> Option<(u64, u64)> {
        let state = self.lock();
        let (trace, _) = state.record.as_ref()?;
        let tally = cache::optimum(trace, state.cache.capacity(), 1).total();
        // Sizes of experts hardly differ: the mean stands for all.
        let bytes: u64 = self.places.iter().map(|p| p.bytes * u64::from(p.shape.experts)).sum();
        let mean = bytes / (self.keys.len() as u64).max(1);
        Some((tally.misses * mean, tally.accesses() * mean))
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

    /// A layer asks for its experts: what is missing is read, in the order in which it will be computed.
    ///
    /// # Errors
    /// Experts that are not there; a reader that has broken down.
    pub(super) fn fetch<'s>(
        &self,
        asked: Asked<'_>,
        score: &dyn Fn(usize, usize) -> &'s [f32],
    ) -> Result<()> {
        let Asked { layer, active, rows, lanes, .. } = asked;
        let Some(place) = self.places.get(layer) else { return Ok(()) };
        let mut stage = self.stage.write().unwrap_or_else(PoisonError::into_inner);
        stage.clear(lanes);
        let mut guard = self.lock();
        let state = &mut *guard;
        if self.broken.swap(false, Ordering::Relaxed) {
            self.reset(state);
        }
        self.take_news(state);
        let experts = place.shape.experts;
        state.chosen.clear();
        state.chosen.extend(
            active.iter().filter_map(|&e| u32::try_from(e).ok()).filter(|&e| e < experts).map(|e| e as u16),
        );
        let State { cache, ranking, chosen, events, .. } = state;
        events.clear();
        // A policy looks at the scores of a token; those of many tokens say nothing that their choices do not.
        let ranked = if rows == 1 && cache.depth() > 0 {
            ranking.of_logits(score(0, 0), place.shape.score)
        } else {
            &[]
        };
        cache.step(layer, chosen, ranked, |e| events.push(e)).map_err(|e| Error::Plan(e.to_string()))?;
        if let Some((trace, token)) = state.record.as_mut().filter(|_| rows == 1) {
            if layer == 0 {
                token.clear();
            }
            token.extend(&state.chosen);
            if layer + 1 == self.places.len() && trace.tokens() < RECORDED {
                // A token whose layers were not all seen is no token.
                let _ = trace.push(token, &[]);
            }
        }
        let streams = state.events.iter().filter(|e| matches!(e, cache::Event::Stream(_))).count();
        stage.split = streams > self.spare;
        state.passed.fill(false);
        state.next = 0;
        for i in 0..state.events.len() {
            match state.events[i] {
                cache::Event::Evict(key) => self.evict(state, self.id(key)),
                cache::Event::Hit(key) => {
                    let id = self.id(key);
                    state.report.hits += 1;
                    state.report.foreseen += u64::from(std::mem::take(&mut state.guessed[id]));
                    self.hurry(state, id);
                }
                cache::Event::Load(key) => {
                    state.report.misses += 1;
                    want(state, Want { id: self.id(key), first: 0, parts: 2 }, Priority::Demand);
                }
                cache::Event::Stream(key) => {
                    state.report.misses += 1;
                    state.report.streamed += 1;
                    let parts = if stage.split { 1 } else { 2 };
                    want(state, Want { id: self.id(key), first: 0, parts }, Priority::Demand);
                }
            }
        }
        // First who is there, then who is on the way, then who has just been asked for, as they will come.
        for turn in 0..3 {
            for (at, &e) in active.iter().enumerate() {
                let Some(e) = usize::try_from(e).ok().filter(|&e| e < experts as usize) else { continue };
                let id = place.first + e;
                let whole = self.ready[id].load(Ordering::Acquire) == WHOLE;
                let when = match (&state.held[id], whole) {
                    (_, true) => 0,
                    (Held::Reading(_), _) => 1,
                    _ => 2,
                };
                if when == turn {
                    let key = self.keys[id];
                    stage.push(at, id, !state.cache.contains(key));
                }
            }
        }
        self.pump(state)?;
        self.look_ahead(state, asked, score);
        self.pump(state)
    }

    /// Reads ahead what the scores of the next layers promise.
    fn look_ahead<'s>(&self, state: &mut State, asked: Asked<'_>, score: &dyn Fn(usize, usize) -> &'s [f32]) {
        let Asked { layer, rows, scores, k, .. } = asked;
        let now = Instant::now();
        let stalled = Duration::from_nanos(self.stalled.load(Ordering::Relaxed));
        state.ahead.asked(layer, &state.chosen, now, stalled);
        if !self.foresees {
            return;
        }
        // A prompt uses nearly all experts of every layer: those of the next one are streamed in as they lie (PowerInfer-2,
        // §4.1.1).
        if let Some(next) = self
            .places
            .get(layer + 1)
            .filter(|p| rows > 1 && rows * p.shape.k as usize >= p.shape.experts as usize)
        {
            for expert in 0..next.shape.experts {
                let key = Key { layer: (layer + 1) as u16, expert: expert as u16 };
                if !self.read_ahead(state, key) && !state.cache.contains(key) {
                    break;
                }
            }
            return;
        }
        if rows != 1 {
            return;
        }
        if let Some(place) = self.places.get(layer) {
            state.ahead.little(layer, k, place.shape, score(0, 0));
        }
        if state.ahead.known(layer) {
            let known = std::mem::take(&mut state.ahead);
            for &key in known.prefetches() {
                self.read_ahead(state, key);
            }
            state.ahead = known;
            return;
        }
        if scores < 2 {
            return;
        }
        let stats = self.flash.stats();
        let pending: u64 = self.pending(state);
        let mut planned = std::mem::take(&mut state.ahead);
        let resident = |key: Key| state.cache.contains(key);
        let shape = |i: usize| self.places.get(layer + i).map(|p| (p.shape, p.bytes));
        planned.plan(layer, scores - 1, &shape, score, &resident, &stats, pending);
        for i in 0..planned.prefetches().len() {
            self.read_ahead(state, planned.prefetches()[i]);
        }
        state.ahead = planned;
    }

    /// Reads an expert that may be wanted, unless it is there or would not stay. Whether it is read.
    fn read_ahead(&self, state: &mut State, key: Key) -> bool {
        state.events.clear();
        let State { cache, events, .. } = &mut *state;
        if !matches!(cache.ahead(key, |e| events.push(e)), Ok(true)) {
            return false;
        }
        for i in 0..state.events.len() {
            match state.events[i] {
                cache::Event::Evict(key) => self.evict(state, self.id(key)),
                cache::Event::Load(key) => {
                    let id = self.id(key);
                    state.report.ahead += 1;
                    state.guessed[id] = true;
                    want(state, Want { id, first: 0, parts: 2 }, Priority::Prefetch);
                }
                cache::Event::Hit(_) | cache::Event::Stream(_) => {}
            }
        }
        true
    }

    /// Bytes that were asked for and are not there.
    fn pending(&self, state: &State) -> u64 {
        let wanted = state.queues.iter().flatten().filter(|w| matches!(state.held[w.id], Held::Wanted));
        let reading = state.reading.iter().flatten().map(|r| r.want);
        wanted.copied().chain(reading).map(|w| self.place(w.id).bytes).sum()
    }

    fn id(&self, key: Key) -> usize {
        self.places.get(usize::from(key.layer)).map_or(0, |p| p.first) + usize::from(key.expert)
    }

    fn place(&self, id: usize) -> &Place {
        &self.places[usize::from(self.keys[id].layer)]
    }

    /// What was read ahead is needed now.
    fn hurry(&self, state: &mut State, id: usize) {
        match state.held[id] {
            Held::Reading(ticket) => self.flash.raise(ticket),
            // Still waiting for a frame among those that are read ahead.
            Held::Wanted => {
                state.queues[Priority::Demand as usize].push_back(Want { id, first: 0, parts: 2 });
            }
            // The cache thinks that it is there, and its read has failed.
            Held::No => want(state, Want { id, first: 0, parts: 2 }, Priority::Demand),
            Held::Here(_) => {}
        }
    }

    /// An expert leaves its frame.
    fn evict(&self, state: &mut State, id: usize) {
        self.ready[id].store(0, Ordering::Relaxed);
        state.guessed[id] = false;
        if let Held::Reading(ticket) = std::mem::take(&mut state.held[id]) {
            self.flash.cancel(ticket);
            if let Some(reading) = state.reading.get_mut(ticket.buffer()) {
                *reading = None;
            }
        }
    }

    /// Starts reads as long as frames are free.
    fn pump(&self, state: &mut State) -> Result<()> {
        for priority in [Priority::Demand, Priority::Prefetch] {
            while let Some(&want) = state.queues[priority as usize].front() {
                // It went, or came, since.
                if matches!(state.held[want.id], Held::Wanted) {
                    let place = self.place(want.id);
                    let Some(buffer) = self.flash.buffers().take(place.bytes) else { return Ok(()) };
                    let base = buffer.addr();
                    let first = (2 * want.id) as u32 + u32::from(want.first);
                    let ticket = self.flash.submit(first, u32::from(want.parts), priority, buffer)?;
                    state.held[want.id] = Held::Reading(ticket);
                    if let Some(reading) = state.reading.get_mut(ticket.buffer()) {
                        let ahead = priority == Priority::Prefetch;
                        *reading = Some(Reading { ticket, want, base, since: Instant::now(), ahead });
                    }
                }
                state.queues[priority as usize].pop_front();
            }
        }
        Ok(())
    }

    fn take_news(&self, state: &mut State) {
        while let Some(event) = self.flash.poll() {
            self.hear(state, event);
        }
    }

    /// What became of a read.
    fn hear(&self, state: &mut State, event: flash::Event) {
        let find = |state: &State, ticket: Ticket| {
            state.reading.get(ticket.buffer()).copied().flatten().filter(|r| r.ticket == ticket)
        };
        match event {
            flash::Event::Arrived { ticket, extent } => {
                if let Some(r) = find(state, ticket) {
                    self.arrived(&r, (extent as usize).saturating_sub(2 * r.want.id));
                }
            }
            flash::Event::Done { ticket, loaded } => {
                if let Some(r) = find(state, ticket) {
                    state.reading[ticket.buffer()] = None;
                    state.held[r.want.id] = Held::Here(loaded);
                    if let Some(timeline) = self.timeline.get() {
                        let (layer, expert) = self.name(r.want.id);
                        timeline.read(What::Read { layer, expert, ahead: r.ahead }, r.since);
                    }
                    for part in r.want.first..r.want.first + r.want.parts {
                        self.arrived(&r, usize::from(part));
                    }
                }
            }
            flash::Event::Failed { ticket, error } => {
                if let Some(r) = find(state, ticket) {
                    state.reading[ticket.buffer()] = None;
                    self.ready[r.want.id].store(0, Ordering::Relaxed);
                    state.held[r.want.id] = Held::No;
                    // What was only guessed is read again if it is asked for.
                    if !state.guessed[r.want.id] {
                        state.error.get_or_insert_with(|| Box::new(error));
                        self.broken.store(true, Ordering::Release);
                    }
                }
            }
            flash::Event::Cancelled { .. } => {}
        }
    }

    /// A part of an expert is there.
    fn arrived(&self, r: &Reading, part: usize) {
        let (key, place) = (self.keys[r.want.id], self.place(r.want.id));
        let skipped = if part > usize::from(r.want.first) { place.gap } else { 0 };
        let half = Half { layer: key.layer.into(), part };
        self.tables.set(half, key.expert.into(), r.base.plus(skipped));
        // Release: who sees the bit sees the address and the bytes.
        self.ready[r.want.id].fetch_or(1 << part, Ordering::Release);
    }

    /// Forgets everything: after an error the cache believes in experts that are not there.
    fn reset(&self, state: &mut State) {
        for id in 0..self.keys.len() {
            self.evict(state, id);
        }
        state.queues.iter_mut().for_each(VecDeque::clear);
        state.cache.reset();
        state.error = None;
    }

    /// A lane's share of a step over the active experts: `call` runs a range of its items.
    pub(super) fn run(&self, half: Half, launch: &Launch<'_>, lane: Lane, call: &dyn Fn(usize, usize)) {
        let crate::program::Grid::Experts { tiles, .. } = launch.grid else { return };
        let tiles = tiles as usize;
        let stage = self.stage.read().unwrap_or_else(PoisonError::into_inner);
        let pieces = stage.pieces;
        loop {
            let item = launch.taken.fetch_add(1, Ordering::Relaxed);
            let (at, piece) = (item / pieces, item % pieces);
            let (Some(&place), Some(&id)) = (stage.order.get(at), stage.ids.get(at)) else { return };
            if let Err(e) = self.wait(id, half.part, lane) {
                return launch.fail(StepFault::Flash(e));
            }
            call(place * tiles + tiles * piece / pieces, place * tiles + tiles * (piece + 1) / pieces);
            if stage.computed(at, half.part)
                && stage.streamed[at]
                && (stage.split || half.part == 1)
                && let Err(e) = self.let_go(&stage, at, half.part)
            {
                return launch.fail(StepFault::Flash(e));
            }
        }
    }

    /// A part of an expert that only passes through is computed.
    fn let_go(&self, stage: &Stage, at: usize, part: usize) -> Result<()> {
        let mut guard = self.lock();
        let state = &mut *guard;
        self.evict(state, stage.ids[at]);
        if part == 0 {
            // Down matrices are read in the order in which they will be computed, whoever was first to finish: with all
            // frames taken by later ones nobody would go on.
            state.passed[at] = true;
            while let Some(&id) = stage.ids.get(state.next)
                && (state.passed[state.next] || !stage.streamed[state.next])
            {
                if stage.streamed[state.next] {
                    want(state, Want { id, first: 1, parts: 1 }, Priority::Demand);
                }
                state.next += 1;
            }
        }
        self.pump(state)
    }

    /// Waits until a part of an expert may be used.
    fn wait(&self, id: usize, part: usize, lane: Lane) -> Result<()> {
        let there = || self.ready[id].load(Ordering::Acquire) & (1 << part) != 0;
        if there() {
            return Ok(());
        }
        let start = Instant::now();
        while !there() {
            if self.broken.load(Ordering::Acquire) {
                let error = self.lock().error.clone();
                return Err(error.map_or_else(|| Error::Plan("a read was given up".to_owned()), Error::Flash));
            }
            let event = self.flash.wait(Some(NEWS));
            let mut guard = self.lock();
            if let Some(event) = event {
                self.hear(&mut guard, event);
            }
            self.take_news(&mut guard);
            self.pump(&mut guard)?;
        }
        if let Some(timeline) = self.timeline.get() {
            let (layer, expert) = self.name(id);
            timeline.lane(lane.index, What::Wait { layer, expert }, start);
        }
        if lane.index == 0 {
            self.stalled.fetch_add(start.elapsed().as_nanos() as u64, Ordering::Relaxed);
        }
        Ok(())
    }
}

fn want(state: &mut State, want: Want, priority: Priority) {
    state.held[want.id] = Held::Wanted;
    state.queues[priority as usize].push_back(want);
}
