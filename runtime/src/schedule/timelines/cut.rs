//! Solver that takes the best of all cuts: the `t` most loaded experts that the GPU does not hold are
//! transferred, and the `c` least loaded that it holds go to the CPU.
//!
//! Held experts are available before any transfer arrives. So the GPU's time is the larger of two: the time
//! of held experts and then all transferred ones without a pause, or the time from the last transfer that it
//! waits for. Both are sums, and all cuts take `n²/4` steps.

use super::allocation::Allocation;

/// Buffers of sums, kept from layer to layer.
#[derive(Clone, Debug, Default)]
pub(crate) struct Cut {
    /// Held tasks, the least loaded first.
    held: Vec<usize>,
    /// By `c`: the end of the remaining held tasks on the GPU, and the CPU's time for the others.
    kept: Vec<(f64, f64)>,
    gone: Vec<bool>,
}

impl Cut {
    /// Sets the best cut.
    pub(crate) fn divide(&mut self, a: &mut Allocation) {
        let held = a.held();
        self.held.clear();
        self.held.extend(0..held);
        self.held.sort_by_key(|&i| (a.tasks[i].load, std::cmp::Reverse(i)));
        self.sums(a);
        let (others, [start, cpu]) = (a.tasks.len() - held, a.starts());
        let left: f64 = a.tasks[held..].iter().map(|t| t.cpu).sum();
        let mut best = (f64::INFINITY, 0, 0);
        // For `t` transferred tasks: the GPU's time from the last wait on, its time without waits, and the
        // CPU time that they save.
        let (mut waits, mut sum, mut saved) = (0.0_f64, 0.0, 0.0);
        for t in 0..=others {
            for (c, &(there, gone)) in self.kept.iter().enumerate() {
                let gpu = if t == 0 && c == held { a.free.gpu } else { (there.max(start) + sum).max(waits) };
                let idle = t == others && c == 0;
                let end = gpu.max(if idle { a.free.cpu } else { cpu + (left - saved) + gone });
                if end < best.0 {
                    best = (end, t, c);
                }
            }
            if let Some(task) = a.tasks.get(held + t) {
                waits = waits.max(a.arrival(t)) + task.gpu;
                sum += task.gpu;
                saved += task.cpu;
            }
        }
        let (_, t, c) = best;
        for (i, on) in a.on_gpu.iter_mut().enumerate() {
            *on = i < held + t;
        }
        for &i in &self.held[..c] {
            a.on_gpu[i] = false;
        }
    }

    fn sums(&mut self, a: &Allocation) {
        self.kept.clear();
        self.gone.clear();
        self.gone.resize(self.held.len(), false);
        let ready = a.tasks[..self.held.len()].iter().any(|t| t.held > Some(a.starts()[0]));
        let whole: f64 = self.held.iter().map(|&i| a.tasks[i].gpu).sum();
        let (mut less, mut cpu) = (0.0, 0.0);
        for c in 0..=self.held.len() {
            let end = if ready {
                let tasks = a.tasks.iter().zip(&self.gone).filter(|t| !t.1);
                tasks.fold(a.starts()[0], |end, (t, _)| end.max(t.held.unwrap_or(0.0)) + t.gpu)
            } else {
                a.starts()[0] + whole - less
            };
            self.kept.push((end, cpu));
            if let Some(&i) = self.held.get(c) {
                self.gone[i] = true;
                less += a.tasks[i].gpu;
                cpu += a.tasks[i].cpu;
            }
        }
    }
}
