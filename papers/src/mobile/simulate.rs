//! Token after token on three timelines, in virtual time (Algorithm 1).
//!
//! A pass goes over all layers: a layer takes its dense part, then its router has chosen, and its experts are
//! fetched and computed as the policy says. The little pass takes the first half of a token's experts. Where
//! its token falls back, the big pass takes all: those that the little pass had are on the GPU, and the
//! others, which its routers named, are under way from the beginning in the order of layers (§III-B: "we can
//! identify the target experts of all the layers in the beginning"). The paper's big pass computes those that
//! the little pass's routers named ("we directly employ the default number of experts selected by the little
//! model"), so none is missing.

use super::machine::Machine;
use super::systems::System;
use crate::hybrimoe::models::Model;
use crate::random::Random;
use moec_base::{Error, Result};
use moec_runtime::offload::cache::{Cache, Event, Key, Setting};
use moec_runtime::schedule::timelines::{Free, Task, TimelineScheduler};
use moec_sim::cache::Trace;
use std::collections::HashMap;

/// Case to simulate.
#[derive(Clone, Copy, Debug)]
pub struct Case<'a> {
    /// The machine.
    pub machine: &'a Machine,
    /// The model.
    pub model: &'a Model,
    /// Rows of its output matrix.
    pub vocabulary: u64,
    /// The system.
    pub system: &'a System,
    /// Experts of the little pass.
    pub little: usize,
    /// Share of tokens that are decoded again with all experts.
    pub fallback: f64,
    /// Frequency with which the experts that the little pass's routers named are those that the big pass
    /// requests. 1: they are always the same, as in the paper.
    pub gate_accuracy: f64,
    /// Routing.
    pub trace: &'a Trace,
}

/// Mean times of a token, in microseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Outcome {
    /// Of all.
    pub token: f64,
    /// Of a first pass: `T_l` of equation 1, or `T` without a little one.
    pub first: f64,
    /// Of a second pass: `T_b`; 0 without one.
    pub again: f64,
    /// Share of tokens with a second pass.
    pub fallback: f64,
}

struct State<'a> {
    case: &'a Case<'a>,
    scheduler: TimelineScheduler,
    cache: Option<Cache>,
    /// Times when experts of this token are on the GPU.
    there: HashMap<Key, f64>,
    random: Random,
    now: f64,
    link: f64,
}

impl Case<'_> {
    /// Decodes every token of the trace.
    ///
    /// # Errors
    /// Our bug: costs or a setting that cannot be.
    pub fn run(&self) -> Result<Outcome> {
        let mut state = State::new(self)?;
        let (mut first, mut again, mut fallbacks) = (0.0, 0.0, 0_usize);
        for token in 0..self.trace.tokens() {
            let start = state.now;
            let k = if self.system.little { self.little } else { self.model.k };
            state.there.clear();
            state.pass(token, k)?;
            first += state.now - start;
            if self.system.little && state.random.unit() < self.fallback {
                let start = state.now;
                state.fetch_all(token);
                state.pass(token, self.model.k)?;
                again += state.now - start;
                fallbacks += 1;
            }
        }
        let tokens = self.trace.tokens().max(1) as f64;
        Ok(Outcome {
            token: (first + again) / tokens,
            first: first / tokens,
            again: again / fallbacks.max(1) as f64,
            fallback: fallbacks as f64 / tokens,
        })
    }
}

impl<'a> State<'a> {
    fn new(case: &'a Case<'a>) -> Result<Self> {
        let scheduler = TimelineScheduler::new(case.machine.costs(case.model)?).map_err(wrong)?;
        let room = (case.model.k * case.model.layers) as u64;
        let cache = match case.system.cache() {
            None => None,
            Some(setting) => {
                let setting: Setting = setting.parse().map_err(wrong)?;
                Some(Cache::new(case.trace.experts(), room, &setting))
            }
        };
        Ok(Self {
            case,
            scheduler,
            cache,
            there: HashMap::new(),
            random: Random::new(17),
            now: 0.0,
            link: 0.0,
        })
    }

    /// The experts that a layer is first to compute, those with the largest scores first.
    fn experts(&self, token: usize, layer: usize, k: usize) -> Vec<u16> {
        let step = self.case.trace.step(token, layer);
        let mut chosen = step.chosen.to_vec();
        chosen.sort_by_key(|e| step.ranked.iter().position(|r| r.0 == *e).unwrap_or(usize::MAX));
        chosen.truncate(k);
        chosen
    }

    /// Sends an expert over the link, after transfers in progress, unless the GPU has it.
    fn fetch(&mut self, key: Key) {
        if self.there.contains_key(&key) || self.cache.as_ref().is_some_and(|c| c.contains(key)) {
            return;
        }
        self.link = self.link.max(self.now) + self.scheduler.costs().bring_us;
        self.there.insert(key, self.link);
    }

    /// Sends all that a token's routers named.
    fn fetch_all(&mut self, token: usize) {
        let little = self.case.little;
        for layer in 0..self.case.model.layers {
            for (i, e) in self.experts(token, layer, self.case.model.k).into_iter().enumerate() {
                // Experts that the little pass computed are in memory. Of the others some are not those that
                // will be requested.
                if i < little || self.random.unit() < self.case.gate_accuracy {
                    self.fetch(key(layer, e));
                } else {
                    self.link = self.link.max(self.now) + self.scheduler.costs().bring_us;
                }
            }
        }
    }

    fn pass(&mut self, token: usize, k: usize) -> Result<()> {
        let Case { machine, model, system, vocabulary, .. } = *self.case;
        for layer in 0..model.layers {
            self.now += machine.dense(model.dense());
            let experts = self.experts(token, layer, k);
            let tasks: Vec<Task> = experts
                .iter()
                .map(|&expert| Task { expert, load: 1, held: self.held(key(layer, expert)) })
                .collect();
            let waits = (self.link - self.now).max(0.0);
            let free = Free { link: waits, ..Free::default() };
            let schedule = self.scheduler.schedule(system.row.decode, &tasks, free).map_err(wrong)?;
            let (makespan, done) = (schedule.makespan, schedule.done.link.max(waits));
            let came: Vec<(u16, f64)> =
                schedule.runs.iter().filter_map(|r| Some((r.expert, r.transfer?.1))).collect();
            if done > 0.0 {
                self.link = self.now + done;
            }
            for &(expert, at) in &came {
                self.there.insert(key(layer, expert), self.now + at);
            }
            if system.row.prediction.gates() > 0 && layer + 1 < model.layers {
                for expert in self.experts(token, layer + 1, k) {
                    self.fetch(key(layer + 1, expert));
                }
            }
            self.now += makespan;
            self.keep(token, layer, &experts)?;
        }
        self.now += machine.dense(vocabulary * model.width);
        Ok(())
    }

    /// Time when the GPU has an expert, from now.
    fn held(&self, key: Key) -> Option<f64> {
        if self.cache.as_ref().is_some_and(|c| c.contains(key)) {
            return Some(0.0);
        }
        self.there.get(&key).map(|at| (at - self.now).max(0.0))
    }

    /// Notifies the cache which experts of a layer were on the GPU.
    fn keep(&mut self, token: usize, layer: usize, experts: &[u16]) -> Result<()> {
        let there = &self.there;
        let Some(cache) = &mut self.cache else { return Ok(()) };
        let on_gpu: Vec<u16> = experts
            .iter()
            .copied()
            .filter(|&e| there.contains_key(&key(layer, e)) || cache.contains(key(layer, e)))
            .collect();
        let ranked = self.case.trace.step(token, layer).ranked;
        cache.step(layer, &on_gpu, ranked, |_: Event| ()).map_err(wrong)
    }
}

fn key(layer: usize, expert: u16) -> Key {
    Key { layer: layer as u16, expert }
}

fn wrong(e: impl std::fmt::Display) -> Error {
    Error::input(e.to_string())
}
