//! Allocation of tasks to the GPU and the CPU, and the time that it takes.
//!
//! An allocation determines the timelines. Transfers take equally long, so those of the most loaded go first
//! (Johnson's rule for two machines). A GPU that computes experts in the order of their arrival never ends
//! later than in another order.

use super::task::{Free, Run, Task, Timelines};
use crate::schedule::costs::Costs;
use crate::schedule::scheduled::ExpertUnit;

/// A task with its times.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Timed {
    /// Its index among the given tasks.
    pub(crate) task: usize,
    pub(crate) expert: u16,
    pub(crate) load: u32,
    /// Time on the GPU, with a launch if the expert is not there when the layer begins.
    pub(crate) gpu: f64,
    pub(crate) cpu: f64,
    pub(crate) held: Option<f64>,
}

/// Tasks in the order in which the GPU would compute them, and the unit of each.
#[derive(Clone, Debug, Default)]
pub(crate) struct Allocation {
    /// Tasks that the GPU holds, in order of arrival, then the most loaded first; then the others, the most
    /// loaded first.
    pub(crate) tasks: Vec<Timed>,
    pub(crate) on_gpu: Vec<bool>,
    pub(crate) free: Free,
    transfer: f64,
    first: First,
}

/// Extra times of first tasks.
#[derive(Clone, Copy, Debug, Default)]
struct First {
    gpu: f64,
    cpu: f64,
    link: f64,
}

impl Allocation {
    /// Starts with all tasks on the CPU.
    pub(crate) fn begin(&mut self, costs: &Costs, tasks: &[Task], free: Free) {
        self.tasks.clear();
        self.tasks.extend(tasks.iter().enumerate().map(|(i, t)| Timed {
            task: i,
            expert: t.expert,
            load: t.load,
            gpu: costs.t_gpu_hit(t.load.into()) + if t.held == Some(0.0) { 0.0 } else { costs.launch_us },
            cpu: costs.cpu.table.at(t.load.into()),
            held: t.held,
        }));
        let key = |t: &Timed| t.held.unwrap_or(f64::INFINITY);
        self.tasks.sort_unstable_by(|a, b| {
            key(a).total_cmp(&key(b)).then(b.load.cmp(&a.load)).then(a.expert.cmp(&b.expert))
        });
        self.on_gpu.clear();
        self.on_gpu.resize(tasks.len(), false);
        self.free = free;
        self.transfer = costs.bring_us;
        self.first = First {
            gpu: costs.gpu.as_ref().map_or(0.0, |u| u.first_us),
            cpu: costs.cpu.first_us,
            link: costs.first_bring_us,
        };
    }

    /// Number of tasks that the GPU holds, or will hold without a new transfer.
    pub(crate) fn held(&self) -> usize {
        self.tasks.partition_point(|t| t.held.is_some())
    }

    /// Arrival of the `n`th transfer, counted from 0.
    pub(crate) fn arrival(&self, n: usize) -> f64 {
        self.free.link + self.first.link + (n + 1) as f64 * self.transfer
    }

    /// Start times of the GPU and the CPU.
    pub(crate) fn starts(&self) -> [f64; 2] {
        [self.free.gpu + self.first.gpu, self.free.cpu + self.first.cpu]
    }

    /// End times of the units: GPU, CPU.
    pub(crate) fn ends(&self) -> [f64; 2] {
        self.ends_with(usize::MAX, usize::MAX)
    }

    /// End times with up to two tasks moved to the other unit.
    pub(crate) fn ends_with(&self, one: usize, other: usize) -> [f64; 2] {
        let [mut gpu, mut cpu] = self.starts();
        let (mut any_gpu, mut any_cpu, mut transfers) = (false, false, 0);
        for (i, t) in self.tasks.iter().enumerate() {
            let on_gpu = self.on_gpu[i] ^ (i == one || i == other);
            if on_gpu {
                let there = t.held.unwrap_or_else(|| self.arrival(transfers));
                transfers += usize::from(t.held.is_none());
                gpu = gpu.max(there) + t.gpu;
                any_gpu = true;
            } else {
                cpu += t.cpu;
                any_cpu = true;
            }
        }
        [if any_gpu { gpu } else { self.free.gpu }, if any_cpu { cpu } else { self.free.cpu }]
    }

    /// End of the later unit.
    pub(crate) fn makespan(&self) -> f64 {
        let [gpu, cpu] = self.ends();
        gpu.max(cpu)
    }

    /// Writes the timelines. The CPU computes the least loaded first, and those that the GPU holds last.
    pub(crate) fn lay_out(&self, out: &mut Timelines) {
        out.runs.clear();
        let [mut gpu, mut cpu] = [self.free.gpu, self.free.cpu];
        let (mut link, mut transfers) = (self.free.link, 0);
        let run = |t: &Timed, unit, transfer, start, end| Run {
            task: t.task,
            expert: t.expert,
            unit,
            transfer,
            start,
            end,
        };
        for (_, t) in self.tasks.iter().enumerate().filter(|t| self.on_gpu[t.0]) {
            let transfer = t.held.is_none().then(|| {
                let from = link;
                link = self.arrival(transfers);
                transfers += 1;
                (from, link)
            });
            let first = if out.runs.is_empty() { self.first.gpu } else { 0.0 };
            let there = transfer.map_or(t.held.unwrap_or(0.0), |t| t.1);
            // Warming up does not wait for weights.
            let start = (gpu + first).max(there);
            gpu = start + t.gpu;
            out.runs.push(run(t, ExpertUnit::Gpu, transfer, start, gpu));
        }
        let mut first = self.first.cpu;
        for held in [false, true] {
            let own = out.runs.len();
            let on_cpu =
                self.tasks.iter().zip(&self.on_gpu).filter(|(t, on)| !**on && t.held.is_some() == held);
            out.runs.extend(on_cpu.map(|(t, _)| run(t, ExpertUnit::Cpu, None, 0.0, t.cpu)));
            out.runs[own..].sort_unstable_by(|a, b| a.end.total_cmp(&b.end).then(a.expert.cmp(&b.expert)));
            for r in &mut out.runs[own..] {
                r.start = cpu;
                cpu += std::mem::take(&mut first) + r.end;
                r.end = cpu;
            }
        }
        out.makespan = gpu.max(cpu);
        out.done = Free { gpu, cpu, link };
    }
}
