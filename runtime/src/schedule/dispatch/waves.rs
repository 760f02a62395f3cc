//! Order in which the hot unit computes a layer's experts: those that it holds first, in one wave, then the
//! others as their transfers end (HybriMoE, §IV-B). In the first calls of a run the waves are timed, and so
//! are the CPU's experts and the transfers (§IV-A).

use super::transfer_queue::TransferQueue;
use crate::schedule::Costs;
use crate::schedule::warm_up::{COSTS, CostCheck, PlannedWork, WarmUp};
use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// Experts of a layer in its current step.
#[derive(Debug, Default)]
struct LayerExperts {
    /// Those of the hot unit, in the order of its dispatch table: the ticket of the transfer that each waits
    /// for, 0 for none, and its tokens.
    hot: Vec<(u64, u32)>,
    /// Tokens of those of the CPU.
    cpu: Vec<u32>,
}

/// Measurements, until each cost has enough.
#[derive(Debug)]
struct Measurements {
    warm_up: WarmUp,
    /// Calls so far. The first one is not measured: it reads weights that nothing has read before.
    calls: u32,
    /// Corrected costs that the dispatcher does not have yet.
    corrected: Option<Costs>,
}

/// Waves of all layers.
#[derive(Debug)]
pub(super) struct Waves {
    layers: Box<[Mutex<LayerExperts>]>,
    /// `None`: the plan's costs stay.
    measurements: Mutex<Option<Measurements>>,
    measuring: AtomicBool,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Waves {
    /// Waves of so many layers: 0 if no transfer runs in parallel to the steps.
    pub(super) fn new(layers: usize) -> Self {
        Self {
            layers: (0..layers).map(|_| Mutex::default()).collect(),
            measurements: Mutex::new(None),
            measuring: AtomicBool::new(false),
        }
    }

    /// Number of layers.
    pub(super) fn layers(&self) -> usize {
        self.layers.len()
    }

    /// Sets a layer's experts: those of the hot unit in any order, as (ticket, tokens), and the tokens of
    /// those of the CPU.
    pub(super) fn set(
        &self,
        layer: usize,
        hot: impl Iterator<Item = (u64, u32)>,
        cpu: impl Iterator<Item = u32>,
    ) {
        let Some(experts) = self.layers.get(layer) else { return };
        let mut experts = lock(experts);
        experts.hot.clear();
        experts.hot.extend(hot);
        experts.hot.sort_unstable_by_key(|&(ticket, tokens)| (ticket, std::cmp::Reverse(tokens)));
        experts.cpu.clear();
        experts.cpu.extend(cpu);
    }

    /// The next experts of a layer that the hot unit computes together, as a range of those in its dispatch
    /// table; those before `from` have been computed. Waits for one if none is there. `None` after the last.
    pub(super) fn next(&self, layer: usize, from: usize, transfers: &TransferQueue) -> Option<Range<usize>> {
        let tickets: Vec<u64> = lock(self.layers.get(layer)?).hot.iter().skip(from).map(|of| of.0).collect();
        let first = *tickets.first()?;
        let done = transfers.wait(first);
        Some(from..from + tickets.partition_point(|&ticket| ticket <= done))
    }

    /// Begins to measure costs, which `planned` has as the plan says them.
    pub(super) fn begin_warm_up(&self, planned: Costs) {
        let warm_up = WarmUp::new(planned);
        *lock(&self.measurements) = Some(Measurements { warm_up, calls: 0, corrected: None });
    }

    /// Notes that a layer is dispatched, and adds the times of transfers since the last one. Returns costs
    /// that were corrected since.
    pub(super) fn dispatched(&self, layer: usize, transfers: &TransferQueue) -> Option<Costs> {
        let mut measurements = lock(&self.measurements);
        let of = measurements.as_mut()?;
        if layer == 0 {
            of.calls = of.calls.saturating_add(1);
            if of.calls == 2 {
                self.measuring.store(true, Ordering::Relaxed);
                transfers.begin_timing();
            }
        }
        for took in transfers.take_times() {
            if let Some(work) = of.warm_up.transfer() {
                of.add(work, took);
            }
        }
        of.corrected.take()
    }

    /// The work of a wave, if it is to be timed.
    pub(super) fn timed_wave(&self, layer: usize, wave: Range<usize>) -> Option<PlannedWork> {
        if !self.measuring.load(Ordering::Relaxed) {
            return None;
        }
        let tokens: Vec<u32> = lock(self.layers.get(layer)?).hot.get(wave)?.iter().map(|of| of.1).collect();
        lock(&self.measurements).as_ref()?.warm_up.on_gpu(&tokens)
    }

    /// The work of the CPU in a layer, if it is to be timed.
    pub(super) fn timed_cpu(&self, layer: usize) -> Option<PlannedWork> {
        if !self.measuring.load(Ordering::Relaxed) {
            return None;
        }
        let experts = lock(self.layers.get(layer)?);
        lock(&self.measurements).as_ref()?.warm_up.on_cpu(&experts.cpu)
    }

    /// Adds the time that some work took.
    pub(super) fn took(&self, work: PlannedWork, time: Duration) {
        if let Some(of) = lock(&self.measurements).as_mut() {
            of.add(work, time);
        }
    }

    /// Measured costs beside the plan's.
    pub(super) fn checks(&self) -> [Option<CostCheck>; COSTS] {
        lock(&self.measurements).as_ref().map_or([None; COSTS], |of| of.warm_up.checks())
    }
}

impl Measurements {
    fn add(&mut self, work: PlannedWork, time: Duration) {
        if let Some(costs) = self.warm_up.add(work, time.as_secs_f64() * 1e6) {
            self.corrected = Some(costs);
        }
    }
}
