//! Everything that is simulated for the page, once.

use super::bench::{Outcome, Shares};
use super::experiments::{
    ABLATION, BASELINES, Bench, KTRANSFORMERS, MOEC, SYSTEMS, Setting, TRIMOE, TimingMethod, over_best,
};
use super::loads::{Loads, Source, count};
use super::machine::{ATTENTION, CONTEXT, GPU_FLOPS, Machine, PCIE};
use super::models::{MODELS, Model, QWEN};
use super::paper::{BATCH, BATCHES, ROBUST};
use moec_ndp::steps::StepsError;

/// DIMMs of Figure 9(a).
const DIMMS: [usize; 6] = [2, 4, 8, 12, 16, 32];
/// Multiples of the CPU's rate, of Figure 9(b).
const CPU: [f64; 5] = [0.125, 0.25, 0.5, 1.0, 2.0];
/// Tokens of the prompt, and tokens of the answers, of Figure 7. Assumed: the paper states neither.
pub const PROMPT: f64 = 512.0;
/// Tokens of the answer.
pub const OUTPUTS: [usize; 4] = [128, 256, 512, 1024];
/// Drifts that are tried.
const DRIFTS: [f64; 6] = [0.0, 0.25, 0.5, 1.0, 1.5, 2.0];
/// Batches other than those of §5.1.3.
const SMALL: [usize; 4] = [32, 64, 128, 1024];

/// A row of Figure 6.
#[derive(Clone, Debug, PartialEq)]
pub struct Speeds {
    /// Model.
    pub model: &'static str,
    /// Tokens of a step.
    pub batch: usize,
    /// Whether loads are drawn at random; otherwise they are recorded ones of OLMoE.
    pub drawn: bool,
    /// Microseconds of each system's MoE layer.
    pub us: [f64; 5],
}

impl Speeds {
    /// Speedup of each system over the first.
    pub fn over_klotski(&self) -> [f64; 5] {
        self.us.map(|us| self.us[0] / us)
    }
}

/// Throughput of a model, over the best baseline: of TriMoE and of moec.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct EndToEnd {
    /// One thing after the other, with keys and values in the GPU's memory.
    pub plain: [f64; 2],
    /// Attention of one half of the batch in parallel to the experts of the other.
    pub zigzag: [f64; 2],
    /// Keys and values in the host's memory, read over PCIe.
    pub kv_on_host: [f64; 2],
    /// Part of TriMoE's time that decoding takes, one thing after the other.
    pub decoding: f64,
}

/// Prediction, and its gain, at a drift.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Drifted {
    /// The drift.
    pub drift: f64,
    /// Experts whose class was predicted.
    pub accuracy: f64,
    /// Decisions to move that paid.
    pub precision: f64,
    /// Speedup over the best baseline, of TriMoE and of moec.
    pub speedup: [f64; 2],
}

/// Costs of migration.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Migration {
    /// Time of a layer over that with moves that take no time, less 1.
    pub overhead: f64,
    /// Moves of a layer's step.
    pub moves: f64,
    /// Part of the time that was waited for moves.
    pub stalled: f64,
}

/// Gain of relayout over the paper's refinement: times faster, by model.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Relayout {
    /// With experts placed by their mean loads first.
    pub profiled: [f64; 3],
    /// With nothing known of them first.
    pub unknown: [f64; 3],
}

/// Speedups of TriMoE and moec over the best baseline, by batch of §5.5.
pub type Small = [[f64; 2]; ROBUST.len()];

/// Everything.
#[derive(Clone, Debug)]
pub struct Report {
    /// Figure 6.
    pub speeds: Vec<Speeds>,
    /// By variant: speedups of TriMoE and moec over the best baseline, by model.
    pub variants: Vec<(&'static str, [[f64; 2]; 3])>,
    /// Figure 7, by model and output.
    pub throughput: [[EndToEnd; OUTPUTS.len()]; 3],
    /// Figure 8: microseconds by model and step.
    pub ablation: [[f64; ABLATION.len()]; 3],
    /// §5.5 by variants: Qwen3 at small batches.
    pub small: Vec<(&'static str, Small)>,
    /// Gain of relayout.
    pub relayout: Relayout,
    /// Figure 9(a): DIMMs, milliseconds of TriMoE and of moec.
    pub dimms: Vec<(f64, [f64; 2])>,
    /// Figure 9(b).
    pub cpu: Vec<(f64, [f64; 2])>,
    /// Table 3: means over the models.
    pub used: [Shares; 5],
    /// The model of the schedule over the simulation less 1, and the mean of its size; by model and system.
    pub errors: [[(f64, f64); 5]; 3],
    /// By drift.
    pub drifts: Vec<Drifted>,
    /// By model.
    pub migration: [Migration; 3],
    /// Without a GPU, microseconds by model: the CPU alone, TriMoE, moec.
    pub no_gpu: [[f64; 3]; 3],
    /// Factor by which NDP units take longer if they compute warm experts, too.
    pub warm_on_ndp: f64,
    /// Attention and dense layers of Qwen3 at batch 512, in milliseconds.
    pub window_ms: f64,
    /// Accuracy of the predictor, all models.
    pub accuracy: f64,
}

impl Report {
    /// Simulates all of it.
    ///
    /// # Errors
    /// A setup that cannot be.
    pub fn new(bench: &Bench) -> Result<Self, StepsError> {
        let mut speeds = Vec::new();
        for (drawn, source) in [(true, &bench.drawn), (false, &bench.recorded)] {
            for model in &MODELS {
                let small: &[usize] = if drawn && model.name == QWEN.name { &SMALL } else { &[] };
                for &batch in small.iter().chain(&BATCHES) {
                    let setting = Setting { source, ..bench.setting(model, batch) };
                    let us = bench.times(&setting, &SYSTEMS, TimingMethod::Simulation)?;
                    speeds.push(Speeds { model: model.name, batch, drawn, us });
                }
            }
        }
        let variants = bench.variants();
        let variants = variants.iter().map(|v| Ok((v.name, bench.speedups(v)?)));
        let of = |i: usize| &MODELS[i];
        let mut outcomes = Vec::new();
        for model in &MODELS {
            let setting = bench.setting(model, BATCH);
            let each = SYSTEMS.iter().map(|s| bench.run(&setting, s, TimingMethod::Simulation));
            outcomes.push(each.collect::<Result<Vec<Outcome>, StepsError>>()?);
        }
        let window_ms = bench.machine().before(&QWEN, BATCH).calc_us * 1e-3;
        let accuracy = outcomes.iter().map(|o| o[3].counters.accuracy()).sum::<f64>() / 3.0;
        Ok(Self {
            speeds,
            variants: variants.collect::<Result<_, StepsError>>()?,
            throughput: [
                throughput(bench, of(0), &outcomes[0])?,
                throughput(bench, of(1), &outcomes[1])?,
                throughput(bench, of(2), &outcomes[2])?,
            ],
            ablation: [ablation(bench, of(0))?, ablation(bench, of(1))?, ablation(bench, of(2))?],
            small: small(bench)?,
            relayout: Relayout { profiled: relayout(bench, true)?, unknown: relayout(bench, false)? },
            dimms: bench.by_dimms(&DIMMS)?,
            cpu: bench.by_cpu(&CPU)?,
            used: std::array::from_fn(|s| mean(&[0, 1, 2].map(|m| outcomes[m][s].busy))),
            errors: [0, 1, 2]
                .map(|m| std::array::from_fn(|s| (outcomes[m][s].error, outcomes[m][s].absolute_error))),
            drifts: DRIFTS.iter().map(|&d| drifted(bench, d)).collect::<Result<_, _>>()?,
            migration: [migration(bench, of(0))?, migration(bench, of(1))?, migration(bench, of(2))?],
            no_gpu: [no_gpu(bench, of(0))?, no_gpu(bench, of(1))?, no_gpu(bench, of(2))?],
            warm_on_ndp: warm_on_ndp(bench, of(0)),
            window_ms,
            accuracy,
        })
    }

    /// The same of a variant by its name.
    pub fn variant(&self, name: &str) -> [[f64; 2]; 3] {
        self.variants.iter().find(|v| v.0 == name).map_or([[0.0; 2]; 3], |v| v.1)
    }

    /// Speedups of TriMoE and moec over the best baseline, the mean over the batches of §5.1.3, by model.
    pub fn speedup(&self) -> [[f64; 2]; 3] {
        self.variants.first().map_or([[0.0; 2]; 3], |v| v.1)
    }
}

fn mean(of: &[Shares]) -> Shares {
    let m = |f: fn(&Shares) -> f64| of.iter().map(f).sum::<f64>() / of.len().max(1) as f64;
    Shares {
        gpu: m(|s| s.gpu),
        gpu_domain: m(|s| s.gpu_domain),
        cpu: m(|s| s.cpu),
        cpu_calc: m(|s| s.cpu_calc),
        ndp: m(|s| s.ndp),
        ndp_most: m(|s| s.ndp_most),
        pcie: m(|s| s.pcie),
        link: m(|s| s.link),
    }
}

/// Prefill once, with all experts read over PCIe during its calculation, and then a step for each token.
fn throughput(
    bench: &Bench,
    model: &Model,
    outcomes: &[Outcome],
) -> Result<[EndToEnd; OUTPUTS.len()], StepsError> {
    let host = Machine { kv_on_host: true, ..bench.machine() };
    let setting = Setting { machine: host, ..bench.setting(model, BATCH) };
    let mut kv = [(0.0, 0.0); 5];
    for (kv, system) in kv.iter_mut().zip(&SYSTEMS) {
        let o = bench.run(&setting, system, TimingMethod::Simulation)?;
        *kv = (o.moe_us, o.before_us);
    }
    let active = model.attention + (model.shared + model.k) as u64 * model.expert();
    let tokens = BATCH as f64 * PROMPT;
    let flops = 2.0 * tokens * active as f64 + tokens * PROMPT / 2.0 * model.attention_flops as f64;
    let weights = model.experts as f64 * model.expert_bytes() as f64;
    let prefill = (flops / (GPU_FLOPS * ATTENTION)).max(weights / PCIE) * 1e6;
    let over =
        |us: &dyn Fn(usize) -> f64, n: usize| over_best(&std::array::from_fn(|s| prefill + n as f64 * us(s)));
    Ok(OUTPUTS.map(|n| EndToEnd {
        plain: over(&|s| outcomes[s].moe_us + outcomes[s].before_us, n),
        zigzag: over(&|s| outcomes[s].moe_us.max(outcomes[s].before_us), n),
        kv_on_host: over(&|s| kv[s].0 + kv[s].1, n),
        decoding: 1.0 - prefill / (prefill + n as f64 * outcomes[3].layer_us()),
    }))
}

fn ablation(bench: &Bench, model: &Model) -> Result<[f64; ABLATION.len()], StepsError> {
    let setting = bench.setting(model, BATCH);
    let mut out = [0.0; ABLATION.len()];
    for (out, system) in out.iter_mut().zip(&ABLATION) {
        *out = bench.run(&setting, system, TimingMethod::Simulation)?.moe_us;
    }
    Ok(out)
}

/// The variants of the page that change what small batches are good for.
fn small(bench: &Bench) -> Result<Vec<(&'static str, Small)>, StepsError> {
    let mut out = Vec::new();
    for v in bench.variants() {
        let mut row: Small = Default::default();
        for (out, &batch) in row.iter_mut().zip(&ROBUST) {
            let setting = Setting { machine: v.machine.clone(), model: &QWEN, batch, source: &v.source };
            *out = over_best(&bench.times(&setting, &v.systems, v.by)?);
        }
        out.push((v.name, row));
    }
    Ok(out)
}

fn relayout(bench: &Bench, profiled: bool) -> Result<[f64; 3], StepsError> {
    let mut out = [0.0; 3];
    for (out, model) in out.iter_mut().zip(&MODELS) {
        let machine = Machine { profiled, ..bench.machine() };
        let setting = Setting { machine, ..bench.setting(model, BATCH) };
        // The steps +Refinement and +Relayout of Figure 8.
        let [still, moving] =
            [&ABLATION[2], &ABLATION[3]].map(|s| bench.run(&setting, s, TimingMethod::Simulation));
        *out = still?.moe_us / moving?.moe_us;
    }
    Ok(out)
}

fn drifted(bench: &Bench, drift: f64) -> Result<Drifted, StepsError> {
    let source = Source::Drawn(drift);
    let (mut out, n) =
        (Drifted { drift, accuracy: 0.0, precision: 0.0, speedup: [0.0; 2] }, MODELS.len() as f64);
    for model in &MODELS {
        let setting = Setting { source: &source, ..bench.setting(model, BATCH) };
        let each = SYSTEMS.iter().map(|s| bench.run(&setting, s, TimingMethod::Simulation));
        let each = each.collect::<Result<Vec<_>, _>>()?;
        let speedup = over_best(&std::array::from_fn(|s| each[s].moe_us));
        out.accuracy += each[3].counters.accuracy() / n;
        out.precision += each[3].counters.precision() / n;
        out.speedup.iter_mut().zip(speedup).for_each(|(o, s)| *o += s / n);
    }
    Ok(out)
}

fn migration(bench: &Bench, model: &Model) -> Result<Migration, StepsError> {
    let setting = bench.setting(model, BATCH);
    let free = Setting { machine: Machine { moves: false, ..bench.machine() }, ..setting.clone() };
    let took = bench.run(&setting, &TRIMOE, TimingMethod::Simulation)?;
    let free = bench.run(&free, &TRIMOE, TimingMethod::Simulation)?;
    let overhead = took.layer_us() / free.layer_us() - 1.0;
    Ok(Migration { overhead, moves: took.moves, stalled: took.stalled })
}

fn no_gpu(bench: &Bench, model: &Model) -> Result<[f64; 3], StepsError> {
    let setting =
        Setting { machine: Machine { gpu: false, ..bench.machine() }, ..bench.setting(model, BATCH) };
    let mut out = [0.0; 3];
    for (out, system) in out.iter_mut().zip([&KTRANSFORMERS, &TRIMOE, &MOEC]) {
        *out = bench.run(&setting, system, TimingMethod::Simulation)?.moe_us;
    }
    Ok(out)
}

/// Time of all NDP units with the experts that are not hot, over that with the cold ones, of mean
/// loads.
fn warm_on_ndp(bench: &Bench, model: &Model) -> f64 {
    let loads = Loads::new(&bench.drawn, 1, model.experts, model.k, BATCH, 7);
    let mut mean = loads.mean(0);
    mean.sort_by(|a, b| b.total_cmp(a));
    let (hot, warm) = count(model.experts);
    let table = bench.ndp(model);
    let time = |of: &[f64]| of.iter().map(|&n| table.at(n)).sum::<f64>();
    time(&mean[hot..]) / time(&mean[hot + warm..]).max(f64::MIN_POSITIVE)
}

/// The number of the baselines that the strongest one is of.
pub fn strongest(us: &[f64; 5]) -> usize {
    (0..BASELINES).min_by(|&a, &b| us[a].total_cmp(&us[b])).unwrap_or(0)
}

/// Bytes of keys and values of a layer, in GB, at batch 512.
pub fn kv_gb(model: &Model) -> f64 {
    BATCH as f64 * CONTEXT * model.kv_bytes as f64 * 1e-9
}

/// Speedups of §5.5, of Qwen3 at small batches: batch, TriMoE's and moec's.
pub fn robust(report: &Report) -> Vec<(usize, [f64; 2])> {
    let of = |&batch: &usize| {
        let row = report.speeds.iter().find(|s| s.drawn && s.model == QWEN.name && s.batch == batch);
        (batch, row.map_or([0.0; 2], |r| over_best(&r.us)))
    };
    ROBUST.iter().map(of).collect()
}
