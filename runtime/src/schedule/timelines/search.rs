//! Exact search for the best allocation, for few experts: depth first in the GPU's order, pruned where a
//! partial allocation already takes as long as the best.
//!
//! For up to eleven experts the search is exhaustive; for more, it visits at most [`MOST`] partial
//! allocations.

use super::allocation::Allocation;

/// Maximum number of partial allocations that are visited: some microseconds.
const MOST: usize = 4096;

/// Buffers of the search, kept from layer to layer.
#[derive(Clone, Debug, Default)]
pub(crate) struct Search {
    /// By task: lower bound of the time of it and all after it.
    rest: Vec<f64>,
    now: Vec<bool>,
    best: Vec<bool>,
    least: f64,
    left: usize,
}

/// A partial allocation: the first tasks, and their time.
#[derive(Clone, Copy)]
struct Part {
    task: usize,
    transfers: usize,
    /// Ends of GPU and CPU; `None`: no task.
    ends: [Option<f64>; 2],
}

impl Search {
    /// Improves an allocation.
    pub(crate) fn improve(&mut self, a: &mut Allocation) {
        self.rest.clear();
        self.rest.resize(a.tasks.len() + 1, 0.0);
        for (i, t) in a.tasks.iter().enumerate().rev() {
            self.rest[i] = self.rest[i + 1] + t.gpu.min(t.cpu);
        }
        self.now.clone_from(&a.on_gpu);
        self.best.clone_from(&a.on_gpu);
        self.least = a.makespan();
        self.left = MOST;
        self.descend(a, Part { task: 0, transfers: 0, ends: [None; 2] });
        a.on_gpu.clone_from(&self.best);
    }

    fn descend(&mut self, a: &Allocation, part: Part) {
        let idle = [a.free.gpu, a.free.cpu];
        let [gpu, cpu] = [0, 1].map(|u| part.ends[u].unwrap_or(idle[u]));
        let bound = gpu.max(cpu).max(f64::midpoint(gpu, cpu + self.rest[part.task]));
        // A gain within rounding errors does not count.
        if bound >= self.least * (1.0 - 1e-12) || self.left == 0 {
            return;
        }
        self.left -= 1;
        let Some(task) = a.tasks.get(part.task) else {
            self.least = gpu.max(cpu);
            self.best.clone_from(&self.now);
            return;
        };
        let starts = a.starts();
        let there = task.held.unwrap_or_else(|| a.arrival(part.transfers));
        let on_gpu = part.ends[0].unwrap_or(starts[0]).max(there) + task.gpu;
        let on_cpu = part.ends[1].unwrap_or(starts[1]) + task.cpu;
        let next = |ends, transfers| Part { task: part.task + 1, transfers, ends };
        let gpu = next([Some(on_gpu), part.ends[1]], part.transfers + usize::from(task.held.is_none()));
        let cpu = next([part.ends[0], Some(on_cpu)], part.transfers);
        let first = on_gpu <= on_cpu;
        for is in [first, !first] {
            self.now[part.task] = is;
            self.descend(a, if is { gpu } else { cpu });
        }
    }
}
