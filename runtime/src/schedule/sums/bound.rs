//! Lower bound of all assignments.
//!
//! Three bounds, each of a part of the problem: an expert takes its cheapest unit; of a memory every expert that lies
//! on it takes the least that it can, and so do the reads of striped ones of all; GPU and CPU share what no
//! memory computes, and a weighted mean of the two is at least the sum of the cheaper of both, at any weights.

use super::assignment::{Assignment, UNITS};
use super::ticks::Ticks;
use crate::schedule::scheduled::ExpertUnit;

/// Weights of the GPU's time beside the CPU's, in sixteenths.
const WEIGHTS: [Ticks; 5] = [1, 4, 8, 12, 15];

/// A time that no assignment of these tasks is shorter than.
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
