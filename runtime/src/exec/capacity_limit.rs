//! Capacity limit: keeps the choices of the router that experts have capacity for (NPUMoE, §3.2).

use crate::error::Error;
use crate::exec::overflow::{Choices, Decider, Fate, Misrouted, OverflowCounters, saliency};
use crate::exec::unit::{BadExpert, Launch, StepFault};
use crate::platform::memory::Addr;
use moec_ir::plan::ExpertSet;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Counters of the steps of a plan.
#[derive(Debug, Default)]
pub(crate) struct SetCounters {
    /// Counts of (token, expert) pairs, by set, with the layer. `None` for decoding, where no capacity is
    /// exceeded.
    sets: Mutex<Vec<(u32, Option<OverflowCounters>)>>,
    /// Experts that layers of decoding calls computed with, each once for all of a call's rows.
    decoded: AtomicU64,
}

impl SetCounters {
    /// Counters of these sets, at zero.
    pub(crate) fn of(sets: &[ExpertSet]) -> Self {
        let counters = |s: &ExpertSet| (s.layer, s.batch.is_none().then(OverflowCounters::default));
        Self { sets: Mutex::new(sets.iter().map(counters).collect()), ..Self::default() }
    }

    /// By layer.
    pub(crate) fn all(&self) -> Vec<(u32, OverflowCounters)> {
        lock(&self.sets).iter().filter_map(|(layer, counters)| Some((*layer, (*counters)?))).collect()
    }

    pub(crate) fn add(&self, set: usize, counters: &OverflowCounters) {
        if let Some((_, Some(sum))) = lock(&self.sets).get_mut(set) {
            sum.add(counters);
        }
    }

    /// Counts the experts that a layer of a decoding call computes with.
    pub(crate) fn decode(&self, experts: u64) {
        self.decoded.fetch_add(experts, Ordering::Relaxed);
    }

    /// Experts of all decoding calls, summed over layers and calls.
    pub(crate) fn decoded(&self) -> u64 {
        self.decoded.load(Ordering::Relaxed)
    }
}

pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // Values left by a panic are overwritten before they are read.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Decides for the sets of a plan.
#[derive(Debug, Default)]
pub(crate) struct CapacityLimit<'p> {
    pub(crate) sets: &'p [ExpertSet],
    pub(crate) counters: Arc<SetCounters>,
    work: Mutex<(Decider, Vec<f32>)>,
}

impl<'p> CapacityLimit<'p> {
    pub(crate) fn new(sets: &'p [ExpertSet], counters: Arc<SetCounters>) -> Self {
        Self { sets, counters, work: Mutex::default() }
    }

    /// Runs the step `[ids, added, stay, rest]` of a set.
    ///
    /// # Safety
    /// As [`crate::exec::unit::ComputeUnit::submit`], and no other thread runs it.
    pub(crate) unsafe fn run(
        &self,
        launch: &Launch<'_>,
        [set, k, channels]: [usize; 3],
        [ids, added, stay, rest]: [Addr; 4],
    ) {
        let n = launch.n;
        // SAFETY: the verifier has found `n` rows of each there, aligned, and the results apart from all
        // others; this is the one thread that runs it.
        let (choices, fates) = unsafe {
            (
                (
                    std::slice::from_raw_parts(ids.of::<i32>(), n * k),
                    std::slice::from_raw_parts(added.of::<f32>(), n * channels),
                ),
                [
                    std::slice::from_raw_parts_mut(stay.of::<i32>(), n * k),
                    std::slice::from_raw_parts_mut(rest.of::<i32>(), n * k),
                ],
            )
        };
        if let Err(e) = self.limit(set, k, channels, choices, fates) {
            launch.fail(match e {
                Misrouted::Expert { expert, experts } => {
                    StepFault::Expert(BadExpert { step: launch.step, expert, experts: experts as u32 })
                }
                Misrouted::Shape { .. } => StepFault::Unit(Error::plan(e.to_string())),
            });
            // Later steps stay in bounds. SAFETY: as above; the slices are gone.
            unsafe {
                std::slice::from_raw_parts_mut(stay.of::<i32>(), n * k).fill(-1);
                std::slice::from_raw_parts_mut(rest.of::<i32>(), n * k).fill(-1);
            }
        }
    }

    /// Decides which choices are within capacity. `ids`, `stay` and `rest` are `[n, k]`, `added` is
    /// `[n, channels]`.
    fn limit(
        &self,
        set: usize,
        k: usize,
        channels: usize,
        (ids, added): (&[i32], &[f32]),
        [stay, rest]: [&mut [i32]; 2],
    ) -> Result<(), Misrouted> {
        let (decider, salient) = &mut *lock(&self.work);
        let ExpertSet { capacities, overflow, .. } = &self.sets[set];
        salient.clear();
        salient.extend(added.chunks_exact(channels.max(1)).map(saliency));
        let choices = Choices { ids, k, saliency: salient };
        let mut counters = OverflowCounters::default();
        let fates = decider.decide(&choices, capacities, *overflow, &mut counters)?;
        for (i, (&id, fate)) in ids.iter().zip(fates).enumerate() {
            // An expert without a capacity has no graph, but room for all tokens.
            let fixed = capacities[id as usize] > 0;
            stay[i] = if fixed && *fate == Fate::Stays { id } else { -1 };
            rest[i] = if !fixed || *fate == Fate::Spilled { id } else { -1 };
        }
        self.counters.add(set, &counters);
        Ok(())
    }
}
