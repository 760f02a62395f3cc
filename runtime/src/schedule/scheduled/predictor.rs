//! Expected load of an expert (TriMoE, §4.3, equation 8), and its class.

use super::placement::{Layout, Place};
use crate::schedule::sums::prices::Prices;
use crate::schedule::sums::ticks::Ticks;

/// α of equation 8.
pub const ALPHA: f32 = 0.3;

/// Assumed ratio of the slowest memory's time to the mean. It does not follow from mean loads, as loads vary
/// from step to step. Of 1, 1.25, 1.5 and 2 this value gave the shortest steps over drifting loads, slow and
/// fast.
const UNEVEN: f64 = 1.5;

/// Factor by which a load must exceed the boundary of classes for an expert to change its layout: otherwise
/// experts near it would move back and forth. Of 1 to 2 this value gave the shortest steps over drifting
/// loads; with 1 and fast drift, moves cost more than they saved.
const MARGIN: f64 = 1.5;

/// Class of an expert: the unit that it is meant for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Class {
    /// The GPU.
    Hot,
    /// The CPU.
    Warm,
    /// An NDP unit.
    #[default]
    Cold,
}

/// An exponential moving average of every expert's load, four bytes each.
#[derive(Clone, Debug)]
pub struct Predictor {
    averages: Vec<f32>,
    experts: usize,
}

impl Predictor {
    /// Creates a predictor that expects no tokens.
    pub(crate) fn new(layers: usize, experts: usize) -> Self {
        Self { averages: vec![0.0; layers * experts], experts }
    }

    /// Sets the expectation of a layer before its first step.
    pub(crate) fn begin(&mut self, layer: usize, loads: &[f64]) {
        for (average, &load) in self.layer_mut(layer).iter_mut().zip(loads) {
            *average = if load.is_finite() { load.max(0.0) as f32 } else { 0.0 };
        }
    }

    /// Applies equation 8 to one step of a layer.
    pub(crate) fn observe(&mut self, layer: usize, loads: &[u32]) {
        for (average, &load) in self.layer_mut(layer).iter_mut().zip(loads) {
            *average += ALPHA * (load as f32 - *average);
        }
    }

    /// Expected tokens by expert; empty for a layer that does not exist.
    pub fn expected(&self, layer: usize) -> &[f32] {
        self.averages.get(layer * self.experts..(layer + 1) * self.experts).unwrap_or_default()
    }

    fn layer_mut(&mut self, layer: usize) -> &mut [f32] {
        self.averages.get_mut(layer * self.experts..(layer + 1) * self.experts).unwrap_or_default()
    }
}

/// Counts of right and wrong predictions.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PredictionCounters {
    /// Experts of all steps: each has a decision to stay or to move.
    pub experts: u64,
    /// Experts whose predicted class was that of their actual load.
    pub right: u64,
    /// Decisions to move by the predicted load: hot experts that are not on the GPU, and clearly warm or cold
    /// ones with the other layout.
    pub decisions: u64,
    /// Those of them that the actual class required, too: the move pays off.
    pub paid: u64,
}

impl PredictionCounters {
    /// Share of migration decisions that were right, decisions to stay included, from 0 to 1. The paper's 78
    /// % are compared with this.
    pub fn accuracy(&self) -> f64 {
        self.right as f64 / self.experts.max(1) as f64
    }

    /// Share of decisions to move that paid off, from 0 to 1.
    pub fn precision(&self) -> f64 {
        self.paid as f64 / self.decisions.max(1) as f64
    }
}

/// Number of tokens up to which an expert is cold, in a layer with these loads.
///
/// A single expert may be faster on the CPU, but the CPU's time is limited: at the best boundary the CPU and
/// the NDP units end together. The most loaded experts beyond the GPU's frames are striped and go to
/// the CPU, the others are localized. Of all cuts between the two, the one with the least makespan is taken
/// (equation 7, with [`UNEVEN`] times the mean for the slowest memory). Below 0: no expert is cold.
pub(crate) fn boundary(
    prices: &Prices,
    memories: usize,
    frames: usize,
    loads: impl Iterator<Item = f64>,
    order: &mut Vec<(f64, u16)>,
) -> f64 {
    if prices.costs().near.is_none() || memories == 0 {
        return -1.0;
    }
    order.clear();
    order.extend(loads.map(|load| if load > 0.0 { load } else { 0.0 }).zip(0..));
    order.sort_unstable_by(|a, b| b.0.total_cmp(&a.0).then(a.1.cmp(&b.1)));
    let frames = if prices.costs().gpu.is_some() { frames } else { 0 };
    let mut near: Ticks = order.iter().skip(frames).map(|o| prices.either(o.0)[1]).sum();
    let slowest = |near: Ticks| (near as f64 / memories as f64 * UNEVEN) as Ticks;
    let (mut host, mut reads): (Ticks, Ticks) = (0, 0);
    let (mut least, mut cold) = (slowest(near), f64::INFINITY);
    for (i, &(load, _)) in order.iter().enumerate().skip(frames) {
        let [cpu, own, read] = prices.either(load);
        near -= own;
        host += cpu;
        reads += read;
        let makespan = host.max(slowest(near) + reads);
        if makespan < least {
            least = makespan;
            cold = order.get(i + 1).map_or(-1.0, |next| next.0.midpoint(load));
        }
    }
    cold
}

/// Whether an expert with this expected load should be elsewhere: hot experts belong on the GPU, warm ones
/// are striped, cold ones localized. An expert with a load near the [`boundary`] stays.
pub(crate) fn misplaced(place: Place, class: Class, load: f64, boundary: f64) -> bool {
    match (class, place.layout) {
        _ if place.cached => false,
        (Class::Hot, _) => true,
        (Class::Warm, Layout::Local(_)) => load > boundary * MARGIN,
        (Class::Cold, Layout::Striped) => load * MARGIN < boundary,
        _ => false,
    }
}

/// Classes of a layer's experts.
///
/// The most loaded ones are hot, at most as many as the GPU has frames, if it computes them faster than the
/// CPU does. Of the others, those with no more tokens than the [`boundary`] are cold.
pub(crate) fn classes(
    prices: &Prices,
    frames: usize,
    boundary: f64,
    loads: impl Iterator<Item = f64>,
    order: &mut Vec<(f64, u16)>,
    classes: &mut Vec<Class>,
) {
    order.clear();
    classes.clear();
    for (expert, load) in loads.enumerate() {
        classes.push(if load <= boundary { Class::Cold } else { Class::Warm });
        order.push((load, expert as u16));
    }
    if prices.costs().gpu.is_none() || frames == 0 {
        return;
    }
    if frames < order.len() {
        order.select_nth_unstable_by(frames - 1, |a, b| b.0.total_cmp(&a.0).then(a.1.cmp(&b.1)));
    }
    for &(load, expert) in order.iter().take(frames).filter(|o| o.0 > 0.0) {
        let [gpu, cpu, _] = prices.calculation(load);
        if gpu < cpu.max(prices.dram(Layout::Striped)) {
            classes[usize::from(expert)] = Class::Hot;
        }
    }
}
