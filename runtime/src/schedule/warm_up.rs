//! Costs that the first calls of a run measure (HybriMoE, §IV-A): of transfers to the GPU, and of experts on
//! the GPU and the CPU, by their tokens.
//!
//! Each is measured [`SAMPLES`] times. The median of measured by planned time then corrects the plan's cost
//! for the rest of the run; so calls that were preempted do not count. Corrections are half powers of two.
//! A cost that the plan has within a fifth stays as it is, and runs on the plan's device decide alike.

use super::costs::{Costs, Table};

/// Measurements of a cost before it is corrected.
pub const SAMPLES: usize = 9;
/// First number of tokens of each class of loads.
const CLASSES: [u32; 4] = [1, 2, 8, 64];
/// Number of costs that are measured: one of transfers, and one of each class on both units.
pub const COSTS: usize = 1 + 2 * CLASSES.len();
/// Largest correction, in half powers of two.
const MOST: f64 = 12.0;

/// A unit, or the link, whose time is measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MeasuredUnit {
    /// The link to the GPU.
    Link,
    /// The GPU.
    Gpu,
    /// The CPU.
    Cpu,
}

impl MeasuredUnit {
    /// Name: `link`, `gpu` or `cpu`.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Link => "link",
            Self::Gpu => "gpu",
            Self::Cpu => "cpu",
        }
    }

    /// Index of its cost for a class of loads.
    fn cost(self, class: usize) -> usize {
        match self {
            Self::Link => 0,
            Self::Gpu => 1 + class,
            Self::Cpu => 1 + CLASSES.len() + class,
        }
    }
}

/// Work that is measured, and the time that the plan gives it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PlannedWork {
    cost: usize,
    experts: u32,
    us: f64,
}

/// A cost of the plan beside the measured one: medians, in microseconds for one expert.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct CostCheck {
    /// Unit.
    pub unit: MeasuredUnit,
    /// Fewest tokens of an expert of its class; of a transfer 0.
    pub tokens: u32,
    /// The plan's time.
    pub planned_us: f64,
    /// The measured time.
    pub measured_us: f64,
    /// Factor that the plan's cost is multiplied by from now on; 1 leaves it.
    pub factor: f64,
}

/// A measurement.
#[derive(Clone, Copy, Debug)]
struct Sample {
    /// Microseconds for one expert.
    planned_us: f64,
    measured_us: f64,
}

/// Measurements of the first calls.
#[derive(Clone, Debug)]
pub struct WarmUp {
    planned: Costs,
    samples: [Vec<Sample>; COSTS],
}

/// Class of a load.
fn class_of(tokens: u32) -> usize {
    CLASSES.iter().rposition(|&first| first <= tokens).unwrap_or(0)
}

fn median(samples: &[Sample], of: impl Fn(&Sample) -> f64) -> f64 {
    let mut sorted: Vec<f64> = samples.iter().map(of).collect();
    sorted.sort_unstable_by(f64::total_cmp);
    sorted.get(sorted.len() / 2).copied().unwrap_or(0.0)
}

impl WarmUp {
    /// Begins without measurements; `planned` are the plan's costs.
    pub fn new(planned: Costs) -> Self {
        Self { planned, samples: Default::default() }
    }

    /// The transfer of an expert; `None` if its cost has all its measurements.
    pub fn transfer(&self) -> Option<PlannedWork> {
        let us = self.planned.first_bring_us + self.planned.bring_us;
        self.work(MeasuredUnit::Link, 1, 0, us)
    }

    /// Experts with these numbers of tokens that one launch of the GPU computes, as [`Self::transfer`].
    pub fn on_gpu(&self, tokens: &[u32]) -> Option<PlannedWork> {
        let table = &self.planned.gpu.as_ref()?.table;
        self.experts(MeasuredUnit::Gpu, tokens, self.planned.launch_us, table)
    }

    /// Experts that the CPU computes in a layer, as [`Self::on_gpu`].
    pub fn on_cpu(&self, tokens: &[u32]) -> Option<PlannedWork> {
        let cpu = &self.planned.cpu;
        self.experts(MeasuredUnit::Cpu, tokens, cpu.first_us, &cpu.table)
    }

    fn experts(
        &self,
        unit: MeasuredUnit,
        tokens: &[u32],
        first_us: f64,
        table: &Table,
    ) -> Option<PlannedWork> {
        let experts = u32::try_from(tokens.len()).ok().filter(|&n| n > 0)?;
        let us = first_us + tokens.iter().map(|&n| table.at(n.into())).sum::<f64>();
        self.work(unit, experts, tokens.iter().sum::<u32>() / experts, us)
    }

    fn work(&self, unit: MeasuredUnit, experts: u32, tokens: u32, us: f64) -> Option<PlannedWork> {
        let cost = unit.cost(class_of(tokens));
        let wanted =
            self.samples.get(cost).is_some_and(|of| of.len() < SAMPLES) && us > 0.0 && us.is_finite();
        wanted.then_some(PlannedWork { cost, experts, us })
    }

    /// Adds a measurement. Returns the corrected costs if it was the last of its cost.
    pub fn add(&mut self, work: PlannedWork, measured_us: f64) -> Option<Costs> {
        let samples = self.samples.get_mut(work.cost).filter(|of| of.len() < SAMPLES)?;
        let each = f64::from(work.experts.max(1));
        samples.push(Sample { planned_us: work.us / each, measured_us: measured_us / each });
        let complete = samples.len() == SAMPLES;
        complete.then(|| self.corrected())
    }

    /// Factor of a cost; `None` until it has all its measurements.
    fn factor(&self, cost: usize) -> Option<f64> {
        let samples = self.samples.get(cost).filter(|of| of.len() == SAMPLES)?;
        let ratio = median(samples, |s| s.measured_us / s.planned_us);
        Some(((2.0 * ratio.log2()).round().clamp(-MOST, MOST) / 2.0).exp2())
    }

    /// Factor of a unit for experts with so many tokens: that of their class, or else of the nearest one that
    /// was measured.
    fn factor_at(&self, unit: MeasuredUnit, tokens: u32) -> f64 {
        let own = class_of(tokens);
        let measured = (0..CLASSES.len()).filter_map(|c| Some((c.abs_diff(own), self.factor(unit.cost(c))?)));
        measured.min_by_key(|&(away, _)| away).map_or(1.0, |(_, factor)| factor)
    }

    /// The plan's costs, corrected by the measurements so far.
    fn corrected(&self) -> Costs {
        let mut costs = self.planned.clone();
        let link = self.factor(MeasuredUnit::Link.cost(0)).unwrap_or(1.0);
        costs.bring_us *= link;
        costs.first_bring_us *= link;
        if let Some(gpu) = &mut costs.gpu {
            gpu.table = gpu.table.scaled(|tokens| self.factor_at(MeasuredUnit::Gpu, tokens));
            let launch_us = self.planned.launch_us * self.factor_at(MeasuredUnit::Gpu, 1);
            gpu.first_us = (gpu.first_us + launch_us - self.planned.launch_us).max(0.0);
            costs.launch_us = launch_us;
        }
        costs.cpu.table = costs.cpu.table.scaled(|tokens| self.factor_at(MeasuredUnit::Cpu, tokens));
        costs.cpu.first_us *= self.factor_at(MeasuredUnit::Cpu, 1);
        costs
    }

    /// The costs with all their measurements, beside the plan's.
    pub fn checks(&self) -> [Option<CostCheck>; COSTS] {
        let mut checks = [None; COSTS];
        let classes = || CLASSES.into_iter().enumerate();
        let units = [MeasuredUnit::Gpu, MeasuredUnit::Cpu];
        let all =
            units.into_iter().flat_map(|unit| classes().map(move |(class, first)| (unit, class, first)));
        for (unit, class, tokens) in all.chain([(MeasuredUnit::Link, 0, 0)]) {
            let cost = unit.cost(class);
            if let (Some(check), Some(factor)) = (checks.get_mut(cost), self.factor(cost)) {
                let samples = &self.samples[cost];
                let [planned_us, measured_us] =
                    [median(samples, |s| s.planned_us), median(samples, |s| s.measured_us)];
                *check = Some(CostCheck { unit, tokens, planned_us, measured_us, factor });
            }
        }
        checks
    }
}
