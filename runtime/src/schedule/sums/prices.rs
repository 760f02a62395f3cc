//! Costs in whole picoseconds, precomputed by number of tokens for the path of a step.
//!
//! Whole numbers add and subtract without error: incremental sums equal recomputed ones, in any order, on any
//! machine.

use super::assignment::{Effect, STRIPED, Task};
use super::ticks::{FORBIDDEN, NEVER, Ticks, ticks};
use crate::schedule::costs::Costs;
use crate::schedule::policy::Units;
use crate::schedule::scheduled::ExpertUnit;
use crate::schedule::scheduled::{Layout, Place};

/// Number of token counts with a precomputed price; beyond them tables are read.
const DENSE: usize = 1025;

/// Prices of experts.
#[derive(Clone, Debug)]
pub(crate) struct Prices {
    costs: Costs,
    units: Units,
    /// By tokens: time on the GPU, time on the CPU, and equation 4.
    dense: Vec<[Ticks; 3]>,
    /// Rates of a striped and of a localized expert.
    rates: [Rates; 2],
}

#[derive(Clone, Copy, Debug)]
struct Rates {
    /// Transfer to the GPU: PCIe or memory, whichever is slower.
    transfer: Ticks,
    /// T_DRAM.
    dram: Ticks,
    /// T_contention on each memory that holds a part.
    read: Ticks,
}

impl Prices {
    pub(crate) fn new(costs: Costs, units: Units, memories: usize) -> Self {
        let rates = [Layout::Striped, Layout::Local(0)].map(|layout| Rates {
            transfer: ticks(costs.bring_us.max(costs.t_dram(layout))),
            dram: ticks(costs.t_dram(layout)),
            read: ticks(costs.contention(layout, memories)),
        });
        let dense = (0..DENSE).map(|n| calculation(&costs, n as f64)).collect();
        Self { costs, units, dense, rates }
    }

    pub(crate) fn costs(&self) -> &Costs {
        &self.costs
    }

    /// T_DRAM.
    pub(crate) fn dram(&self, layout: Layout) -> Ticks {
        self.rates[usize::from(layout.memory().is_some())].dram
    }

    /// The task of an expert with tokens.
    pub(crate) fn task(&self, expert: usize, place: Place, tokens: u32) -> Task {
        let dense = self.dense.get(tokens as usize);
        let calc = dense.copied().unwrap_or_else(|| calculation(&self.costs, f64::from(tokens)));
        self.assemble(expert, place, calc)
    }

    /// The task of an expert with `tokens` expected tokens, which need not be whole. Its times are those of
    /// the mean number of tokens if it has any, multiplied by the probability that it has any (of a Poisson
    /// distribution).
    pub(crate) fn expected(&self, expert: usize, place: Place, tokens: f64) -> Task {
        let chance = -(-tokens).exp_m1();
        let calc = self.calculation(tokens / chance.max(f64::MIN_POSITIVE));
        let times = |t: Ticks| if t < NEVER { (t as f64 * chance) as Ticks } else { t };
        let task = self.assemble(expert, place, calc);
        let effects = task.effects.map(|e| Effect {
            gpu: times(e.gpu),
            cpu: times(e.cpu),
            every: times(e.every),
            memory: times(e.memory),
        });
        Task { effects, calc: times(task.calc), transfer: times(task.transfer), ..task }
    }

    /// Time that an expert with `tokens` expected tokens takes from the CPU if it is striped, from a
    /// NDP unit if it is localized, and from every memory if the CPU reads it.
    pub(crate) fn either(&self, tokens: f64) -> [Ticks; 3] {
        let chance = -(-tokens).exp_m1();
        let [_, cpu, near] = self.calculation(tokens / chance.max(f64::MIN_POSITIVE));
        let striped = self.rates[0];
        [cpu.max(striped.dram), near, striped.read].map(|t| (t as f64 * chance) as Ticks)
    }

    /// Interpolated prices, for at most as many tokens as have prices.
    pub(crate) fn calculation(&self, tokens: f64) -> [Ticks; 3] {
        let (whole, part) = (tokens.floor(), tokens.fract());
        match self.dense.get(whole.max(0.0) as usize..) {
            Some([low, high, ..]) => {
                let between = |i: usize| low[i] + ((high[i] - low[i]) as f64 * part) as Ticks;
                [between(0), between(1), between(2)]
            }
            _ => calculation(&self.costs, tokens),
        }
    }

    fn assemble(&self, expert: usize, place: Place, [gpu, cpu, near]: [Ticks; 3]) -> Task {
        let memory = place.layout.memory();
        let rates = self.rates[usize::from(memory.is_some())];
        let allowed = |unit: bool, cost: Ticks| if unit { cost } else { FORBIDDEN };
        let on_gpu = if place.cached { gpu } else { allowed(self.units.misses, gpu.max(rates.transfer)) };
        let mut cost = [0; 3];
        cost[ExpertUnit::Gpu as usize] = on_gpu;
        cost[ExpertUnit::Cpu as usize] = allowed(self.units.cpu, cpu.max(rates.dram));
        cost[ExpertUnit::Near as usize] = allowed(self.units.near && memory.is_some(), near);
        let memory = memory.unwrap_or(STRIPED);
        Task {
            expert: expert as u16,
            memory,
            cached: place.cached,
            effects: Task::effects(cost, rates.read, memory, place.cached),
            calc: gpu,
            transfer: if place.cached { 0 } else { rates.transfer },
        }
    }
}

fn calculation(costs: &Costs, tokens: f64) -> [Ticks; 3] {
    [costs.t_gpu_hit(tokens), costs.cpu.table.at(tokens), costs.t_near(tokens)].map(ticks)
}
