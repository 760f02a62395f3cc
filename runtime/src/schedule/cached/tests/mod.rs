//! Invariants of schedules.

mod dispatcher;
mod optimum;
mod prefetch;
mod schedules;
mod warm_up;

use super::prefetch::*;
use crate::schedule::timelines::*;
use crate::schedule::{Costs, ExpertUnit, Order, SOLVERS, ScheduleError, Solver, Table, UnitCosts};
use crate::serving::sampler::SplitMix64;

/// Linear times: the GPU's hardly rise with tokens, the CPU's do (Figure 3f).
fn costs(gpu: [f64; 2], cpu: [f64; 2], first: f64, transfer: f64) -> Costs {
    let line = |[one, more]: [f64; 2], first_us| UnitCosts {
        table: Table::new(vec![(1, one), (2, one + more)]).expect("a table"),
        first_us,
    };
    Costs { first_bring_us: first, ..Costs::of_two(line(gpu, first), line(cpu, first), transfer) }
}

/// Solvers on timelines, by name.
fn solvers() -> impl Iterator<Item = (&'static str, Solver)> {
    SOLVERS.iter().filter(|s| s.1.has_timelines()).map(|s| (s.0, s.1))
}

fn scheduler(costs: &Costs) -> TimelineScheduler {
    TimelineScheduler::new(costs.clone()).expect("costs")
}

/// A machine as in the paper and a layer of it: up to `most` experts with few or many tokens, some of them on
/// the GPU.
fn random_layer(random: &mut SplitMix64, most: usize) -> (Costs, Vec<Task>) {
    layer_of(random, most, 0.2)
}

/// The same for a machine whose GPU takes up to `rise` µs more per token, so that the CPU may be faster.
fn layer_of(random: &mut SplitMix64, most: usize, rise: f64) -> (Costs, Vec<Task>) {
    let mut between = |from: f64, to: f64| from + (to - from) * random.unit();
    let transfer = between(20.0, 400.0);
    let (gpu, cpu) = (between(5.0, 40.0), between(20.0, 200.0));
    let rises = [between(0.0, rise), between(1.0, 60.0)];
    let costs = costs([gpu, rises[0]], [cpu, rises[1]], between(0.0, 50.0), transfer);
    let (held, tokens) = (between(0.0, 1.0), if between(0.0, 1.0) < 0.3 { 1.0 } else { between(2.0, 64.0) });
    let n = 1 + (between(0.0, most as f64) as usize).min(most - 1);
    let tasks = (0..n).map(|e| Task {
        expert: e as u16,
        load: between(1.0, tokens + 0.99) as u32,
        held: (between(0.0, 1.0) < held)
            .then(|| if between(0.0, 1.0) < 0.1 { between(0.0, 300.0) } else { 0.0 }),
    });
    let tasks = tasks.collect();
    (costs, tasks)
}

/// The least makespan of all allocations, by trying them. Orders of transfers are not tried, as all transfers
/// take equally long.
fn least(costs: &Costs, tasks: &[Task]) -> f64 {
    let mut order: Vec<&Task> = tasks.iter().collect();
    let key = |t: &Task| t.held.unwrap_or(f64::INFINITY);
    order.sort_by(|a, b| key(a).total_cmp(&key(b)).then(b.load.cmp(&a.load)));
    let of = |set: u32| {
        let (mut gpu, mut cpu, mut transfers) = (0.0_f64, 0.0, 0.0);
        for (i, t) in order.iter().enumerate() {
            let load = f64::from(t.load);
            if set >> i & 1 == 1 {
                let start = if gpu == 0.0 { costs.gpu.as_ref().expect("a GPU").first_us } else { gpu };
                let there = t.held.unwrap_or_else(|| {
                    transfers += 1.0;
                    costs.first_bring_us + transfers * costs.bring_us
                });
                gpu = start.max(there) + costs.t_gpu_hit(load);
            } else {
                cpu += costs.cpu.table.at(load) + if cpu == 0.0 { costs.cpu.first_us } else { 0.0 };
            }
        }
        gpu.max(cpu)
    };
    (0..1_u32 << order.len()).map(of).fold(f64::INFINITY, f64::min)
}
