//! Layer after layer on three timelines, in virtual time, by the policies that a running plan would use.
//!
//! A layer runs its dense part; then its router has chosen, and the experts are divided. Transfers in
//! progress continue after the layer; when the link is idle before the next layer begins, experts of the next
//! layers are transferred into a buffer, and then experts that the CPU computed and the cache admits. A
//! prompt is one pass over all layers.

use super::machine::Machine;
use super::models::Model;
use super::routing::{GATE_ACCURACY, expected, loads};
use super::systems::{GpuResidents, System};
use crate::random::Random;
use moec_base::{Error, Result};
use moec_runtime::offload::cache::{Cache, Event, Key, Setting};
use moec_runtime::schedule::cached::prefetch::{PredictedLayer, Prefetch, plan};
use moec_runtime::schedule::timelines::{Free, Task, TimelineScheduler};
use moec_runtime::schedule::{ExpertUnit, Solver};
use moec_sim::cache::{Trace, uses};
use std::ops::Range;

/// Case to simulate.
#[derive(Clone, Copy, Debug)]
pub struct Case<'a> {
    /// The machine.
    pub machine: &'a Machine,
    /// The model.
    pub model: &'a Model,
    /// The system.
    pub system: &'a System,
    /// Share of a layer's experts that the GPU has room for.
    pub cached: f64,
    /// Frequency with which expectations are right, by layers ahead.
    pub gate_accuracy: [f64; 3],
    /// Routing that placement is chosen by.
    pub seen: &'a Trace,
    /// Routing that is run.
    pub trace: &'a Trace,
}

/// Result.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Outcome {
    /// Seconds of a pass.
    pub seconds: f64,
    /// Uses of experts that were on the GPU, as a share of all.
    pub hits: f64,
    /// Busy shares of GPU (experts alone), CPU and link.
    pub busy: [f64; 3],
}

impl<'a> Case<'a> {
    /// With the assumed accuracy of gates.
    pub fn new(
        machine: &'a Machine,
        model: &'a Model,
        system: &'a System,
        cached: f64,
        [seen, trace]: [&'a Trace; 2],
    ) -> Self {
        Self { machine, model, system, cached, gate_accuracy: GATE_ACCURACY, seen, trace }
    }

    /// Time to the first token of a prompt of so many tokens.
    ///
    /// # Errors
    /// Our bug: costs or a setting that cannot be.
    pub fn prefill(&self, tokens: usize) -> Result<Outcome> {
        let mut state = State::new(self, self.system.prefill, true)?;
        state.pass(0..tokens)?;
        Ok(state.outcome(1))
    }

    /// Time of a token, the mean of all after the first `warmup`.
    ///
    /// # Errors
    /// As [`Case::prefill`].
    pub fn decode(&self, warmup: usize) -> Result<Outcome> {
        let mut state = State::new(self, self.system.decode, false)?;
        for token in 0..self.trace.tokens() {
            if token == warmup {
                state.forget();
            }
            state.pass(token..token + 1)?;
        }
        Ok(state.outcome(self.trace.tokens() - warmup))
    }
}

/// Experts that the GPU holds.
enum GpuExperts {
    Fixed(Vec<Vec<bool>>),
    Cache(Box<Cache>),
}

struct State<'a> {
    case: &'a Case<'a>,
    policy: Solver,
    scheduler: TimelineScheduler,
    held: GpuExperts,
    /// Experts in the buffer, with the times of their arrival.
    coming: Vec<(Key, f64)>,
    random: Random,
    now: f64,
    link: f64,
    began: f64,
    uses: [u64; 2],
    busy: [f64; 3],
}

fn key(layer: usize, expert: u16) -> Key {
    Key { layer: layer as u16, expert }
}

impl<'a> State<'a> {
    fn new(case: &'a Case<'a>, policy: Solver, prompt: bool) -> Result<Self> {
        let costs = case.machine.costs(case.model).map_err(wrong)?;
        let (layers, experts) = (case.model.layers, case.model.experts);
        let slots = (experts as f64 * case.cached).round() as usize;
        let counts = uses(case.seen);
        let popular = |layer: usize| {
            let own = &counts[layer * experts..(layer + 1) * experts];
            let mut order: Vec<usize> = (0..experts).collect();
            order.sort_by_key(|&e| (std::cmp::Reverse(own[e]), e));
            let mut is = vec![false; experts];
            order.iter().take(slots).for_each(|&e| is[e] = true);
            is
        };
        let held = match case.system.gpu_residents {
            // A prompt is one pass: no layer occurs twice, and experts that were popular before are cached.
            GpuResidents::Token | GpuResidents::Popular | GpuResidents::Classes | GpuResidents::Local => {
                GpuExperts::Fixed((0..layers).map(popular).collect())
            }
            GpuResidents::Layers => {
                let on = (layers as f64 * case.cached).round() as usize;
                GpuExperts::Fixed((0..layers).map(|l| vec![l < on; experts]).collect())
            }
            GpuResidents::Cache(_) if prompt => GpuExperts::Fixed((0..layers).map(popular).collect()),
            GpuResidents::Cache(setting) => {
                let setting: Setting = setting.parse().map_err(wrong)?;
                let mut cache = Cache::new(case.seen.experts(), (slots * layers) as u64, &setting);
                cache.warm(&counts, |_| ());
                GpuExperts::Cache(Box::new(cache))
            }
        };
        let scheduler = TimelineScheduler::new(costs).map_err(wrong)?;
        Ok(Self {
            case,
            policy,
            scheduler,
            held,
            coming: Vec::new(),
            random: Random::new(1),
            now: 0.0,
            link: 0.0,
            began: 0.0,
            uses: [0; 2],
            busy: [0.0; 3],
        })
    }

    fn forget(&mut self) {
        (self.began, self.uses, self.busy) = (self.now, [0; 2], [0.0; 3]);
    }

    fn outcome(&self, passes: usize) -> Outcome {
        let time = self.now - self.began;
        Outcome {
            seconds: time * 1e-6 / passes as f64,
            hits: self.uses[0] as f64 / (self.uses[0] + self.uses[1]).max(1) as f64,
            busy: self.busy.map(|b| b / time),
        }
    }

    fn is_held(&self, layer: usize, expert: u16) -> bool {
        match &self.held {
            GpuExperts::Fixed(of) => of[layer][usize::from(expert)],
            GpuExperts::Cache(cache) => cache.contains(key(layer, expert)),
        }
    }

    /// Time from which on the GPU has an expert.
    fn when(&self, layer: usize, expert: u16, from: f64) -> Option<f64> {
        if self.is_held(layer, expert) {
            return Some(0.0);
        }
        let coming = self.coming.iter().find(|c| c.0 == key(layer, expert));
        coming.map(|c| (c.1 - from).max(0.0))
    }

    fn tasks(&self, loads: &[u32], layer: usize, from: f64) -> Vec<Task> {
        let chosen = loads.iter().enumerate().filter(|l| *l.1 > 0);
        let task = |(e, &load): (usize, &u32)| {
            let expert = e as u16;
            Task { expert, load, held: self.when(layer, expert, from) }
        };
        chosen.map(task).collect()
    }

    fn pass(&mut self, tokens: Range<usize>) -> Result<()> {
        for layer in 0..self.case.model.layers {
            self.layer(layer, tokens.clone())?;
        }
        Ok(())
    }

    fn layer(&mut self, layer: usize, tokens: Range<usize>) -> Result<()> {
        let before = self.case.machine.before(self.case.model, tokens.len());
        self.now += before;
        let now = self.now;
        let loads = loads(self.case.trace, tokens.clone(), layer);
        let tasks = self.tasks(&loads, layer, now);
        let link = (self.link - now).max(0.0);
        let free = Free { link, ..Free::default() };
        let schedule = self.scheduler.schedule(self.policy, &tasks, free).map_err(wrong)?;
        let makespan = schedule.makespan;
        self.link = now + schedule.done.link.max(link);
        self.busy[2] += schedule.done.link - link;
        for r in &schedule.runs {
            self.busy[usize::from(r.unit == ExpertUnit::Cpu)] += r.end - r.start;
        }
        // Experts that the CPU computed without a copy on the GPU may follow.
        let missed: Vec<u16> = schedule
            .runs
            .iter()
            .filter(|r| r.unit == ExpertUnit::Cpu && tasks[r.task].held.is_none())
            .map(|r| r.expert)
            .collect();
        for t in &tasks {
            let held = self.is_held(layer, t.expert);
            self.uses[usize::from(!held)] += 1;
        }
        let end = now + makespan + before;
        self.ahead(layer, tokens.clone(), now, makespan + before);
        self.keep(layer, tokens, &tasks, &missed, end)?;
        self.coming.retain(|c| usize::from(c.0.layer) != layer);
        self.now = now + makespan;
        Ok(())
    }

    /// Transfers experts of the next layers.
    fn ahead(&mut self, layer: usize, tokens: Range<usize>, now: f64, each: f64) {
        let model = self.case.model;
        let depth = self.case.system.prediction.gates().min(model.layers - 1 - layer);
        let mut layers = Vec::new();
        for ahead in 1..=depth {
            let gate_accuracy = self.case.gate_accuracy[ahead - 1];
            let loads =
                expected(self.case.trace, tokens.clone(), layer + ahead, gate_accuracy, &mut self.random);
            let start = each * ahead as f64;
            let tasks = self.tasks(&loads, layer + ahead, now + start);
            // For a prompt, only the number of tokens is uncertain, not whether an expert gets any.
            let probability = tasks.iter().map(|t| if t.load > 1 { 1.0 } else { gate_accuracy }).collect();
            layers.push(PredictedLayer { start, tasks, probability });
        }
        let (mut out, busy): (Vec<Prefetch>, f64) = (Vec::new(), (self.link - now).max(0.0));
        plan(&mut self.scheduler, self.policy, &mut layers, busy, &mut out);
        for p in out {
            self.coming.push((key(layer + p.ahead, p.expert), now + p.there));
            self.busy[2] += now + p.there - self.link.max(now);
            self.link = now + p.there;
        }
    }

    /// Keeps experts of a layer.
    fn keep(
        &mut self,
        layer: usize,
        tokens: Range<usize>,
        tasks: &[Task],
        missed: &[u16],
        end: f64,
    ) -> Result<()> {
        let bring_us = self.scheduler.costs().bring_us;
        let GpuExperts::Cache(cache) = &mut self.held else { return Ok(()) };
        let last = tokens.end - 1;
        let ranked = self.case.trace.step(last, layer).ranked;
        let mut chosen: Vec<u16> = tasks.iter().map(|t| t.expert).filter(|e| !missed.contains(e)).collect();
        let mut by_score = missed.to_vec();
        by_score.sort_by_key(|e| ranked.iter().position(|r| r.0 == *e).unwrap_or(usize::MAX));
        for e in by_score {
            let from = self.link.max(self.now);
            if from >= end {
                break;
            }
            self.link = from + bring_us;
            self.busy[2] += bring_us;
            chosen.push(e);
        }
        cache.step(layer, &chosen, ranked, |_: Event| ()).map_err(wrong)
    }
}

fn wrong(e: impl std::fmt::Display) -> Error {
    Error::input(e.to_string())
}
