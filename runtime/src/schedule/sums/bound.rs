//! Lower bound of all assignments.
//!
//! The maximum of three bounds, each for a part of the problem. First, an expert takes at least the time on
//! its cheapest unit. Second, every expert in a memory takes at least its least time from it, and so do the
//! reads of striped experts from all memories. Third, GPU and CPU share the striped experts: at any weights,
//! the weighted mean of their times is at least the sum over experts of the cheaper weighted time.

use super::assignment::{Assignment, UNITS};
use super::ticks::Ticks;
use crate::schedule::scheduled::ExpertUnit;

/// Weights of the GPU's time, in sixteenths; the CPU's time has the rest.
const WEIGHTS: [Ticks; 5] = [1, 4, 8, 12, 15];

/// Lower bound of the time of all assignments of these tasks.
pub(crate) fn bound(a: &Assignment, memories: &mut Vec<Ticks>) -> Ticks {
    memories.clear();
    memories.resize(a.memories.len(), 0);
    let (mut single, mut every) = (0, 0);
    let mut hosts = [0; WEIGHTS.len()];
    for t in &a.tasks {
        let possible = UNITS.into_iter().filter(|&u| t.can(u));
        single = possible.clone().map(|u| t.cost(u)).min().map_or(single, |c| single.max(c));
        let least = possible.map(|u| t.effect(u)).map(|e| (e.every, e.memory));
        let (all, own) = least.reduce(|a, b| (a.0.min(b.0), a.1.min(b.1))).unwrap_or((0, 0));
        every += all;
        if let Some(memory) = memories.get_mut(usize::from(t.memory)) {
            *memory += own;
        } else {
            let (gpu, cpu) = (t.cost(ExpertUnit::Gpu), t.cost(ExpertUnit::Cpu));
            for (sum, w) in hosts.iter_mut().zip(WEIGHTS) {
                *sum += (w * gpu).min((16 - w) * cpu);
            }
        }
    }
    let memory = memories.iter().max().map_or(0, |d| d + every);
    let hosts = hosts.into_iter().max().unwrap_or(0) / 16;
    single.max(memory).max(hosts)
}
