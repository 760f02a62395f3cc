//! `model.toml`: the options of a build.
//!
//! Every key is a row of [`KEYS`]: its default, its range, what it does and how it is read. Messages, the
//! file that `moec init` writes and the reference page come from those rows.

mod keys;
mod page;
mod read;
mod template;
#[cfg(test)]
mod tests;
mod value;

pub use keys::{KEYS, Key};
pub use page::markdown;
pub use template::sizes;
pub use template::{Facts, template};

use moec_base::{Error, Result};
pub use moec_cpu::Activations;
pub use moec_ir::placement::Overflow;
use moec_ir::plan::Refine;
use moec_ir::{Format, WeightClass};
use moec_runtime::platform::regular;
use moec_runtime::schedule::System;
use moec_sim::cache::Pin;
use serde::{Deserialize, Serialize};
use std::path::{Path, PathBuf};

/// System that divides experts where `placement.policy` is not given, and a unit with cache frames holds some.
pub const POLICY: &System = &moec_sim::systems::MOEC;

/// Longest sequence where `shapes.max_context` is not given and the model's own limit is not shorter.
pub const DEFAULT_MAX_CONTEXT: usize = 4096;

/// A `model.toml`, checked.
#[derive(Clone, Debug, PartialEq)]
pub struct Config {
    /// The file itself, as it was named.
    pub path: PathBuf,
    /// `[model]`.
    pub model: Model,
    /// `[shapes]`.
    pub shapes: ShapesKeys,
    /// `[weights]`.
    pub weights: Weights,
    /// `[memory]`.
    pub memory: Memory,
    /// `[calibrate]`.
    pub calibrate: Calibrate,
    /// `[experts]`.
    pub experts: ExpertsConfig,
    /// `[decode]`.
    pub decode: Decoding,
    /// `[placement]`: units of attention, experts and the rest.
    pub placement: PlacementConfig,
    /// `[placement]`: what requests are made of.
    pub mix: Mix,
    /// `[quality]`.
    pub quality: Quality,
}

/// `[model]`: the checkpoint.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Model {
    /// Folder of the checkpoint; what the file says, seen from the file's own folder.
    pub source: PathBuf,
    /// Whether weights may hold infinities and NaNs.
    pub allow_nonfinite: bool,
}

/// `[shapes]`: the static shapes, as written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ShapesKeys {
    /// Longest sequence in tokens; `None`: the smaller of [`DEFAULT_MAX_CONTEXT`] and the model's limit.
    pub max_context: Option<usize>,
    /// Tokens per prefill step.
    pub prefill_chunk: usize,
    /// Sequences per decode step, ascending.
    pub decode_batch: Vec<usize>,
}

/// The static shapes of a build. See [`Config::shapes_for`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Shapes {
    /// Longest sequence in tokens.
    pub max_context: usize,
    /// Tokens per prefill step, at most `max_context`.
    pub prefill_chunk: usize,
    /// Sequences per decode step, ascending.
    pub decode_batch: Vec<usize>,
}

/// `[weights]`: storage formats by class.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Weights {
    /// Matrices of routed experts.
    pub experts: Format,
    /// Matrices of attention, of dense and of shared feed-forward networks.
    pub attention: Format,
    /// Embedding table and language-model head.
    pub embeddings: Format,
    /// Arithmetic of activations.
    pub activations: Activations,
    /// Rounding of numbers.
    pub rounding: Rounding,
    /// Bytes of all weights, for which single ones get smaller formats than those of their classes.
    pub size: Size,
}

/// A size of weights.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Size {
    /// As the formats require.
    #[default]
    Any,
    /// The smallest that `max_perplexity_increase` allows.
    Auto,
    /// At most that many bytes.
    Most(u64),
}

/// Rounding of weights to groups of codes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Rounding {
    /// Each number to the nearest code.
    #[default]
    Nearest,
    /// In order, each number after the errors of those before it were made up for.
    Feedback,
}

impl Rounding {
    /// Every one, in the order that messages list them.
    pub const ALL: [Self; 2] = [Self::Feedback, Self::Nearest];

    /// Name in `model.toml`.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Nearest => "nearest",
            Self::Feedback => "feedback",
        }
    }

    /// The one of that name.
    pub fn parse(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|r| r.name() == name)
    }
}

/// `[calibrate]`: what calibration reads, and the profile that a build takes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Calibrate {
    /// Texts; what the file says, seen from the file's own folder.
    pub text: Vec<PathBuf>,
    /// The profile.
    pub profile: Option<PathBuf>,
    /// Most tokens to read, over all texts.
    pub tokens: usize,
}

/// `[experts]`: static shapes of experts, for targets whose graphs are static.
#[derive(Clone, Debug, PartialEq)]
pub struct ExpertsConfig {
    /// Most capacity tiers of a layer.
    pub tiers: usize,
    /// Experts per graph; `None`: what costs least.
    pub group: Option<usize>,
    /// Most numbers of rows that a graph has functions for.
    pub sizes: usize,
    /// Treatment of tokens past a capacity; `None`: by [`Config::overflow`].
    pub overflow: Option<Overflow>,
    /// Share of the calibration's chunks whose load an expert's capacity covers.
    pub coverage: f64,
    /// Whether experts are computed neuron by neuron, and those that a gate makes 0 are skipped.
    pub skip: Skip,
    /// Whether few rows query a predictor before they query gates.
    pub predict: Predict,
    /// Share of the active neurons that a predictor is to find.
    pub recall: f64,
    /// Threshold of neurons after SiLU that count as 0.
    pub threshold: Threshold,
}

/// Predictor of active neurons, before gates are read (PowerInfer-2, §2.2).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Predict {
    /// Gates alone: no result changes.
    Off,
    /// The one that reads least, where quality allows it.
    Auto,
    /// Matrices of low rank.
    LowRank,
    /// Gates in four bits.
    Coarse,
}

impl Predict {
    /// Every one.
    pub const ALL: [Self; 4] = [Self::Off, Self::Auto, Self::LowRank, Self::Coarse];

    /// Name in `model.toml`.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Off => "off",
            Self::Auto => "auto",
            Self::LowRank => "low-rank",
            Self::Coarse => "coarse",
        }
    }

    /// The one of that name in `model.toml`.
    pub fn parse(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|p| p.name() == name)
    }

    /// Whether it is requested by name.
    pub const fn is_requested(self) -> bool {
        matches!(self, Self::LowRank | Self::Coarse)
    }
}

/// Neurons of experts with SiLU that count as 0: those whose gate has a magnitude below a threshold, a layer's own (CATS, arXiv
/// 2404.08763).
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Threshold {
    /// None: the model is what it is.
    Off,
    /// This share of them, in `0..=0.95`.
    Share(f64),
    /// As many as `max_perplexity_increase` allows.
    Auto,
}

impl Threshold {
    /// Largest share: past it a model is no longer one.
    pub const MOST: f64 = 0.95;

    /// Parses the value in `model.toml`: `off`, `auto` or a share such as `50%`.
    pub fn parse(text: &str) -> Option<Self> {
        match text {
            "off" => Some(Self::Off),
            "auto" => Some(Self::Auto),
            _ => {
                let percent: f64 = text.strip_suffix('%')?.trim().parse().ok()?;
                Some(percent / 100.0).filter(|s| (0.0..=Self::MOST).contains(s)).map(Self::Share)
            }
        }
    }
}

/// Whether neurons that are 0 are skipped (PowerInfer-2, §4.1.2).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Skip {
    /// As the profile says, where it has seen enough of them.
    Auto,
    /// Wherever that changes no result.
    On,
    /// Never.
    Off,
}

impl Skip {
    /// The one of that name in `model.toml`.
    pub fn parse(name: &str) -> Option<Self> {
        match name {
            "auto" => Some(Self::Auto),
            "on" => Some(Self::On),
            "off" => Some(Self::Off),
            _ => None,
        }
    }
}

impl ExpertsConfig {
    /// Default where `model.toml` is silent.
    pub const DEFAULT: Self = Self {
        tiers: 6,
        group: None,
        sizes: 4,
        overflow: None,
        coverage: 0.99,
        skip: Skip::Auto,
        predict: Predict::Off,
        recall: 0.99,
        threshold: Threshold::Off,
    };
}

/// `[decode]`: how tokens are decoded.
#[derive(Clone, Debug, PartialEq)]
pub struct Decoding {
    /// Whether little entry points are compiled beside those of `decode` (MoBiLE, §III).
    pub big_little: bool,
    /// γ: a token of the little entry point is kept if its largest probability exceeds it.
    pub gamma: f64,
    /// Experts per token of the little entry points; `None`: half of the model's, rounded up.
    pub little: Option<usize>,
}

impl Decoding {
    /// Default where `model.toml` is silent.
    pub const DEFAULT: Self = Self { big_little: false, gamma: 0.7, little: None };
}

/// `[placement]`: which unit runs what more than one can run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PlacementConfig {
    /// Attention and dense feed-forward networks.
    pub attention: UnitSetting,
    /// Mixers of tokens that are no attention.
    pub mixer: UnitSetting,
    /// Experts.
    pub experts: UnitSetting,
    /// Everything else.
    pub rest: UnitSetting,
    /// Unit of experts' hot neurons, beside the CPU.
    pub hot: UnitSetting,
    /// Policy that divides experts between the CPU and a unit with cache frames; `None`: their units are fixed.
    pub policy: Option<&'static System>,
    /// Experts of a layer that the memory of a hot unit holds; `None`: as many as it has room for.
    pub cached: Option<u32>,
    /// Refinement of the assignment of experts to units in every step.
    pub refine: Refine,
    /// Whether experts change their places between steps.
    pub moves: bool,
}

impl PlacementConfig {
    /// Defaults where `model.toml` is silent.
    pub fn defaults() -> Self {
        Self {
            attention: UnitSetting::Auto,
            mixer: UnitSetting::Auto,
            experts: UnitSetting::Auto,
            rest: UnitSetting::Auto,
            hot: UnitSetting::Unit("cpu".to_owned()),
            policy: None,
            cached: None,
            refine: Refine::Full,
            moves: true,
        }
    }
}

/// Typical request, by which `placement.attention = "auto"` is decided.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mix {
    /// Tokens of the prompt.
    pub prompt: u32,
    /// Tokens of the answer.
    pub generate: u32,
}

impl Mix {
    /// Long prompts with short answers, for which there are such units: the long prompt of NPUMoE's evaluation, and the mean
    /// answer of its workloads (§5.1).
    pub const DEFAULT: Self = Self { prompt: 4096, generate: 8 };
}

/// A unit to run on.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub enum UnitSetting {
    /// By the device's tables.
    #[default]
    Auto,
    /// The unit of that name, or the first of that kind, where it is legal.
    Unit(String),
    /// There a share of the experts of each layer, in percent, the most popular of those that calibration saw; the others on the
    /// CPU.
    Share(String, u8),
}

impl UnitSetting {
    /// As it stands in `model.toml`: `auto`, a unit's name, or a name with a share (`gpu:50%`).
    pub fn parse(text: &str) -> Option<Self> {
        let word = |s: &str| {
            let fits = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.');
            (!s.is_empty() && s.chars().all(fits)).then(|| s.to_owned())
        };
        match text.split_once(':') {
            None if text == "auto" => Some(Self::Auto),
            None => word(text).map(Self::Unit),
            Some((name, share)) => {
                let percent = share.strip_suffix('%')?.parse().ok().filter(|p| (1..=100).contains(p))?;
                word(name).map(|name| Self::Share(name, percent))
            }
        }
    }

    /// The unit that it names.
    pub fn unit(&self) -> Option<&str> {
        match self {
            Self::Auto => None,
            Self::Unit(name) | Self::Share(name, _) => Some(name),
        }
    }
}

/// `[quality]`: the loss that the user accepts.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Quality {
    /// Most by which perplexity may rise, as a share (0.01 for 1 %); `None`: `experts.coverage` decides.
    pub max_perplexity_increase: Option<f64>,
    /// Texts that the loss is measured on; empty: those of `[calibrate]`.
    pub text: Vec<PathBuf>,
}

/// `[memory]`: what a bundle holds while it runs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Memory {
    /// Storage of the KV cache.
    pub kv_cache: KvCache,
    /// Bytes that a run may take; experts that do not fit stay on disk. `None`: none leaves memory.
    pub budget: Option<u64>,
    /// Bytes that a run may take of the memory whose frames experts are brought into; `None`: its capacity.
    pub device_budget: Option<u64>,
    /// Policy of the cache of experts, with its parameters; `None`: the one that reads least in the profile.
    pub policy: Option<String>,
    /// Share of the cache for experts that never go.
    pub pin: Pin,
    /// Layers ahead whose experts are read before they are requested.
    pub prefetch: usize,
    /// Threads that the budget is for; `None`: as many as this machine has cores.
    pub threads: Option<usize>,
}

impl Default for Memory {
    fn default() -> Self {
        let (policy, pin) = (None, Pin::Auto);
        Self {
            kv_cache: KvCache::Auto,
            budget: None,
            device_budget: None,
            policy,
            pin,
            prefetch: 1,
            threads: None,
        }
    }
}

/// Storage of the KV cache.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum KvCache {
    /// bf16; f32 where activations or the attention's weights are f32.
    #[default]
    Auto,
    /// The upper half of f32.
    Bf16,
    /// Exact.
    F32,
    /// 8 bits in groups of 32, each with a scale of its own.
    Q8,
}

impl KvCache {
    /// Every one, in the order that messages list them.
    pub const ALL: [Self; 4] = [Self::Auto, Self::Bf16, Self::F32, Self::Q8];

    /// Name in `model.toml`.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Auto => "auto",
            Self::Bf16 => "bf16",
            Self::F32 => "f32",
            Self::Q8 => "q8",
        }
    }

    /// The one of that name.
    pub fn parse(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|k| k.name() == name)
    }

    /// The one that stores numbers so, whatever else is configured.
    pub const fn of(format: Format) -> Self {
        match format {
            Format::Bf16 | Format::F16 => Self::Bf16,
            Format::F32 => Self::F32,
            _ => Self::Q8,
        }
    }
}

impl Weights {
    /// Storage format of a class.
    pub fn format(&self, class: WeightClass) -> Format {
        match class {
            WeightClass::Experts => self.experts,
            WeightClass::Attention => self.attention,
            WeightClass::Embeddings => self.embeddings,
            WeightClass::Exact => Format::F32,
        }
    }
}

impl Config {
    /// Storage format of the KV cache.
    pub fn kv_format(&self) -> Format {
        let exact = self.weights.activations == Activations::F32 || self.weights.attention == Format::F32;
        match self.memory.kv_cache {
            KvCache::Auto if exact => Format::F32,
            KvCache::Auto | KvCache::Bf16 => Format::Bf16,
            KvCache::F32 => Format::F32,
            KvCache::Q8 => Format::Q8,
        }
    }

    /// Configuration of an empty file at that path.
    pub fn defaults(path: &Path) -> Self {
        Self {
            path: path.into(),
            model: Model { source: folder(path).into(), allow_nonfinite: false },
            shapes: ShapesKeys { max_context: None, prefill_chunk: 256, decode_batch: vec![1] },
            weights: Weights {
                experts: Format::Bf16,
                attention: Format::Bf16,
                embeddings: Format::Bf16,
                activations: Activations::Auto,
                rounding: Rounding::Feedback,
                size: Size::Any,
            },
            memory: Memory::default(),
            calibrate: Calibrate { text: Vec::new(), profile: None, tokens: 65_536 },
            experts: ExpertsConfig::DEFAULT,
            decode: Decoding::DEFAULT,
            placement: PlacementConfig::defaults(),
            mix: Mix::DEFAULT,
            quality: Quality::default(),
        }
    }

    /// Reads and checks a file, and that the checkpoint's folder is there.
    ///
    /// # Errors
    /// The file cannot be read or is wrong; the message names file, line and key.
    pub fn load(path: &Path) -> Result<Self> {
        let shown = path.display();
        if path.is_dir() {
            return Err(Error::input(format!("`{shown}` is a folder, expected a `model.toml`"))
                .hint(format!("`moec init {shown}` writes one for a checkpoint")));
        }
        let text = regular::read_text(path, regular::SETTINGS).map_err(|e| {
            let error = Error::input(format!("`{shown}` cannot be read")).because(&e);
            if e.kind() == std::io::ErrorKind::NotFound {
                return error.hint("`moec init HF_DIR` writes a `model.toml` for a checkpoint");
            }
            match regular::refused(&e) {
                Some(why) => error.hint(why.hint()),
                None => error,
            }
        })?;
        let (config, at) = read::read(&text, path)?;
        if !config.model.source.exists() {
            return Err(Error::input(format!(
                "`{shown}:{at}`: `model.source`: there is no `{}`",
                config.model.source.display()
            ))
            .hint("`source` is the folder that holds the checkpoint's `config.json`, or a GGUF file, relative to this file"));
        }
        Ok(config)
    }

    /// Reads and checks a text; `path` is its file, which need not exist.
    ///
    /// # Errors
    /// The text is wrong; the message names file, line and key.
    pub fn parse(text: &str, path: &Path) -> Result<Self> {
        read::read(text, path).map(|(config, _)| config)
    }

    /// Experts per token of little entry points, of a model that takes `experts` per token; `None` where none are requested.
    ///
    /// # Errors
    /// A model without a mixture of experts or with one expert per token, and a `decode.little` that is not fewer.
    pub fn little(&self, experts: Option<usize>) -> Result<Option<usize>> {
        if !self.decode.big_little {
            return Ok(None);
        }
        let wrong =
            |key, what: String| Error::input(format!("`{}`: {what}", read::place(&self.path, "decode", key)));
        let off = "set `big_little = false` under `[decode]`";
        let Some(k) = experts else {
            return Err(wrong(
                "big_little",
                "`decode.big_little` is true, but the model has no experts to leave out".into(),
            )
            .hint(off));
        };
        if k < 2 {
            return Err(wrong(
                "big_little",
                "`decode.big_little` is true, but the model takes one expert per token: there is nothing less".into(),
            )
            .hint(off));
        }
        match self.decode.little {
            None => Ok(Some(k.div_ceil(2))),
            Some(little) if little < k => Ok(Some(little)),
            Some(little) => Err(wrong(
                "little",
                format!("`decode.little` is {little}, but the model takes {k} experts per token"),
            )
            .hint(format!("set it to {} or less; {} is the default", k - 1, k.div_ceil(2)))),
        }
    }

    /// Treatment of tokens past an expert's capacity. The CPU is beside every unit with static graphs and loses nothing;
    /// where the user says what may be lost, the least salient rows are dropped.
    pub fn overflow(&self) -> Overflow {
        let budget = self.quality.max_perplexity_increase;
        self.experts.overflow.unwrap_or(if budget.is_some() { Overflow::Prune } else { Overflow::Spill })
    }

    /// The static shapes, for a model whose own limit is `model_max` tokens.
    ///
    /// # Errors
    /// `shapes.max_context` is longer than that limit.
    pub fn shapes_for(&self, model_max: usize) -> Result<Shapes> {
        let max_context = self.shapes.max_context.unwrap_or(DEFAULT_MAX_CONTEXT.min(model_max));
        if max_context > model_max {
            return Err(Error::input(format!(
                "`{}`: `shapes.max_context` is {max_context}, but the model ends at {model_max}",
                read::place(&self.path, "shapes", "max_context")
            ))
            .hint(format!("set it to {model_max} or less (`max_position_embeddings` in `config.json`)")));
        }
        Ok(Shapes {
            max_context,
            prefill_chunk: self.shapes.prefill_chunk.min(max_context),
            decode_batch: self.shapes.decode_batch.clone(),
        })
    }
}

/// A path that a file names, seen from that file's folder.
fn beside(file: &Path, path: &str) -> PathBuf {
    match folder(file) {
        folder if folder.as_os_str() == "." => path.into(),
        folder => folder.join(path),
    }
}

/// The folder of a file; `.` for a bare name.
fn folder(path: &Path) -> &Path {
    match path.parent() {
        Some(p) if !p.as_os_str().is_empty() => p,
        _ => Path::new("."),
    }
}
