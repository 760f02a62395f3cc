//! Everything that is simulated for the page, once.

use super::activity::{expected, popularity};
use super::decode::{Case, Outcome, Size, mean, percentile};
use super::in_memory::{AllWeightsStep, InMemory, mapped, used};
use super::machine::{oneplus_12, oneplus_ace_2};
use super::models::{BAMBOO, CHANNEL, MIXTRAL, MODELS, Model, QWEN2};
use super::phone::{Cluster, Phone};
use super::planned::{ReadsFrom, planned, planned_on_ufs, searched, searched_on_ufs};
use super::prefill::{Layer, Prompt};
use super::systems::{ABLATION, CPU_ONLY, DIVIDED, LLMFLASH, MATRIX, POWERINFER2, System};
use moec_sim::neurons::NeuronError;

/// §7.2.3: gigabytes in use before any neuron is cached.
pub const TAKEN_GB: f64 = 6.6;
/// Gigabytes of Figure 10.
const MEMORY_GB: [f64; 7] = [7.0, 9.0, 11.0, 13.0, 15.0, 17.0, 19.0];
/// Tokens of prompts (§7.1).
pub const PROMPTS: [usize; 2] = [128, 512];
/// Sequences of Figure 13.
pub const BATCHES: [usize; 4] = [1, 2, 3, 4];
/// Tokens of a prompt and of an answer of LMSYS-Chat-1M on average, as its paper says: Table 8's prompts are
/// drawn from it.
pub const CHAT: (f64, f64) = (69.5, 214.5);
/// Printed statistics of a token's milliseconds (Table 5).
pub const LATENCIES: [&str; 4] = ["mean", "P50", "P90", "P99"];
/// Seed for everything but Figure 11.
const SEED: u64 = 1;

/// A run with its figures.
#[derive(Clone, Debug, PartialEq)]
pub struct SystemRun {
    /// Tokens per second.
    pub speed: f64,
    /// Part of the neurons requested that were read, on average.
    pub misses: f64,
    /// The same of the worst token in 100.
    pub misses_p99: f64,
    /// Part of the time in which all units wait for UFS.
    pub io: f64,
    /// Megabytes of UFS for a token.
    pub megabytes: f64,
    /// Milliseconds, as [`LATENCIES`] says.
    pub latency: [f64; 4],
    /// Part of the neurons that is hot.
    pub hot: f64,
}

impl SystemRun {
    /// Runs a case, with the hot share that the planner chooses from a trace, if the NPU is used.
    fn planned(case: &Case<'_>) -> Result<Self, NeuronError> {
        let planned = || planned_on_ufs(case.phone, case.model, case.held, 1, ReadsFrom::Trace);
        let hot = if case.system.npu { planned()? } else { 0.0 };
        Ok(Self::of(&Case { hot, ..*case }.run()?, hot))
    }

    fn of(out: &Outcome, hot: f64) -> Self {
        let ms = |part| percentile(&out.tokens, part) * 1e3;
        Self {
            speed: out.speed(),
            misses: mean(&out.misses),
            misses_p99: percentile(&out.misses, 0.99),
            io: out.io_share(),
            megabytes: out.bytes * 1e-6,
            latency: [mean(&out.tokens) * 1e3, ms(0.5), ms(0.9), ms(0.99)],
            hot,
        }
    }
}

/// Systems on one phone with one model, weights on UFS.
#[derive(Clone, Debug, PartialEq)]
pub struct Decode {
    /// Phone.
    pub phone: &'static str,
    /// Model.
    pub model: &'static str,
    /// Part of the feed-forward weights in memory.
    pub held: f64,
    /// PowerInfer-2.
    pub powerinfer2: SystemRun,
    /// LLMFlash.
    pub llmflash: SystemRun,
    /// llama.cpp: tokens per second.
    pub llama: f64,
}

/// Prompts, in tokens per second.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Prefill {
    /// Phone.
    pub phone: &'static str,
    /// Model.
    pub model: &'static str,
    /// Tokens.
    pub tokens: usize,
    /// PowerInfer-2, QNN, llama.cpp, LLMFlash.
    pub speeds: [f64; 4],
}

/// Mixtral-47B with so much memory.
#[derive(Clone, Debug, PartialEq)]
pub struct Memory {
    /// Gigabytes.
    pub gigabytes: f64,
    /// Part of the feed-forward weights that fits.
    pub held: f64,
    /// PowerInfer-2.
    pub powerinfer2: SystemRun,
    /// LLMFlash.
    pub llmflash: SystemRun,
    /// llama.cpp: tokens per second.
    pub llama: f64,
}

/// Decoding in memory with so many sequences.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Batch {
    /// Sequences.
    pub sequences: usize,
    /// Hot share that the runtime's planner chooses.
    pub planned: f64,
    /// The same with half of the feed-forward weights on UFS, from a trace.
    pub planned_on_ufs: f64,
    /// Hot share that is best in simulation.
    pub searched: f64,
    /// Tokens per second of all: PowerInfer-2 as planned, as searched, on cores alone, QNN.
    pub speeds: [f64; 4],
}

/// Everything.
#[derive(Clone, Debug)]
pub struct Report {
    /// Figure 7 and Tables 4 to 6.
    pub decode: Vec<Decode>,
    /// Figure 8.
    pub prefill: Vec<Prefill>,
    /// Figure 9: Bamboo-7B, Qwen2-7B, 512 tokens.
    pub layers: [(&'static str, Layer); 2],
    /// Figure 10.
    pub memory: Vec<Memory>,
    /// Figure 11: tokens per second of four draws.
    pub tasks: [f64; 4],
    /// Figure 12, decode: PowerInfer-2, llama.cpp, MLC-LLM, QNN, tokens per second.
    pub in_memory: [f64; 4],
    /// Figure 12, prefill of 512: PowerInfer-2, with half on UFS, llama.cpp, MLC-LLM.
    pub in_memory_prefill: [f64; 4],
    /// Mistral-7B in memory, on cores alone.
    pub mistral_in_memory: f64,
    /// Figure 13.
    pub batches: Vec<Batch>,
    /// Figure 14.
    pub ablation: Vec<(&'static str, SystemRun)>,
    /// By the core that reads, Bamboo-7B.
    pub readers: Vec<(Cluster, SystemRun)>,
    /// With half of Bamboo-7B on UFS: the chooser, hot share, tokens per second.
    pub chosen: Vec<(&'static str, f64, f64)>,
    /// Mixtral-47B with fewer active neurons: billions of activated parameters, and runs at 7 GB, with half
    /// in memory, at 19 GB.
    pub sparser: Vec<(f64, [SystemRun; 3])>,
    /// Table 8: joules per token of PowerInfer-2, QNN and llama.cpp.
    pub energy: [f64; 3],
    /// §7.2.2: neurons that 128 tokens request, TurboSparse-Mixtral-47B.
    pub active_128: f64,
}

impl Report {
    /// Simulates everything.
    ///
    /// # Errors
    /// Our bug: a shape or a table that cannot be.
    pub fn new(size: Size) -> Result<Self, NeuronError> {
        let (first, second) = (oneplus_12()?, oneplus_ace_2()?);
        let bench = Bench { size, phone: &first };
        let mut decode = bench.decode()?;
        decode.extend(Bench { size, phone: &second }.decode()?);
        let mut prefill = bench.prefill()?;
        prefill.extend(Bench { size, phone: &second }.prefill()?);
        let layer = |model| Prompt { phone: &first, model, tokens: 512, held: 0.5 }.layer();
        let batches = bench.batches()?;
        let powerinfer2 = batches[0].speeds[0];
        let whole = |of: AllWeightsStep| 1.0 / of.seconds(&BAMBOO, 1);
        let [npu, cpu, gpu] =
            [AllWeightsStep::npu(&first), AllWeightsStep::cpu(&first), AllWeightsStep::gpu(&first)]
                .map(whole);
        let prompt = Prompt { phone: &first, model: &BAMBOO, tokens: 512, held: 1.0 };
        let half = Prompt { held: 0.5, ..prompt };
        let mlc = first.gpu_macs / used(&BAMBOO);
        let mistral = &MODELS[0];
        let alone = InMemory { phone: &first, model: mistral, npu: false, hot: 0.0, batch: 1 };
        Ok(Self {
            decode,
            prefill,
            layers: [(BAMBOO.name, layer(&BAMBOO)?), (QWEN2.name, layer(&QWEN2)?)],
            memory: bench.memory()?,
            tasks: bench.tasks()?,
            in_memory: [powerinfer2, cpu, gpu, npu],
            in_memory_prefill: [prompt.powerinfer2()?, half.powerinfer2()?, prompt.mapped(), mlc],
            mistral_in_memory: 1.0 / alone.run()?.all,
            batches,
            ablation: bench.ablation()?,
            readers: bench.readers()?,
            chosen: bench.chosen()?,
            sparser: bench.sparser()?,
            energy: bench.energy()?,
            active_128: active(&MIXTRAL, 128),
        })
    }

    /// One row of Figure 7.
    pub fn of(&self, phone: &str, model: &Model) -> Option<&Decode> {
        self.decode.iter().find(|d| d.phone == phone && d.model == model.name)
    }
}

/// Part of a model's neurons that at least one of so many tokens requests, routed evenly.
fn active(model: &Model, tokens: usize) -> f64 {
    let routed = model.k as f64 / model.experts as f64;
    let of: Vec<f64> = popularity(model.active, model.inner).iter().map(|p| p * routed).collect();
    expected(&of, 0..of.len(), tokens).0 / of.len() as f64
}

/// Part of the feed-forward weights that fits into so many bytes (§7.2.3).
pub fn fits(model: &Model, gigabytes: f64) -> f64 {
    ((gigabytes - TAKEN_GB) * 1e9 / (model.feed_forward() * CHANNEL)).clamp(0.0, 1.0)
}

struct Bench<'a> {
    size: Size,
    phone: &'a Phone,
}

impl Bench<'_> {
    fn case<'a>(&'a self, model: &'a Model, system: System, held: f64) -> Case<'a> {
        Case { phone: self.phone, model, system, held, hot: 0.0, size: self.size, seed: SEED }
    }

    /// §7.2.1: half of the feed-forward weights in memory, a quarter where even that is too much.
    fn held(&self, model: &Model) -> f64 {
        if fits(model, self.phone.available * 1e-9) < 0.5 && model.experts > 1 { 0.25 } else { 0.5 }
    }

    fn decode(&self) -> Result<Vec<Decode>, NeuronError> {
        let of = |model: &Model| {
            let held = self.held(model);
            Ok(Decode {
                phone: self.phone.name,
                model: model.name,
                held,
                powerinfer2: SystemRun::planned(&self.case(model, POWERINFER2, held))?,
                llmflash: SystemRun::planned(&self.case(model, LLMFLASH, held))?,
                llama: 1.0 / mapped(self.phone, model, held),
            })
        };
        MODELS.iter().map(of).collect()
    }

    fn prefill(&self) -> Result<Vec<Prefill>, NeuronError> {
        let mut out = Vec::new();
        for model in &MODELS {
            for tokens in PROMPTS {
                let prompt = Prompt { phone: self.phone, model, tokens, held: self.held(model) };
                let speeds = [prompt.powerinfer2()?, prompt.qnn(), prompt.mapped(), prompt.llmflash()?];
                out.push(Prefill { phone: self.phone.name, model: model.name, tokens, speeds });
            }
        }
        Ok(out)
    }

    fn memory(&self) -> Result<Vec<Memory>, NeuronError> {
        let of = |gigabytes: f64| {
            let held = fits(&MIXTRAL, gigabytes);
            let run = |system| SystemRun::planned(&self.case(&MIXTRAL, system, held));
            let (powerinfer2, llmflash) = (run(POWERINFER2)?, run(LLMFLASH)?);
            let llama = 1.0 / mapped(self.phone, &MIXTRAL, held);
            Ok(Memory { gigabytes, held, powerinfer2, llmflash, llama })
        };
        MEMORY_GB.into_iter().map(of).collect()
    }

    fn tasks(&self) -> Result<[f64; 4], NeuronError> {
        let held = fits(&MIXTRAL, self.phone.available * 1e-9);
        let mut out = [0.0; 4];
        for (seed, speed) in (11..).zip(&mut out) {
            *speed = SystemRun::planned(&Case { seed, ..self.case(&MIXTRAL, POWERINFER2, held) })?.speed;
        }
        Ok(out)
    }

    fn batches(&self) -> Result<Vec<Batch>, NeuronError> {
        let of = |sequences: usize| {
            let run = |npu, hot| {
                let step = InMemory { phone: self.phone, model: &BAMBOO, npu, hot, batch: sequences }.run();
                step.map(|t| sequences as f64 / t.all)
            };
            let (planned, _) = planned(self.phone, &BAMBOO, sequences)?;
            let (searched, seconds) = searched(self.phone, &BAMBOO, sequences)?;
            let qnn = AllWeightsStep::npu(self.phone).seconds(&BAMBOO, sequences);
            let all = sequences as f64;
            let speeds = [run(true, planned)?, all / seconds, run(CPU_ONLY.npu, 0.0)?, all / qnn];
            let planned_on_ufs = planned_on_ufs(self.phone, &BAMBOO, 0.5, sequences, ReadsFrom::Trace)?;
            Ok(Batch { sequences, planned, planned_on_ufs, searched, speeds })
        };
        BATCHES.into_iter().map(of).collect()
    }

    fn ablation(&self) -> Result<Vec<(&'static str, SystemRun)>, NeuronError> {
        let all = ABLATION.into_iter().chain([DIVIDED, MATRIX]);
        all.map(|s| Ok((s.name, SystemRun::planned(&self.case(&BAMBOO, s, 0.5))?))).collect()
    }

    fn readers(&self) -> Result<Vec<(Cluster, SystemRun)>, NeuronError> {
        let of = |core| {
            let system = System { reader: Some(core), ..POWERINFER2 };
            Ok((core, SystemRun::planned(&self.case(&BAMBOO, system, 0.5))?))
        };
        [Cluster::Big, Cluster::Mid, Cluster::Little].into_iter().map(of).collect()
    }

    fn sparser(&self) -> Result<Vec<(f64, [SystemRun; 3])>, NeuronError> {
        let of = |part: f64| {
            let model = Model { active: MIXTRAL.active * part, ..MIXTRAL };
            let run = |held| SystemRun::planned(&self.case(&model, POWERINFER2, held));
            let [least, most] = [7.0, 19.0].map(|gb| fits(&model, gb));
            Ok((model.activated() * 1e-9, [run(least)?, run(0.5)?, run(most)?]))
        };
        [1.0, 0.75, 0.5].into_iter().map(of).collect()
    }

    fn chosen(&self) -> Result<Vec<(&'static str, f64, f64)>, NeuronError> {
        let case = self.case(&BAMBOO, POWERINFER2, 0.5);
        let planned = |reads| planned_on_ufs(self.phone, &BAMBOO, case.held, 1, reads);
        let all = [
            ("the planner, with reads of a trace", planned(ReadsFrom::Trace)?),
            ("the planner, without reads", planned(ReadsFrom::Nowhere)?),
            ("best of eight in simulation", searched_on_ufs(&case)?),
        ];
        all.into_iter().map(|(name, hot)| Ok((name, hot, Case { hot, ..case }.run()?.speed()))).collect()
    }

    /// Joules of a prompt and its answer, for each token of the answer.
    fn energy(&self) -> Result<[f64; 3], NeuronError> {
        let (prompt, answer) = CHAT;
        let power = self.phone.power;
        let (hot, _) = planned(self.phone, &BAMBOO, 1)?;
        let step = InMemory { phone: self.phone, model: &BAMBOO, npu: true, hot, batch: 1 }.run()?;
        let decode = step.both * power.both + step.cpu * power.cpu + step.npu * power.npu;
        let prefill =
            Prompt { phone: self.phone, model: &BAMBOO, tokens: prompt.round() as usize, held: 1.0 };
        let npu = prompt / prefill.powerinfer2()? * power.npu / answer;
        let cpu = prompt / prefill.mapped() * power.cpu / answer;
        let whole = |of: AllWeightsStep| of.seconds(&BAMBOO, 1);
        Ok([
            decode + npu,
            whole(AllWeightsStep::npu(self.phone)) * power.npu + npu,
            whole(AllWeightsStep::cpu(self.phone)) * power.cpu + cpu,
        ])
    }
}
