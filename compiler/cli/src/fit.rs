//! `moec fit`: formats of weights and of the KV cache with which a model fits a machine.
//!
//! Each candidate goes through the pipeline, but no weights are read. Its plan gives the sizes on disk and in
//! memory. Tokens per second are those of `moec report`: a model of the CPU, not a measurement.

use super::report::speed::{Machine, expected};
use super::{facts, init, output};
use moec_base::progress::Progress;
use moec_base::{Error, Result, human};
use moec_config::Config;
use moec_costs::units::Units;
use moec_device::{Device, NATIVE};
use moec_import::{Checkpoint, ImportOptions, ModelSpec};
use moec_ir::Format;
use moec_ir::plan::Paging;
use moec_pipeline::{Compilation, Inputs, Stops};
use moec_runtime::platform::{available, cpu};
use moec_runtime::weights;
use serde_json::{Value, json};
use std::path::PathBuf;

/// Write a model.toml whose bundle fits a machine's memory
///
/// Predicts size, memory and speed for several formats of weights and KV cache, from the model's shapes
/// alone. Chooses the first that fits, in the order of the table: formats with more bits come first. The loss
/// of quality is not predicted: `moec eval` measures it on a text.
#[derive(Clone, Debug, clap::Args)]
pub struct Args {
    /// Folder of a Hugging Face checkpoint, a GGUF file, or the name of a model on the hub, as in `moec init`
    #[arg(value_name = "HF_DIR|NAME")]
    pub source: PathBuf,
    /// Name of a target (`moec targets` lists them), or path of a device file
    #[arg(long, short, value_name = "TARGET", default_value = "native")]
    pub target: String,
    /// Memory limit of a run, such as `16GiB` [default: the free memory of this machine, less 512 MiB]
    #[arg(long, value_name = "SIZE", value_parser = size)]
    pub memory: Option<u64>,
    /// Also try to keep experts on disk that do not fit into memory; sets `budget` under `[memory]`
    #[arg(long)]
    pub disk: bool,
    /// Required decode rate in tokens per second, as predicted
    #[arg(long, value_name = "RATE")]
    pub tokens_per_s: Option<f64>,
    /// Longest sequence in tokens [default: as in `moec init`]
    #[arg(long, value_name = "TOKENS", value_parser = clap::value_parser!(u32).range(1..=1 << 20))]
    pub context: Option<u32>,
    /// Use only the local Hugging Face cache (`HF_HOME`); make no network requests
    #[arg(long)]
    pub offline: bool,
    /// File to write
    #[arg(long, short, value_name = "FILE", default_value = "model.toml")]
    pub output: PathBuf,
    /// Replace an existing file
    #[arg(long, short)]
    pub force: bool,
    /// Print one JSON object to stdout
    #[arg(long)]
    pub json: bool,
}

/// Formats that are tried: of experts, of all other matrices, and of the KV cache. Those of more bits come first.
const CANDIDATES: &[(Format, Format, Format)] = &[
    (Format::Bf16, Format::Bf16, Format::Bf16),
    (Format::Q8, Format::Q8, Format::Bf16),
    (Format::Q8, Format::Q8, Format::Q8),
    (Format::Q6, Format::Q8, Format::Bf16),
    (Format::Q5, Format::Q8, Format::Bf16),
    (Format::Q4, Format::Q8, Format::Bf16),
    (Format::Q4, Format::Q8, Format::Q8),
    (Format::Q4, Format::Q4, Format::Bf16),
    (Format::Q4, Format::Q4, Format::Q8),
    (Format::Q3, Format::Q8, Format::Q8),
    (Format::Q3, Format::Q4, Format::Q8),
    (Format::Q2, Format::Q8, Format::Q8),
    (Format::Q2, Format::Q4, Format::Q8),
];

/// Key of model.toml with a value in place of its default: section, name, value.
type Setting = (&'static str, &'static str, String);

/// A candidate with its predictions.
struct Candidate {
    /// Formats of experts, of all other matrices, and of the KV cache.
    formats: (Format, Format, Format),
    /// Keys of its model.toml.
    settings: Vec<Setting>,
    /// Whether experts are read from disk.
    disk: bool,
    /// Bytes of the packed weights.
    size: u64,
    /// Bytes that a run takes at most: weights, activations, states of all its sequences.
    memory: u64,
    /// Tokens per second of decoding one sequence; `None` where a part of a call has no model.
    decode: Option<f64>,
    /// Tokens per second of reading a prompt; `None` likewise.
    prefill: Option<f64>,
}

/// Limits that a candidate must keep.
struct Limits {
    memory: u64,
    rate: f64,
}

/// Predicts all candidates, prints them, and writes the `model.toml` of the chosen one.
///
/// # Errors
/// Fails if the checkpoint is not supported, the target has no kernels, or no candidate fits.
pub fn run(args: &Args, progress: &Progress) -> Result<()> {
    let source = init::source(&args.source, args.offline, progress)?;
    let device = moec_targets::device(&args.target)?;
    let (checkpoint, spec) = moec_import::open(&source, &ImportOptions::default())?;
    let facts = facts::of(&spec, &|leaf| checkpoint.format(leaf));
    let relative = init::relative_path(&args.output, &source)?;
    let limits = Limits { memory: memory(args)?, rate: args.tokens_per_s.unwrap_or(0.0) };

    let model = Model { checkpoint: &checkpoint, spec: &spec, device: &device, target: &args.target };
    let mut candidates = Vec::new();
    let budgets = if args.disk { 2 } else { 1 };
    let bar = progress.items("Planning", (budgets * CANDIDATES.len()) as u64, "candidates");
    for budget in [None, Some(limits.memory)].into_iter().take(budgets) {
        for &formats in CANDIDATES {
            let settings = settings(formats, args.context, budget);
            let text = moec_config::template(&source, &facts, false, &settings);
            let config = Config::parse(&text, &args.output)?;
            bar.label(&name(formats));
            // A budget that is too small for a format may be enough for the next.
            match model.predict(&config, formats, settings) {
                Err(e) if budget.is_some() => progress.detail("Skipping", &format!("{}: {e}", name(formats))),
                predicted => candidates.push(predicted?),
            }
            bar.add(1);
        }
    }
    drop(bar);
    let fits = |c: &&Candidate| c.memory <= limits.memory && c.decode.unwrap_or(f64::INFINITY) >= limits.rate;
    let chosen = candidates.iter().find(fits);
    if args.json {
        output::json(&json(&candidates, chosen, &limits, args))?;
    } else {
        output::data(&table(&candidates, chosen))?;
    }
    let Some(chosen) = chosen else { return Err(nothing(&candidates, &limits, args.disk)) };
    let text = moec_config::template(&relative, &facts, false, &chosen.settings);
    init::write(&args.output, &text, args.force)?;
    let shown = args.output.display();
    progress.stage("Created", &format!("`{shown}` with {}", name(chosen.formats)));
    progress.stage("Next", &format!("moec build {shown} --target {}", args.target));
    Ok(())
}

/// A model and the device that it is predicted for.
struct Model<'a> {
    checkpoint: &'a Checkpoint,
    spec: &'a ModelSpec,
    device: &'a Device,
    target: &'a str,
}

impl Model<'_> {
    /// Plans a candidate.
    ///
    /// # Errors
    /// Fails if the target has no kernels, or a pass fails.
    fn predict(
        &self,
        config: &Config,
        formats: (Format, Format, Format),
        settings: Vec<Setting>,
    ) -> Result<Candidate> {
        let target = moec_targets::target_of(self.device, self.target)?;
        let target = target.with_activations(config.weights.activations);
        let mut inputs = Inputs::new(config, self.checkpoint, self.spec, &target);
        inputs.units = Units::of(self.device);
        let mut compilation = Compilation::new(inputs);
        compilation.run(Stops::default(), &Progress::new(true, false), &mut |_| {})?;
        let compiled = compilation.finish()?;
        let here = (self.device.name == NATIVE).then(cpu::cores);
        let machine = Machine::new(self.device, target.figures(), here, &compiled.plan);
        let speeds = expected(&compiled.plan, &compiled.module, &compiled.decisions, &machine);
        let rate = |prompt: bool| speeds.iter().find(|e| e.prompt == prompt).and_then(|e| e.rate);
        let whole = weights::needed(&compiled.plan, machine.threads);
        Ok(Candidate {
            formats,
            settings,
            disk: compiled.plan.paging.is_some(),
            size: compiled.plan.segments.iter().map(|s| s.bytes).sum(),
            memory: compiled.plan.paging.as_ref().and_then(Paging::peak).unwrap_or(whole),
            decode: rate(false),
            prefill: rate(true),
        })
    }
}

/// The keys of a candidate's model.toml.
fn settings(formats: (Format, Format, Format), context: Option<u32>, budget: Option<u64>) -> Vec<Setting> {
    let (experts, rest, kv) = formats;
    let text = |format: Format| format!("\"{format}\"");
    let mut settings = vec![
        ("weights", "experts", text(experts)),
        ("weights", "attention", text(rest)),
        ("weights", "embeddings", text(rest)),
    ];
    if kv != Format::Bf16 {
        settings.push(("memory", "kv_cache", text(kv)));
    }
    settings.extend(context.map(|n| ("shapes", "max_context", n.to_string())));
    settings.extend(budget.map(|n| ("memory", "budget", format!("\"{} MiB\"", n >> 20))));
    settings
}

/// Description of formats, for people.
fn name((experts, rest, kv): (Format, Format, Format)) -> String {
    format!("experts in {experts}, other weights in {rest}, KV cache in {kv}")
}

/// Memory that a run may take.
///
/// # Errors
/// Fails if no limit is given and the operating system does not report the free memory.
fn memory(args: &Args) -> Result<u64> {
    let free = || available::available().map(|free| free.saturating_sub(weights::RESERVE));
    args.memory.or_else(free).ok_or_else(|| {
        Error::environment("the operating system does not report how much memory is free")
            .hint("set the limit, as in `--memory 16GiB`")
    })
}

fn size(text: &str) -> std::result::Result<u64, String> {
    human::parse_bytes(text).filter(|n| *n > 0).ok_or_else(|| "expected a size such as `16GiB`".to_owned())
}

/// Tokens per second for people; `-` where there is no prediction.
fn rate(rate: Option<f64>) -> String {
    rate.map_or_else(|| "-".to_owned(), |rate| format!("{rate:.1}"))
}

fn table(candidates: &[Candidate], chosen: Option<&Candidate>) -> String {
    let head =
        ["", "experts", "rest", "KV", "kept in", "size", "memory", "decode tokens/s", "prefill tokens/s"];
    let mut rows = vec![head.map(str::to_owned).to_vec()];
    rows.extend(candidates.iter().map(|c| {
        let (experts, rest, kv) = c.formats;
        vec![
            if chosen.is_some_and(|chosen| std::ptr::eq(chosen, c)) { "*" } else { "" }.to_owned(),
            experts.to_string(),
            rest.to_string(),
            kv.to_string(),
            if c.disk { "memory and disk" } else { "memory" }.to_owned(),
            human::bytes(c.size),
            human::bytes(c.memory),
            rate(c.decode),
            rate(c.prefill),
        ]
    }));
    output::table(&rows)
}

fn json(candidates: &[Candidate], chosen: Option<&Candidate>, limits: &Limits, args: &Args) -> Value {
    let of = |c: &Candidate| {
        let (experts, rest, kv) = c.formats;
        json!({
            "experts": experts.to_string(),
            "rest": rest.to_string(),
            "kv_cache": kv.to_string(),
            "disk": c.disk,
            "size_bytes": c.size,
            "memory_bytes": c.memory,
            "decode_tokens_per_s": c.decode,
            "prefill_tokens_per_s": c.prefill,
        })
    };
    json!({
        "memory_bytes": limits.memory,
        "candidates": candidates.iter().map(of).collect::<Vec<_>>(),
        "chosen": chosen.map(of),
        "model_toml": chosen.map(|_| &args.output),
    })
}

/// Error if no candidate fits, with the amount that the nearest one lacks.
fn nothing(candidates: &[Candidate], limits: &Limits, disk: bool) -> Error {
    let least = candidates.iter().map(|c| c.memory).min().unwrap_or(0);
    if least > limits.memory || candidates.is_empty() {
        let hint = if disk {
            "reduce `--context`"
        } else {
            "add `--disk` to keep experts on disk, or reduce `--context`"
        };
        let what = format!(
            "no format fits into {}: at least {} more memory is required",
            human::bytes(limits.memory),
            human::bytes(least.saturating_sub(limits.memory))
        );
        return Error::limit(what).hint(hint);
    }
    let fastest =
        candidates.iter().filter(|c| c.memory <= limits.memory).filter_map(|c| c.decode).fold(0.0, f64::max);
    Error::limit(format!(
        "no format that fits decodes {} tokens per second: at most {fastest:.1} are predicted",
        limits.rate
    ))
    .hint("reduce `--tokens-per-s`, or choose a target with more memory bandwidth")
}
