//! Experts of the next layers to transfer ahead (§IV-C): those that shorten the simulated layers most.
//!
//! The gates of the next layers, applied to the current hidden state, predict the experts and their tokens.
//! For up to [`DEPTH`] layers ahead the scheduler computes a layer's time twice: with an expert on the host
//! alone, and with it on the GPU from the end of its transfer. The difference, times the probability that the
//! expert is needed, is its impact. The cost is the time for which the transfer delays the next layer. The
//! best expert goes first and the rest is estimated again, as long as the link is idle before the next layer
//! begins.

use crate::schedule::policy::Solver;
use crate::schedule::timelines::TimelineScheduler;
use crate::schedule::timelines::{Free, Task};

/// Maximum number of layers ahead (§IV-C).
pub const DEPTH: usize = 3;
/// Number of different loads of a layer that are tried at a time, the largest first: an expert with more
/// tokens gains more.
const MAX_LOADS: usize = 4;

/// A layer ahead.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct PredictedLayer {
    /// Time until the layer needs its experts, in microseconds.
    pub start: f64,
    /// Experts that it is expected to use. Times of [`Task::held`] count from the layer's start.
    pub tasks: Vec<Task>,
    /// Probability that each of them is needed.
    pub probability: Vec<f64>,
}

/// An expert to transfer ahead.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Prefetch {
    /// Layers ahead, from 1.
    pub ahead: usize,
    /// Expert.
    pub expert: u16,
    /// Microseconds that it is expected to save, less what it costs.
    pub gain: f64,
    /// Time when it arrives on the GPU, in microseconds from now.
    pub there: f64,
}

/// Fills `out` with the experts to transfer, in order, and marks them as held in `layers`. `busy` is the time
/// until the link is done with its earlier work. Layers past [`DEPTH`] are ignored; tasks are not checked.
pub fn plan(
    scheduler: &mut TimelineScheduler,
    policy: Solver,
    layers: &mut [PredictedLayer],
    busy: f64,
    out: &mut Vec<Prefetch>,
) {
    out.clear();
    let depth = layers.len().min(DEPTH);
    let layers = &mut layers[..depth];
    let Some(deadline) = layers.first().map(|l| l.start) else { return };
    let transfer_us = scheduler.costs().bring_us;
    let mut link = busy.max(0.0);
    while link < deadline {
        let there = link + transfer_us;
        let mut best: Option<(f64, usize, usize)> = None;
        for at in 0..depth {
            let late = if at == 0 { 0.0 } else { delay(scheduler, policy, &layers[0], there) };
            let Some((gain, task)) = impact(scheduler, policy, &mut layers[at], there) else { continue };
            if gain - late > best.map_or(0.0, |b| b.0) {
                best = Some((gain - late, at, task));
            }
        }
        let Some((gain, at, task)) = best else { return };
        let layer = &mut layers[at];
        layer.tasks[task].held = Some((there - layer.start).max(0.0));
        out.push(Prefetch { ahead: at + 1, expert: layer.tasks[task].expert, gain, there });
        link = there;
    }
}

/// The task of a layer with the largest impact, and the impact.
fn impact(
    scheduler: &mut TimelineScheduler,
    policy: Solver,
    layer: &mut PredictedLayer,
    there: f64,
) -> Option<(f64, usize)> {
    let without = scheduler.makespan(policy, &layer.tasks, Free::default());
    let mut best: Option<(f64, usize)> = None;
    let (mut last, mut looked_at) = (u32::MAX, 0);
    while looked_at < MAX_LOADS {
        // The most probable of the next smaller load.
        let of = |i: usize| (layer.tasks[i].load, layer.probability.get(i).copied().unwrap_or(0.0));
        let rest = (0..layer.tasks.len()).filter(|&i| layer.tasks[i].held.is_none() && of(i).0 < last);
        let next = rest.max_by(|&i, &j| {
            let ((li, pi), (lj, pj)) = (of(i), of(j));
            li.cmp(&lj).then(pi.total_cmp(&pj)).then(j.cmp(&i))
        });
        let Some(task) = next else { break };
        let (load, probability) = of(task);
        layer.tasks[task].held = Some((there - layer.start).max(0.0));
        let with = scheduler.makespan(policy, &layer.tasks, Free::default());
        layer.tasks[task].held = None;
        let gain = probability * (without - with);
        if best.is_none_or(|b| gain > b.0) {
            best = Some((gain, task));
        }
        (last, looked_at) = (load, looked_at + 1);
    }
    best
}

/// Delay of the next layer if the link is busy until `there`.
fn delay(scheduler: &mut TimelineScheduler, policy: Solver, next: &PredictedLayer, there: f64) -> f64 {
    let late = (there - next.start).max(0.0);
    if late == 0.0 {
        return 0.0;
    }
    let at = |scheduler: &mut TimelineScheduler, link: f64| {
        scheduler.makespan(policy, &next.tasks, Free { link, ..Free::default() })
    };
    at(scheduler, late) - at(scheduler, 0.0)
}
