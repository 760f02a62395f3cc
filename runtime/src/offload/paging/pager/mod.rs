//! Pager of experts on disk and in frames, for the computing threads.
//!
//! The [`super::decider`] decides what is read, kept and evicted; an I/O executor carries it out. The pager
//! keeps both under a lock, passes them the requests of steps and the parts that threads have computed, and
//! enters the addresses of arrived experts in the kernels' tables. Whether a part of an expert may be used is
//! a bit that threads read without a lock. Nothing here allocates after [`Pager::new`], except for errors.
//!
//! * `request`: requests of a layer for its experts.
//! * `compute`: waits of computing threads for an expert, and the release of one that bypasses the cache.
//! * `report`: statistics.

mod compute;
mod report;
mod request;

use super::decider::{Decider, DeciderOptions, Decision, Event, FrameEvent};
use super::hooks::Hooks;
use super::io_executor::{IoExecutor, Watch};
use super::options::Paging;
use super::step_order::StepOrder;
use super::tables::Tables;
use crate::bundle::program::Program;
use crate::error::{Error, Result};
use crate::exec::timeline::{Timeline, What};
use crate::exec::unit::{ExpertPart, LayerPart};
use crate::offload::cache::Key;
use crate::offload::disk::{Disk, Priority};
use crate::platform::memory::Addr;
use moec_ir::plan;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, RwLock};
use std::time::{Duration, Instant};

pub use report::Report;
pub(super) use request::DispatchRequest;

/// A faster memory whose experts are also in this one.
pub(crate) trait EvictionListener: Send + Sync {
    /// Called when an expert has left memory.
    fn left(&self, key: Key);
}

/// Experts of a layer.
struct LayerInfo {
    /// Number of its first expert.
    first: usize,
    experts: usize,
    k: usize,
    /// Bytes from the start of an expert to its down matrix.
    gap: usize,
    /// Bytes of an expert.
    bytes: u64,
}

/// Mutable state, under one lock.
struct State {
    executor: IoExecutor,
    /// Statistics that no longer change.
    report: Report,
}

/// Experts on disk and in frames.
pub(crate) struct Pager {
    disk: Arc<dyn Disk>,
    view: ReadyView,
    state: Mutex<State>,
    step_order: RwLock<StepOrder>,
    /// Nanoseconds that the first thread has waited.
    stalled: AtomicU64,
}

/// View that threads read without a lock.
struct ReadyView {
    places: Vec<LayerInfo>,
    /// Layer and expert by number.
    keys: Vec<Key>,
    tables: Arc<Tables>,
    /// By number of the expert: bits of the parts that may be used.
    ready: Vec<AtomicU8>,
    /// Whether the call has to end.
    broken: AtomicBool,
    timeline: OnceLock<Arc<Timeline>>,
    /// Listener for experts that leave memory.
    eviction_listener: OnceLock<Arc<dyn EvictionListener>>,
    hooks: Option<&'static dyn Hooks>,
}

impl Pager {
    pub(super) fn new(
        program: &Program,
        (paging, elsewhere): (&plan::Paging, &[(u32, u32)]),
        disk: Arc<dyn Disk>,
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
            places.push(LayerInfo { first, experts, k, gap: gap as usize, bytes });
            first += experts;
        }
        let bytes: Vec<u64> = places.iter().map(|p| p.bytes).collect();
        let decider_options =
            DeciderOptions { bytes: &bytes, elsewhere, ahead: options.ahead, preload: options.preload };
        let decider = Decider::new(paging, decider_options)?;
        let report = Report {
            reader: disk.describe().to_owned(),
            policy: paging.policy.clone(),
            block_bytes: paging.block_bytes,
            budget: paging.budget,
            frames: paging.frames,
            current_frames: paging.frames,
            frame_bytes: disk.buffers().bytes() as u64,
            pinned: paging.pinned.len() as u32,
            pinned_bytes: paging.frame_bytes.saturating_mul(paging.pinned.len() as u64),
            ..Report::default()
        };
        let most = places.iter().map(|p| p.experts).max().unwrap_or(0);
        let view = ReadyView {
            places,
            keys: decider.keys().to_vec(),
            tables,
            ready: (0..first).map(|_| AtomicU8::new(0)).collect(),
            broken: AtomicBool::new(false),
            timeline: OnceLock::new(),
            eviction_listener: OnceLock::new(),
            hooks: options.hooks,
        };
        let executor = IoExecutor::new(decider, disk.buffers().len());
        let pager = Self {
            view,
            state: Mutex::new(State { executor, report }),
            step_order: RwLock::new(StepOrder::new(most)),
            stalled: AtomicU64::new(0),
            disk,
        };
        // A reader that has failed is reported to the first step, which requests the experts again.
        let _ = pager.lock().executor.publish_frame_event(&*pager.disk, FrameEvent::Began, &mut &pager.view);
        Ok(pager)
    }

    /// Experts and experts per token of a layer.
    pub(super) fn shape(&self, layer: usize) -> Option<(usize, usize)> {
        self.view.places.get(layer).map(|p| (p.experts, p.k))
    }

    /// Sets the memory that is notified of experts that leave this one. Called at most once.
    pub(crate) fn set_eviction_listener(&self, eviction_listener: Arc<dyn EvictionListener>) {
        let _ = self.view.eviction_listener.set(eviction_listener);
    }

    /// Whether memory holds an expert, and the cache keeps it.
    pub(crate) fn holds(&self, key: Key) -> bool {
        let id = self.view.id(key);
        self.view.is_ready(id, 0) && self.view.is_ready(id, 1) && self.lock().executor.decider.keeps(key)
    }

    /// Records reads and waits in the timeline from now on. Called at most once.
    pub(crate) fn watch(&self, timeline: Arc<Timeline>) {
        let _ = self.view.timeline.set(timeline);
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Handles the events of the disk.
    fn handle_disk_events(&self, state: &mut State) -> Result<()> {
        state.executor.handle_disk_events(&*self.disk, &mut &self.view)
    }
}

impl ReadyView {
    /// Number of an expert.
    fn id(&self, key: Key) -> usize {
        self.places.get(usize::from(key.layer)).map_or(0, |p| p.first) + usize::from(key.expert)
    }

    /// Layer and expert.
    fn name(&self, id: usize) -> (u32, u32) {
        (self.keys[id].layer.into(), self.keys[id].expert.into())
    }

    /// Records that an expert leaves memory.
    fn leaves(&self, key: Key) {
        self.ready[self.id(key)].store(0, Ordering::Relaxed);
        if let Some(eviction_listener) = self.eviction_listener.get() {
            eviction_listener.left(key);
        }
    }

    /// Whether a part of an expert may be used.
    fn is_ready(&self, id: usize, part: usize) -> bool {
        self.ready[id].load(Ordering::Acquire) & (1 << part) != 0
    }
}

impl Watch for &ReadyView {
    fn handled(&mut self, now: Duration, event: &Event<'_>) {
        if let Some(hooks) = self.hooks {
            hooks.handled(now, event);
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
                let layer_part =
                    LayerPart { layer: key.layer.into(), part: ExpertPart::ALL[usize::from(part)] };
                let skipped = if part > first { gap } else { 0 };
                self.tables.set(layer_part, key.expert.into(), base.plus(skipped));
                // Release: a thread that sees the bit also sees the address and the bytes.
                self.ready[self.id(key)].fetch_or(1 << part, Ordering::Release);
            }
            Decision::Evict { key, .. } => self.leaves(key),
            Decision::ReadFailed { key, requested, .. } => {
                self.leaves(key);
                if requested {
                    self.broken.store(true, Ordering::Release);
                }
            }
            Decision::Enqueue { .. } | Decision::Load { .. } | Decision::RaisePriority { .. } => {}
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

/// The moment this long ago, for the timeline, which uses the machine's clock.
fn ago(time: Duration) -> Instant {
    let now = Instant::now();
    now.checked_sub(time).unwrap_or(now)
}
