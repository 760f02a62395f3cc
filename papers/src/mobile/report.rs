//! Everything that the page says, computed once.

use super::machine::Machine;
use super::models::{MODELS, OLMOE, VOCABULARY};
use super::paper::{TABLE_2, TABLE_3, TABLE_4};
use super::simulate::{Case, Outcome};
use super::systems::{FULL, MOBILE, SYSTEMS, System, at};
use crate::hybrimoe::models::Model;
use crate::hybrimoe::routing::{RUN_DOMAIN, trace};
use crate::recorded::Recorded;
use moec_base::{Error, Result};
use moec_sim::cache::Trace;

/// Frequency with which the little pass's routers name what the big pass requests, where the big pass uses
/// its own routers. "More than 80 %" (§III-B).
pub const GATE_ACCURACY: f64 = 0.8;

/// Size of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Size {
    /// Tokens of every run.
    pub tokens: usize,
}

impl Size {
    /// For the page.
    pub const FULL: Self = Self { tokens: 2048 };
    /// For a look, and for tests.
    pub const QUICK: Self = Self { tokens: 256 };
}

/// A run of every system.
#[derive(Clone, Debug, PartialEq)]
pub struct Row {
    /// Model.
    pub model: &'static str,
    /// Its task.
    pub task: &'static str,
    /// Share of tokens that fall back, as requested.
    pub fallback: f64,
    /// By system.
    pub outcomes: Vec<Outcome>,
}

impl Row {
    /// Speedup of a system over the baseline.
    pub fn speedup(&self, system: &System) -> f64 {
        self.outcomes[at(&FULL)].token / self.outcomes[at(system)].token
    }
}

/// Everything.
#[derive(Clone, Debug, PartialEq)]
pub struct Report {
    /// The machine.
    pub machine: Machine,
    /// Half of the experts, and no fallback, by model.
    pub little: Vec<Row>,
    /// The rows of Table II with MoBiLE.
    pub tasks: Vec<Row>,
    /// Table III by threshold.
    pub thresholds: Vec<Row>,
    /// Table IV: speedups of MoBiLE by the little model's experts.
    pub sizes: Vec<f64>,
    /// Speedups of MoBiLE in the rows of Table II, where the big pass uses its own routers.
    pub checked: Vec<f64>,
    /// By share of tokens that fall back, OLMoE.
    pub curve: Vec<Row>,
}

/// Inputs of runs.
struct Bench {
    machine: Machine,
    traces: Vec<Trace>,
}

impl Bench {
    fn new(size: Size) -> Result<Self> {
        let recorded = Recorded::every()?;
        let traces =
            MODELS.iter().map(|m| trace(&recorded, RUN_DOMAIN, m, size.tokens, 3)).collect::<Result<_>>()?;
        Ok(Self { machine: Machine::new()?, traces })
    }

    fn case<'a>(&'a self, model: &'a Model, system: &'a System, fallback: f64) -> Case<'a> {
        let at = MODELS.iter().position(|m| m.name == model.name).unwrap_or(0);
        Case {
            machine: &self.machine,
            model,
            vocabulary: VOCABULARY[at],
            system,
            little: model.k / 2,
            fallback,
            gate_accuracy: 1.0,
            trace: &self.traces[at],
        }
    }

    fn row(&self, model: &Model, task: &'static str, fallback: f64) -> Result<Row> {
        let outcomes = SYSTEMS.iter().map(|s| self.case(model, s, fallback).run()).collect::<Result<_>>()?;
        Ok(Row { model: model.name, task, fallback, outcomes })
    }
}

fn model(name: &str) -> Result<&'static Model> {
    MODELS.iter().find(|m| m.name == name).ok_or_else(|| Error::input(format!("no model `{name}`")))
}

impl Report {
    /// Computes everything.
    ///
    /// # Errors
    /// Our bug: costs or settings that cannot be.
    pub fn new(size: Size) -> Result<Self> {
        let bench = Bench::new(size)?;
        let little = MODELS.iter().map(|m| bench.row(m, "no fallback", 0.0)).collect::<Result<_>>()?;
        let tasks = TABLE_2.iter().map(|&(of, task, r)| bench.row(model(of)?, task, r));
        let thresholds = TABLE_3.iter().map(|&(_, r)| bench.row(&OLMOE, "GSM8K", r));
        let full = bench.case(&OLMOE, &FULL, 0.0).run()?.token;
        let sizes = TABLE_4
            .iter()
            .map(|&(little, r)| Ok(full / Case { little, ..bench.case(&OLMOE, &MOBILE, r) }.run()?.token));
        let checked = TABLE_2.iter().map(|&(of, _, r)| {
            let of = model(of)?;
            let full = bench.case(of, &FULL, 0.0).run()?.token;
            Ok(full / Case { gate_accuracy: GATE_ACCURACY, ..bench.case(of, &MOBILE, r) }.run()?.token)
        });
        let curve = (0..=6).map(|i| bench.row(&OLMOE, "any", f64::from(i) * 0.1));
        Ok(Self {
            machine: bench.machine,
            little,
            tasks: tasks.collect::<Result<_>>()?,
            thresholds: thresholds.collect::<Result<_>>()?,
            sizes: sizes.collect::<Result<_>>()?,
            checked: checked.collect::<Result<_>>()?,
            curve: curve.collect::<Result<_>>()?,
        })
    }

    /// Mean speedup of a model in the rows of Table II.
    pub fn mean(&self, model: &str, system: &System) -> f64 {
        let own = self.tasks.iter().filter(|r| r.model == model).map(|r| r.speedup(system));
        own.clone().sum::<f64>() / own.count().max(1) as f64
    }

    /// Mean speedup over all rows of Table II: of one system over another.
    pub fn over(&self, system: &System, other: &System) -> f64 {
        let each = self.tasks.iter().map(|r| r.speedup(system) / r.speedup(other));
        each.sum::<f64>() / self.tasks.len().max(1) as f64
    }
}
