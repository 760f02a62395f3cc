//! The simulation of §IV-B: three timelines that are filled in turn.
//!
//! The GPU takes the most loaded expert that it holds. The CPU takes the least loaded of the others, and once
//! there are none, of those on the GPU. The link takes the most loaded of the others. Ties go to the GPU,
//! then to the CPU.

use super::allocation::Allocation;
use crate::schedule::policy::Order;

/// Queues, kept from layer to layer.
#[derive(Clone, Debug, Default)]
pub(crate) struct Paper {
    /// Tasks that the GPU holds or will hold, with their arrival; the most loaded first.
    gpu: Vec<(f64, usize)>,
    /// Tasks that it does not hold, the most loaded first.
    cpu: std::collections::VecDeque<usize>,
}

impl Paper {
    pub(crate) fn divide(&mut self, order: Order, a: &mut Allocation) {
        let held = a.held();
        self.gpu.clear();
        self.gpu.extend(a.tasks[..held].iter().enumerate().map(|(i, t)| (t.held.unwrap_or(0.0), i)));
        self.gpu.sort_by_key(|&(_, i)| (std::cmp::Reverse(a.tasks[i].load), i));
        self.cpu.clear();
        self.cpu.extend(held..a.tasks.len());
        let ([mut gpu, mut cpu], mut transfers) = (a.starts(), 0);
        loop {
            // The next task of each timeline: when it is free for the task, and when the task would end.
            let next_gpu = self.next_gpu(gpu).map(|(at, there, i)| {
                let start = gpu.max(there);
                (at, start, start + a.tasks[i].gpu)
            });
            let least = self.cpu.back().copied().or_else(|| self.gpu.last().map(|g| g.1));
            let next_cpu = least.map(|i| (i, cpu, cpu + a.tasks[i].cpu));
            let done = a.arrival(transfers);
            let busy = if transfers == 0 { a.free.link } else { a.arrival(transfers - 1) };
            let next_link = self.cpu.front().map(|&i| (i, busy, done));
            let when = |of: Option<(usize, f64, f64)>| {
                of.map_or(f64::INFINITY, |(_, free, done)| if order == Order::Free { free } else { done })
            };
            let [g, c, l] = [next_gpu, next_cpu, next_link].map(when);
            match (next_gpu, next_cpu, next_link) {
                (Some((at, _, end)), ..) if g <= c && g <= l => {
                    let (_, i) = self.gpu.remove(at);
                    a.on_gpu[i] = true;
                    gpu = end;
                }
                (_, Some((i, _, end)), _) if c <= l => {
                    if self.cpu.pop_back().is_none() {
                        self.gpu.pop();
                    }
                    a.on_gpu[i] = false;
                    cpu = end;
                }
                (.., Some((i, _, end))) => {
                    self.cpu.pop_front();
                    let at = self.gpu.partition_point(|g| a.tasks[g.1].load >= a.tasks[i].load);
                    self.gpu.insert(at, (end, i));
                    transfers += 1;
                }
                _ => return,
            }
        }
    }

    /// The most loaded task that has arrived when the GPU is free; else the first to arrive. Returns its
    /// position, its arrival, and the task.
    fn next_gpu(&self, free: f64) -> Option<(usize, f64, usize)> {
        let first = self.gpu.iter().map(|g| g.0).fold(f64::INFINITY, f64::min);
        let at = self.gpu.iter().position(|g| g.0 <= free.max(first))?;
        Some((at, self.gpu[at].0, self.gpu[at].1))
    }
}
