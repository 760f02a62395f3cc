//! Candidates: formats, context and place of the experts, with predictions of size, memory and speed.
//!
//! A prediction is the plan of a build without its weights. Sizes are the plan's. Tokens per second are those of
//! `moec report`: a model, with measured times of matrix kernels where the target is this machine. Experts that memory does
//! not hold are read from disk first; a run hides some of these reads by arithmetic, the model none.

use crate::report::speed::{Machine, expected};
use moec_base::progress::Progress;
use moec_base::{Result, human};
use moec_config::{Config, Facts};
use moec_costs::units::{UnitList, Units};
use moec_device::{Device, NATIVE, UnitKind};
use moec_import::{Checkpoint, ModelSpec};
use moec_ir::Format;
use moec_ir::plan::{Paging, Plan};
use moec_measure::kernel_times::KernelTimes;
use moec_passes::gpu_expert_cache;
use moec_pipeline::{Compilation, Inputs, Stops};
use moec_profile::Profile;
use moec_runtime::platform::cpu;
use moec_runtime::weights;
use serde_json::{Value, json};
use std::path::Path;

/// Formats of experts, of all other matrices, and of the KV cache.
pub(crate) type Formats = (Format, Format, Format);

/// Formats that are tried. Those of more bits come first.
pub(super) const FORMATS: &[Formats] = &[
    (Format::Bf16, Format::Bf16, Format::Bf16),
    (Format::Q8, Format::Q8, Format::Bf16),
    (Format::Q8, Format::Q8, Format::Q8),
    (Format::Q6, Format::Q8, Format::Bf16),
    (Format::Q5, Format::Q8, Format::Bf16),
    (Format::Q4n, Format::Q8, Format::Bf16),
    (Format::Q4n, Format::Q8, Format::Q8),
    (Format::Q4, Format::Q8, Format::Bf16),
    (Format::Q4, Format::Q8, Format::Q8),
    (Format::Q4n, Format::Q4n, Format::Bf16),
    (Format::Q4n, Format::Q4n, Format::Q8),
    (Format::Q4, Format::Q4, Format::Bf16),
    (Format::Q4, Format::Q4, Format::Q8),
    (Format::Q4, Format::Q4, Format::Q5),
    (Format::Q4, Format::Q4, Format::Q4),
    (Format::Q3, Format::Q8, Format::Q8),
    (Format::Q3, Format::Q4n, Format::Q8),
    (Format::Q3, Format::Q4n, Format::Q4),
    (Format::Q2, Format::Q8, Format::Q8),
    (Format::Q2, Format::Q4n, Format::Q8),
    (Format::Q2, Format::Q4n, Format::Q4),
    (Format::Q2s, Format::Q4n, Format::Q8),
    (Format::Q2s, Format::Q4n, Format::Q4),
];

/// Shares of the experts that the memory of a GPU holds, in percent, where a target has one.
const GPU_SHARES: [u8; 3] = [100, 50, 25];

/// Bytes per second of reads from disk where the device file gives no figure: an NVMe SSD with four lanes of PCIe
/// 3.0.
const DISK: f64 = 3.5e9;

/// Key of model.toml with a value in place of its default: section, name, value.
pub(super) type Setting = (&'static str, &'static str, String);

/// Properties that distinguish a candidate.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Choice {
    formats: Formats,
    /// Longest sequence; `None`: the default.
    context: Option<u32>,
    /// Memory limit, if experts may stay on disk.
    budget: Option<u64>,
    /// Share of the experts that the memory of a GPU holds.
    gpu: Option<u8>,
}

/// The choice of formats with the default context; under a budget experts may stay on disk.
pub(super) const fn choice(formats: Formats, budget: Option<u64>) -> Choice {
    Choice { formats, context: None, budget, gpu: None }
}

/// A candidate with its predictions. A measurement replaces them.
#[derive(Clone, Debug)]
pub(crate) struct Candidate {
    pub(super) choice: Choice,
    pub(crate) formats: Formats,
    /// Longest sequence.
    pub(super) context: u32,
    /// Whether experts are read from disk.
    pub(crate) disk: bool,
    /// Bytes of the packed weights.
    pub(crate) size: u64,
    /// Bytes that a run takes at most: weights, activations, states of all its sequences.
    pub(crate) memory: u64,
    /// Tokens per second of decoding one sequence; `None` where a part of a call has no model.
    pub(crate) decode: Option<f64>,
    /// Tokens per second of reading a prompt; `None` likewise.
    pub(super) prefill: Option<f64>,
    /// Increase of the loss in nats per token; `None` where this model's own is not known.
    pub(super) loss: Option<f64>,
    /// Whether it was built, and these figures are measured.
    pub(super) measured: bool,
}

/// A model and the device that it is predicted for.
#[derive(Debug)]
pub(crate) struct Model<'a> {
    pub(crate) checkpoint: &'a Checkpoint,
    pub(crate) spec: &'a ModelSpec,
    pub(crate) facts: &'a Facts,
    /// Path of the checkpoint.
    pub(crate) source: &'a Path,
    pub(crate) device: &'a Device,
    pub(crate) target: &'a str,
    /// The model's profile and its file.
    pub(crate) profile: Option<(&'a Path, &'a Profile)>,
    /// Times of kernels, where the target is this machine.
    pub(crate) times: Option<KernelTimes>,
}

/// Predicts every candidate: contexts as given, experts in memory before experts on disk, formats of more bits
/// first, and of each format the largest share of the experts in a GPU.
///
/// # Errors
/// Fails as the first candidate does, if none can be built for the target.
pub(crate) fn all(
    model: &Model<'_>,
    contexts: &[Option<u32>],
    budgets: &[Option<u64>],
    progress: &Progress,
) -> Result<Vec<Candidate>> {
    let has_gpu = model.device.unit_of(UnitKind::Gpu).is_some();
    let shares = GPU_SHARES.iter().filter(|_| has_gpu).copied().map(Some);
    let shares: Vec<Option<u8>> = shares.chain([None]).collect();
    let stage = if model.times.is_some() { "Timing" } else { "Planning" };
    let bar = progress.items(stage, (contexts.len() * budgets.len() * FORMATS.len()) as u64, "candidates");
    let (mut found, mut refused) = (Vec::new(), None);
    for &context in contexts {
        for &budget in budgets {
            for &formats in FORMATS {
                bar.label(&name(formats));
                for &gpu in shares.iter().filter(|gpu| budget.is_none() || gpu.is_none()) {
                    moec_base::interrupt::check()?;
                    match model.predict(Choice { formats, context, budget, gpu }) {
                        Ok(candidate) => found.push(candidate),
                        Err(e) => {
                            // A budget that is too small for a format may be enough for the next, and a share
                            // that a GPU has no room for too large.
                            let what =
                                gpu.map_or_else(String::new, |percent| format!(", {percent} % on the GPU"));
                            progress.detail("Skipping", &format!("{}{what}: {e}", name(formats)));
                            refused = refused.or(Some(e));
                        }
                    }
                }
                bar.add(1);
            }
        }
    }
    match refused {
        Some(e) if found.is_empty() => Err(e),
        _ => Ok(found),
    }
}

impl Model<'_> {
    /// Plans a candidate.
    ///
    /// # Errors
    /// Fails if the target has no kernels, or a pass fails.
    pub(crate) fn predict(&self, choice: Choice) -> Result<Candidate> {
        let text = moec_config::template(self.source, self.facts, false, &self.settings(choice, None)?);
        let config = Config::parse(&text, Path::new("model.toml"))?;
        gpu_expert_cache::check(&UnitList::of(self.device), &config.placement)?;
        let target = moec_targets::target_of(self.device, self.target)?;
        let target = target.with_activations(config.weights.activations);
        let mut inputs = Inputs::new(&config, self.checkpoint, self.spec, &target);
        inputs.units = Units::of(self.device);
        // As in a build: only some decisions use it.
        let decides =
            inputs.units.is_some() || choice.budget.is_some() || !inputs.list.accelerators.is_empty();
        inputs.profile = self.profile.map(|(_, profile)| profile).filter(|_| decides);
        let mut compilation = Compilation::new(inputs);
        // Kernels are timed with weights from memory.
        let last = target.figures().last_cache.unwrap_or(0);
        let times = self.times.as_ref().filter(|_| self.facts.bundle_bytes(&config.weights) > last);
        compilation.timer = times.map(|times| times.timer(&target));
        compilation.run(Stops::default(), &Progress::new(true, false), &mut |_| {})?;
        let compiled = compilation.finish()?;
        let plan = &compiled.plan;
        let here = (self.device.name == NATIVE).then(cpu::cores);
        let machine = Machine::new(self.device, target.figures(), here, plan);
        let speeds = expected(plan, &compiled.module, &compiled.decisions, &machine);
        let rate = |prompt: bool| {
            let e = speeds.iter().find(|e| e.prompt == prompt)?;
            let reads = plan.paging.as_ref().map(|paging| reads(paging, plan, e.rows, self.device));
            match (e.rate, reads) {
                (Some(rate), _) => Some(rate),
                (None, Some(Some(seconds))) => Some(e.rows as f64 / (e.parts.seconds() + seconds)),
                _ => None,
            }
        };
        let whole = weights::needed(plan, machine.threads);
        Ok(Candidate {
            choice,
            formats: choice.formats,
            context: plan.model.max_context,
            disk: plan.paging.is_some(),
            size: plan.segments.iter().map(|s| s.bytes).sum(),
            memory: plan.paging.as_ref().and_then(Paging::peak).unwrap_or(whole),
            decode: rate(false),
            prefill: rate(true),
            loss: None,
            measured: false,
        })
    }

    /// The keys of a candidate's model.toml. `toml` is the file that they are written to, for relative paths.
    ///
    /// # Errors
    /// Fails if a path cannot be resolved.
    pub(super) fn settings(&self, choice: Choice, toml: Option<&Path>) -> Result<Vec<Setting>> {
        let (experts, rest, kv) = choice.formats;
        let text = |format: Format| format!("\"{format}\"");
        let mut settings = vec![
            ("weights", "experts", text(experts)),
            ("weights", "attention", text(rest)),
            ("weights", "embeddings", text(rest)),
        ];
        if kv != Format::Bf16 {
            settings.push(("memory", "kv_cache", text(kv)));
        }
        settings.extend(choice.context.map(|n| ("shapes", "max_context", n.to_string())));
        settings.extend(choice.budget.map(|n| ("memory", "budget", format!("\"{} MiB\"", n >> 20))));
        if let Some(percent) = choice.gpu {
            settings.push(("placement", "experts", format!("\"{}:{percent}%\"", UnitKind::Gpu.name())));
            settings.push(("placement", "policy", format!("\"{}\"", moec_config::POLICY.name)));
        }
        if let Some((path, _)) = self.profile {
            let path = match toml {
                Some(toml) => crate::init::relative_path(toml, path)?,
                None => path.to_owned(),
            };
            settings.push(("calibrate", "profile", super::quoted(&path)));
        }
        Ok(settings)
    }
}

impl Candidate {
    /// Description.
    pub(super) fn name(&self) -> String {
        let gpu =
            self.choice.gpu.map_or_else(String::new, |n| format!(", {n} % of the experts on the GPU, too"));
        let disk = if self.disk { ", experts on disk" } else { "" };
        format!("{}{gpu}{disk}", name(self.formats))
    }

    /// Places of the experts.
    pub(super) fn kept(&self) -> String {
        match self.choice.gpu {
            Some(percent) => format!("memory, {percent} % on the GPU"),
            None if self.disk => "memory and disk".to_owned(),
            None => "memory".to_owned(),
        }
    }

    /// The same choice with another context.
    pub(super) fn shorter(&self, context: u32) -> Choice {
        Choice { context: Some(context), ..self.choice }
    }

    /// The candidate as JSON.
    pub(super) fn json(&self) -> Value {
        let (experts, rest, kv) = self.formats;
        json!({
            "experts": experts.to_string(),
            "rest": rest.to_string(),
            "kv_cache": kv.to_string(),
            "context": self.context,
            "disk": self.disk,
            "gpu_experts_percent": self.choice.gpu,
            "size_bytes": self.size,
            "memory_bytes": self.memory,
            "decode_tokens_per_s": self.decode,
            "prefill_tokens_per_s": self.prefill,
            "loss_share": self.loss.map(f64::exp_m1),
            "measured": self.measured,
        })
    }
}

/// Seconds in which a call of so many rows reads experts from disk; `None` where neurons are read one by one. Of the
/// experts that the rows choose, the share is in memory that the frames hold: of the recorded uses, if there are
/// any, the most used experts stay, else every expert is as likely.
fn reads(paging: &Paging, plan: &Plan, rows: usize, device: &Device) -> Option<f64> {
    if paging.by_neurons() {
        return None;
    }
    let all = paging.layers.iter().map(|l| l.experts as usize).sum::<usize>().max(1);
    let frames = paging.frames as usize;
    let mut uses = paging.uses.clone();
    uses.sort_unstable_by(|a, b| b.cmp(a));
    let sum = |uses: &[u32]| uses.iter().map(|&n| f64::from(n)).sum::<f64>();
    let held = match sum(&uses) {
        used if used > 0.0 => sum(uses.get(..frames).unwrap_or(&uses)) / used,
        _ => frames.min(all) as f64 / all as f64,
    };
    // Of each layer, the experts that a call of so many rows chooses.
    let chosen = |table: &moec_ir::placement::ExpertTable| {
        let (experts, k) = (table.experts.len().max(1) as f64, f64::from(table.k));
        experts * (1.0 - (1.0 - (k / experts).min(1.0)).powf(rows as f64))
    };
    let chosen: f64 = plan.placement.experts.iter().map(chosen).sum();
    let disk = device.memories.iter().find(|m| m.name == "disk").and_then(|m| m.bandwidth.last());
    let rate = disk.map(|b| b.rate() * 1e9).filter(|rate| *rate > 0.0).unwrap_or(DISK);
    Some(chosen * (1.0 - held) * paging.frame_bytes as f64 / rate)
}

/// Description of formats.
pub(super) fn name((experts, rest, kv): Formats) -> String {
    format!("experts in {experts}, other weights in {rest}, KV cache in {kv}")
}

/// Tokens per second as text; `-` where nothing is predicted.
pub(super) fn rate(rate: Option<f64>) -> String {
    rate.map_or_else(|| "-".to_owned(), |rate| format!("{rate:.1}"))
}

/// Figures of a candidate in a table: size, memory, decode and prefill rates.
pub(super) fn figures(c: &Candidate) -> [String; 4] {
    [human::bytes(c.size), human::bytes(c.memory), rate(c.decode), rate(c.prefill)]
}
