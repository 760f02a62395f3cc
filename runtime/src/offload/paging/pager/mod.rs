//! Experts on flash and in frames, for the computing threads.
//!
//! What is read, kept and given up is decided elsewhere ([`super::decider`]); a desk carries it out. The pager keeps both under a
//! lock, tells them what steps ask for and what lanes have computed, and enters addresses of what has come where kernels read
//! them. Whether a part of an expert may be used is a bit that lanes look at without a lock. Nothing here allocates after
//! [`Pager::new`], apart from what errors say.
//!
//! * `ask`: a layer asks for its experts.
//! * `lanes`: who computes waits for an expert, and lets one go that only passed through.
//! * `report`: what was done.

mod ask;
mod lanes;
mod report;

use super::decider::{Decider, Decision, Event, How, News};
use super::desk::{Desk, Watch};
use super::hooks::Hooks;
use super::options::Paging;
use super::stage::Stage;
use super::tables::Tables;
use crate::bundle::program::Program;
use crate::error::{Error, Result};
use crate::exec::timeline::{Timeline, What};
use crate::exec::unit::Half;
use crate::offload::cache::Key;
use crate::offload::flash::{Disk, Priority};
use crate::platform::memory::Addr;
use moec_ir::plan;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, RwLock};
use std::time::{Duration, Instant};

pub(super) use ask::Asked;
pub use report::Report;

/// A memory whose experts are those of this one, too.
pub(crate) trait Above: Send + Sync {
    /// An expert has left memory.
    fn left(&self, key: Key);
}

/// Experts of a layer.
struct Place {
    /// Number of its first expert.
    first: usize,
    experts: usize,
    k: usize,
    /// Bytes from the beginning of an expert to its down matrix.
    gap: usize,
    /// Bytes of an expert.
    bytes: u64,
}

/// Mutable state, under one lock.
struct State {
    desk: Desk,
    /// What does not change any more.
    report: Report,
}

/// Experts on flash and in frames.
pub(crate) struct Pager {
    flash: Arc<dyn Disk>,
    hall: Hall,
    state: Mutex<State>,
    stage: RwLock<Stage>,
    /// Nanoseconds that the first lane has waited.
    stalled: AtomicU64,
}

/// View that lanes read without a lock.
struct Hall {
    places: Vec<Place>,
    /// Layer and index of every expert.
    keys: Vec<Key>,
    tables: Arc<Tables>,
    /// By number of the expert: which parts may be used.
    ready: Vec<AtomicU8>,
    /// Whether the call has to end.
    broken: AtomicBool,
    timeline: OnceLock<Arc<Timeline>>,
    /// Listener for experts that leave memory.
    above: OnceLock<Arc<dyn Above>>,
    hooks: Option<&'static dyn Hooks>,
}

impl Pager {
    pub(super) fn new(
        program: &Program,
        paging: &plan::Paging,
        flash: Arc<dyn Disk>,
        tables: Arc<Tables>,
        options: &Paging,
    ) -> Result<Self> {
        let (mut places, mut first) = (Vec::new(), 0);
        for shape in &paging.layers {
            let segment = |s: u32| program.segments.get(s as usize);
            let (gate_up, down) = segment(shape.gate_up)
                .zip(segment(shape.down))
                .ok_or_else(|| Error::plan("no such segment"))?;
            let gap = down.offset.saturating_sub(gate_up.offset);
            let bytes = gap + down.matrix_bytes().unwrap_or(0);
            let (experts, k) = (shape.experts as usize, shape.k as usize);
            places.push(Place { first, experts, k, gap: gap as usize, bytes });
            first += experts;
        }
        let bytes: Vec<u64> = places.iter().map(|p| p.bytes).collect();
        let elsewhere = program.elsewhere();
        let how =
            How { bytes: &bytes, elsewhere: &elsewhere, ahead: options.ahead, preload: options.preload };
        let decider = Decider::new(paging, how)?;
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
        let most = places.iter().map(|p| p.experts).max().unwrap_or(0);
        let hall = Hall {
            places,
            keys: decider.keys().to_vec(),
            tables,
            ready: (0..first).map(|_| AtomicU8::new(0)).collect(),
            broken: AtomicBool::new(false),
            timeline: OnceLock::new(),
            above: OnceLock::new(),
            hooks: options.hooks,
        };
        let desk = Desk::new(decider, flash.buffers().len());
        let pager = Self {
            hall,
            state: Mutex::new(State { desk, report }),
            stage: RwLock::new(Stage::new(most)),
            stalled: AtomicU64::new(0),
            flash,
        };
        // A reader that has broken down is told to the first step, which asks anew.
        let _ = pager.lock().desk.news(&*pager.flash, News::Began, &mut &pager.hall);
        Ok(pager)
    }

    /// Experts and experts per token of a layer.
    pub(super) fn shape(&self, layer: usize) -> Option<(usize, usize)> {
        self.hall.places.get(layer).map(|p| (p.experts, p.k))
    }

    /// Has another memory told of experts that leave this one. Once only.
    pub(crate) fn tell(&self, above: Arc<dyn Above>) {
        let _ = self.hall.above.set(above);
    }

    /// Whether memory holds an expert, and keeps it.
    pub(crate) fn holds(&self, key: Key) -> bool {
        let id = self.hall.id(key);
        self.hall.is_ready(id, 0) && self.hall.is_ready(id, 1) && self.lock().desk.decider.keeps(key)
    }

    /// Writes down from now on what is read and waited for. Once only.
    pub(crate) fn watch(&self, timeline: Arc<Timeline>) {
        let _ = self.hall.timeline.set(timeline);
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Hears what flash has to tell.
    fn take_news(&self, state: &mut State) -> Result<()> {
        state.desk.take_news(&*self.flash, &mut &self.hall)
    }
}

impl Hall {
    /// Number of an expert.
    fn id(&self, key: Key) -> usize {
        self.places.get(usize::from(key.layer)).map_or(0, |p| p.first) + usize::from(key.expert)
    }

    /// Layer and expert.
    fn name(&self, id: usize) -> (u32, u32) {
        (self.keys[id].layer.into(), self.keys[id].expert.into())
    }

    /// An expert leaves memory.
    fn leaves(&self, key: Key) {
        self.ready[self.id(key)].store(0, Ordering::Relaxed);
        if let Some(above) = self.above.get() {
            above.left(key);
        }
    }

    /// Whether a part of an expert may be used.
    fn is_ready(&self, id: usize, part: usize) -> bool {
        self.ready[id].load(Ordering::Acquire) & (1 << part) != 0
    }
}

impl Watch for &Hall {
    fn heard(&mut self, now: Duration, event: &Event<'_>) {
        if let Some(hooks) = self.hooks {
            hooks.heard(now, event);
        }
    }

    fn decided(&mut self, decision: &Decision, base: Option<Addr>) {
        if let Some(hooks) = self.hooks {
            hooks.decided(decision);
        }
        match *decision {
            Decision::Use { key, part, first, .. } => {
                let Some(base) = base else { return };
                let gap = self.places.get(usize::from(key.layer)).map_or(0, |p| p.gap);
                let half = Half { layer: key.layer.into(), part: part.into() };
                let skipped = if part > first { gap } else { 0 };
                self.tables.set(half, key.expert.into(), base.plus(skipped));
                // Release: who sees the bit sees the address and the bytes.
                self.ready[self.id(key)].fetch_or(1 << part, Ordering::Release);
            }
            Decision::Evict { key, .. } => self.leaves(key),
            Decision::Lost { key, asked, .. } => {
                self.leaves(key);
                if asked {
                    self.broken.store(true, Ordering::Release);
                }
            }
            Decision::Want { .. } | Decision::Load { .. } | Decision::Hurry { .. } => {}
        }
    }

    fn read(&mut self, key: Key, priority: Priority, since: Duration, now: Duration) {
        if let Some(timeline) = self.timeline.get() {
            let (layer, expert) = (key.layer.into(), key.expert.into());
            let ahead = priority == Priority::Prefetch;
            timeline.read(What::Read { layer, expert, ahead }, ago(now.saturating_sub(since)));
        }
    }
}

/// The moment so long ago, for the timeline, which is in the machine's own time.
fn ago(time: Duration) -> Instant {
    let now = Instant::now();
    now.checked_sub(time).unwrap_or(now)
}
