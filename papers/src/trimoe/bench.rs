//! One configuration: a policy on a machine, with a model and its loads, for some steps.

use super::loads::{Loads, Source};
use super::machine::Machine;
use super::models::Model;
use moec_ndp::steps::{Busy, LayerReport, Simulator, StepsError};
use moec_runtime::schedule::scheduled::{PredictionCounters, Setup, Window};
use moec_runtime::schedule::{System, Table};

/// Size of a configuration's simulation. Layers are equal, so that some represent all.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Size {
    /// Layers.
    pub layers: usize,
    /// Steps that come before those that count.
    pub warmup: usize,
    /// Steps that count.
    pub steps: usize,
}

impl Size {
    /// Size that the page is written from.
    pub const FULL: Self = Self { layers: 6, warmup: 6, steps: 24 };
    /// For a test.
    pub const QUICK: Self = Self { layers: 2, warmup: 3, steps: 6 };
}

/// Case of a configuration.
#[derive(Clone, Debug)]
pub struct Case<'a> {
    /// The machine.
    pub machine: Machine,
    /// The model.
    pub model: &'a Model,
    /// Tokens of a step.
    pub batch: usize,
    /// Deciding system.
    pub policy: System,
    /// `f_calc` of an NDP unit.
    pub ndp: &'a Table,
    /// Source of loads.
    pub source: &'a Source,
    /// Its size.
    pub size: Size,
}

/// Means over steps and layers.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Outcome {
    /// Routed experts of a layer, with the rows that go to the host and come back: the MoE layer, in
    /// microseconds.
    pub moe_us: f64,
    /// Attention, dense layers and shared experts of a layer, in microseconds.
    pub before_us: f64,
    /// Busy shares of the time of the experts.
    pub busy: Shares,
    /// The scheduler's model of the experts (equation 7), in microseconds.
    pub predicted_us: f64,
    /// Mean of the scheduler's modelled time over the simulated one, minus 1.
    pub error: f64,
    /// The mean of its size.
    pub absolute_error: f64,
    /// Part of the time in which nothing was done but to wait for moves.
    pub stalled: f64,
    /// Moves of a layer's step.
    pub moves: f64,
    /// Counts of right predictions.
    pub counters: PredictionCounters,
}

/// Parts of the time, from 0 to 1.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Shares {
    /// The GPU calculates.
    pub gpu: f64,
    /// The GPU calculates or waits for weights that come.
    pub gpu_domain: f64,
    /// The CPU has an expert.
    pub cpu: f64,
    /// The CPU would have it if memory were infinitely fast.
    pub cpu_calc: f64,
    /// NDP units, on average.
    pub ndp: f64,
    /// The NDP unit that is busy the longest.
    pub ndp_most: f64,
    /// PCIe.
    pub pcie: f64,
    /// DIMM-Links, on average.
    pub link: f64,
}

impl Outcome {
    /// All of a layer.
    pub fn layer_us(&self) -> f64 {
        self.moe_us + self.before_us
    }
}

impl Case<'_> {
    /// Simulates it.
    ///
    /// # Errors
    /// A setup that cannot be.
    pub fn run(&self) -> Result<Outcome, StepsError> {
        let mut simulator = self.simulator()?;
        let Self { machine, model, batch, size, .. } = self;
        let mut loads = self.loads();
        let (before, rows) = (machine.before(model, *batch), machine.rows(model, *batch));
        let mut reports = Vec::new();
        for step in 0..size.warmup + size.steps {
            let report = simulator.step(&loads.step(), before, rows)?;
            if step >= size.warmup {
                reports.extend(report.layers);
            }
        }
        Ok(summary(&reports, simulator.scheduler().counters()))
    }

    /// The loads of its steps: those of all policies are the same.
    pub fn loads(&self) -> Loads {
        let Self { model, batch, source, size, .. } = self;
        Loads::new(source, size.layers, model.experts, model.k, *batch, 7)
    }

    /// Ready for the first step, with experts placed by their mean loads.
    ///
    /// # Errors
    /// A setup that cannot be.
    pub fn simulator(&self) -> Result<Simulator, StepsError> {
        let Self { machine, model, batch, policy, size, .. } = self;
        let window = machine.before(model, *batch).calc_us;
        let link_us = if machine.links_always { f64::MAX } else { window };
        let setup = Setup {
            system: *policy,
            costs: machine.costs(model, self.ndp)?,
            layers: size.layers,
            experts: model.experts,
            memories: machine.dimms,
            frames: machine.frames(model),
            window: Window { pcie_us: window, link_us },
        };
        let mut simulator = Simulator::new(setup, machine.system(model))?;
        let loads = self.loads();
        for layer in 0..if machine.profiled { size.layers } else { 0 } {
            simulator.scheduler_mut().profile(layer, &loads.mean(layer))?;
        }
        Ok(simulator)
    }
}

fn summary(reports: &[LayerReport], counters: PredictionCounters) -> Outcome {
    let n = reports.len().max(1) as f64;
    let mut busy = Busy::default();
    for report in reports {
        busy.add(&report.busy);
    }
    let sum = |f: &dyn Fn(&LayerReport) -> f64| reports.iter().map(f).sum::<f64>();
    let experts = sum(&|r| r.experts_us).max(f64::MIN_POSITIVE);
    let links = busy.link.len().max(1) as f64;
    Outcome {
        moe_us: sum(&|r| r.experts_us + r.rows_us) / n,
        before_us: sum(&|r| r.before_us) / n,
        busy: Shares {
            gpu: busy.gpu / experts,
            gpu_domain: busy.gpu_domain / experts,
            cpu: busy.cpu / experts,
            cpu_calc: busy.cpu_calc / experts,
            ndp: busy.ndp_mean() / experts,
            ndp_most: busy.ndp.iter().copied().fold(0.0, f64::max) / experts,
            pcie: busy.pcie / experts,
            link: busy.link.iter().sum::<f64>() / links / experts,
        },
        predicted_us: sum(&|r| r.predicted_us) / n,
        error: sum(&LayerReport::error) / n,
        absolute_error: sum(&|r| r.error().abs()) / n,
        stalled: sum(&|r| r.stalled_us) / experts,
        moves: sum(&|r| r.moves as f64) / n,
        counters,
    }
}
