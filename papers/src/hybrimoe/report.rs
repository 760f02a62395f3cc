//! Everything that the page says, computed once.

use super::machine::{A6000, Machine, PROMPT};
use super::models::{MODELS, Model, QWEN2};
use super::paper::{CACHED, PROMPTS};
use super::routing::{CALIBRATION_DOMAIN, GATE_ACCURACY, RUN_DOMAIN, trace};
use super::simulate::{Case, Outcome};
use super::systems::{
    ABLATION, BASELINE, HYBRIMOE, KTRANSFORMERS, LRU, MOEC, MRS, MRS_BYPASS, SYSTEMS, System,
};
use crate::recorded::Recorded;
use moec_base::{Error, Result};
use moec_runtime::schedule::{Order, Solver};
use moec_sim::cache::{Trace, optimum, replay};

/// Size of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Size {
    /// Tokens that are decoded.
    pub tokens: usize,
    /// Those of them that come before any is counted.
    pub warmup: usize,
    /// Lengths of prompts, of [`PROMPTS`], the shortest first.
    pub prompts: usize,
    /// Tokens of replays of caches.
    pub replayed: usize,
}

impl Size {
    /// For the page.
    pub const FULL: Self = Self { tokens: 128, warmup: 32, prompts: PROMPTS.len(), replayed: 512 };
    /// For a look, and for tests.
    pub const QUICK: Self = Self { tokens: 40, warmup: 16, prompts: 2, replayed: 128 };
}

/// Routing of every model.
#[derive(Clone, Debug)]
pub struct Bench {
    /// Size of the run.
    pub size: Size,
    /// By model: what placement is chosen by, tokens to decode, prompts, tokens to replay.
    traces: Vec<[Trace; 4]>,
}

/// Seconds of a pass of all [`SYSTEMS`].
#[derive(Clone, Debug, PartialEq)]
pub struct Row {
    /// Model.
    pub model: &'static str,
    /// Share of experts on the GPU.
    pub cached: f64,
    /// Tokens of the pass: 1 in decoding.
    pub tokens: usize,
    /// By system.
    pub outcomes: Vec<Outcome>,
}

/// Hit rates of a cache.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Hits {
    /// Place of the model in [`MODELS`].
    pub model: usize,
    /// Share of experts cached.
    pub cached: f64,
    /// LRU, MRS, MRS with bypass, and the bound that no policy passes.
    pub rates: [f64; 4],
}

/// Everything.
#[derive(Clone, Debug, PartialEq)]
pub struct Report {
    /// Prefill.
    pub prefill: Vec<Row>,
    /// Decoding.
    pub decode: Vec<Row>,
    /// Seconds of Table III: prefill and decoding, by row of [`ABLATION`].
    pub ablation: [[f64; 5]; 2],
    /// Figure 9.
    pub hits: Vec<Hits>,
    /// Speedups in decoding of Qwen2 by multiples of [`GATE_ACCURACY`]: prefetching alone, all.
    pub gate_accuracy: Vec<(f64, [f64; 2])>,
    /// Mean speedups over KTransformers with one assumption changed: its name, prefill, decoding.
    pub variants: Vec<(&'static str, [f64; 2])>,
}

impl Bench {
    /// Draws all routing.
    ///
    /// # Errors
    /// Our bug: counts that do not parse.
    pub fn new(size: Size) -> Result<Self> {
        let recorded = Recorded::every()?;
        let of = |m: &Model| {
            let run = |tokens, seed| trace(&recorded, RUN_DOMAIN, m, tokens, seed);
            let longest = PROMPTS[size.prompts - 1].max(PROMPT);
            Ok([
                trace(&recorded, CALIBRATION_DOMAIN, m, 512, 11)?,
                run(size.tokens, 3)?,
                run(longest, 5)?,
                run(size.replayed, 7)?,
            ])
        };
        Ok(Self { size, traces: MODELS.iter().map(of).collect::<Result<_>>()? })
    }

    fn case<'a>(
        &'a self,
        machine: &'a Machine,
        model: &'a Model,
        system: &'a System,
        cached: f64,
        which: usize,
    ) -> Case<'a> {
        let at = MODELS.iter().position(|m| m.name == model.name).unwrap_or(0);
        Case::new(machine, model, system, cached, [&self.traces[at][0], &self.traces[at][which]])
    }

    /// A prompt.
    ///
    /// # Errors
    /// Our bug: costs or settings that cannot be.
    pub fn prefill(
        &self,
        machine: &Machine,
        model: &Model,
        system: &System,
        cached: f64,
        tokens: usize,
    ) -> Result<Outcome> {
        self.case(machine, model, system, cached, 2).prefill(tokens)
    }

    /// Tokens.
    ///
    /// # Errors
    /// As [`Bench::prefill`].
    pub fn decode(&self, machine: &Machine, model: &Model, system: &System, cached: f64) -> Result<Outcome> {
        self.case(machine, model, system, cached, 1).decode(self.size.warmup)
    }

    /// The rows of Figures 7 and 8 for some systems.
    fn rows(&self, systems: &[System]) -> Result<[Vec<Row>; 2]> {
        let (mut prefill, mut decode) = (Vec::new(), Vec::new());
        for model in &MODELS {
            for cached in CACHED {
                for &tokens in &PROMPTS[..self.size.prompts] {
                    let of = |s: &System| self.prefill(&A6000, model, s, cached, tokens);
                    let outcomes = systems.iter().map(of).collect::<Result<_>>()?;
                    prefill.push(Row { model: model.name, cached, tokens, outcomes });
                }
                let of = |s: &System| self.decode(&A6000, model, s, cached);
                let outcomes = systems.iter().map(of).collect::<Result<_>>()?;
                decode.push(Row { model: model.name, cached, tokens: 1, outcomes });
            }
        }
        Ok([prefill, decode])
    }

    fn hits(&self) -> Result<Vec<Hits>> {
        let mut all = Vec::new();
        for (model, m) in MODELS.iter().enumerate() {
            let trace = &self.traces[model][3];
            for cached in CACHED {
                let capacity = (m.experts as f64 * cached) as u64 * m.layers as u64;
                let of = |setting: &str| {
                    let run = setting.parse().and_then(|s| replay(trace, capacity, &s, 1));
                    run.map(|r| r.total().hit_rate()).map_err(|e| Error::input(e.to_string()))
                };
                let bound = optimum(trace, capacity, 1).total().hit_rate();
                all.push(Hits { model, cached, rates: [of(LRU)?, of(MRS)?, of(MRS_BYPASS)?, bound] });
            }
        }
        Ok(all)
    }
}

/// Mean speedup of one system over another.
pub fn over(rows: &[Row], baseline: usize, system: usize) -> f64 {
    let each = rows.iter().map(|r| r.outcomes[baseline].seconds / r.outcomes[system].seconds);
    each.sum::<f64>() / rows.len().max(1) as f64
}

impl Report {
    /// Computes everything.
    ///
    /// # Errors
    /// Our bug: costs or settings that cannot be.
    pub fn new(bench: &Bench) -> Result<Self> {
        let [prefill, decode] = bench.rows(&SYSTEMS)?;
        let mut ablation = [[0.0; 5]; 2];
        for (i, system) in ABLATION.iter().enumerate() {
            ablation[0][i] = bench.prefill(&A6000, &QWEN2, system, CACHED[0], PROMPT)?.seconds;
            ablation[1][i] = bench.decode(&A6000, &QWEN2, system, CACHED[0])?.seconds;
        }
        let mut gate_accuracy = Vec::new();
        for part in [0.0, 0.25, 0.5, 0.75, 1.0, 1.25] {
            let of = |system: &System| -> Result<f64> {
                let case = bench.case(&A6000, &QWEN2, system, CACHED[0], 1);
                let gate_accuracy = GATE_ACCURACY.map(|f| f * part);
                Ok(ablation[1][0] / Case { gate_accuracy, ..case }.decode(bench.size.warmup)?.seconds)
            };
            gate_accuracy.push((part, [of(&ABLATION[2])?, of(&HYBRIMOE)?]));
        }
        let free = Solver::Paper(Order::Free);
        let others: [(&str, [System; 2]); 3] = [
            (
                "KTransformers' CPU computes in prefill, too",
                [System { prefill: Solver::Fixed, ..KTRANSFORMERS }, HYBRIMOE],
            ),
            (
                "HybriMoE's timelines read the other way",
                [KTRANSFORMERS, System { prefill: free, decode: free, ..HYBRIMOE }],
            ),
            (
                "MRS with bypass, as moec has it",
                [KTRANSFORMERS, System { gpu_residents: MOEC.gpu_residents, ..HYBRIMOE }],
            ),
        ];
        let mut variants =
            vec![("as simulated", [&prefill, &decode].map(|r| over(r, BASELINE, BASELINE + 1)))];
        for (name, systems) in others {
            variants.push((name, bench.rows(&systems)?.map(|r| over(&r, 0, 1))));
        }
        Ok(Self { prefill, decode, ablation, hits: bench.hits()?, gate_accuracy, variants })
    }

    /// Mean speedups over KTransformers of a system of [`SYSTEMS`]: prefill, decoding.
    pub fn speedups(&self, system: usize) -> [f64; 2] {
        [&self.prefill, &self.decode].map(|rows| over(rows, BASELINE, system))
    }

    /// Speedups of Table III: prefill or decoding, by row of [`ABLATION`].
    pub fn ablation(&self, of: usize) -> [f64; 5] {
        self.ablation[of].map(|s| self.ablation[of][0] / s)
    }

    /// Hit rates of a model.
    pub fn hit_rates(&self, model: usize, cached: f64) -> [f64; 4] {
        let found = self.hits.iter().find(|h| h.model == model && h.cached == cached);
        found.map_or([0.0; 4], |h| h.rates)
    }
}
