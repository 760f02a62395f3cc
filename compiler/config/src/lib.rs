//! `model.toml`: the options of a build.
//!
//! Every key is a row of [`KEYS`], with its default, its range, its description and its parser. Messages, the
//! file that `moec init` writes and the reference page all come from those rows.

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
use moec_ir::plan::{PromptUnits, Refine};
use moec_ir::{Format, WeightClass};
use moec_runtime::platform::regular;
use moec_runtime::schedule::System;
use moec_sim::cache::Pin;
use serde::{Deserialize, Serialize};
use std::path::{Path, PathBuf};

/// Default of `placement.policy` if a unit with cache frames has some experts.
pub const POLICY: &System = &moec_sim::systems::MOEC;

/// Default of `shapes.max_context`, unless the model's own limit is shorter.
pub const DEFAULT_MAX_CONTEXT: usize = 4096;

/// Default of `shapes.prefill_chunk`.
pub const DEFAULT_PREFILL_CHUNK: usize = 256;

/// A checked `model.toml`.
#[derive(Clone, Debug, PartialEq)]
pub struct Config {
    /// Path of the file, as the user gave it.
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
    /// `[placement]`: the typical request.
    pub mix: Mix,
    /// `[placement]`: tokens of prompts, all equally likely; [`Mix::prompt`] is their mean.
    pub prompts: Vec<u32>,
    /// `[quality]`.
    pub quality: Quality,
}

/// `[model]`: the checkpoint.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Model {
    /// Folder of the checkpoint; relative paths of the file are resolved against the file's own folder.
    pub source: PathBuf,
    /// Whether weights may hold infinities and NaNs.
    pub allow_nonfinite: bool,
}

/// `[shapes]`: the static shapes, as in the file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ShapesKeys {
    /// Longest sequence in tokens; `None`: the smaller of [`DEFAULT_MAX_CONTEXT`] and the model's limit.
    pub max_context: Option<usize>,
    /// Tokens per prefill step; `None`: the number with the least cost of [`Config::prompts`].
    pub prefill_chunk: Option<usize>,
    /// Sequences per decode step, ascending.
    pub decode_batch: Vec<usize>,
}

/// The static shapes of a build; see [`Config::shapes_for`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Shapes {
    /// Longest sequence in tokens.
    pub max_context: usize,
    /// Tokens per prefill step, at most `max_context`; [`DEFAULT_PREFILL_CHUNK`] as long as no cost has
    /// chosen them.
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
    /// Classes whose matrices keep what the checkpoint stores, each its own format.
    pub stored: Vec<WeightClass>,
    /// Compute type of activations.
    pub activations: Activations,
    /// Rounding of weights.
    pub rounding: Rounding,
    /// Size limit of all weights. To keep it, single weights get smaller formats than those of their classes.
    pub size: Size,
}

/// Size limit of weights.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Size {
    /// None: the size that the formats require.
    #[default]
    Any,
    /// The smallest size that `max_perplexity_increase` allows.
    Auto,
    /// This many bytes at most.
    Most(u64),
}

/// Rounding of weights to groups of codes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Rounding {
    /// Each number to the nearest code.
    #[default]
    Nearest,
    /// In order: each number is rounded after the errors of earlier numbers have been compensated.
    Feedback,
}

impl Rounding {
    /// All variants, in the order of messages.
    pub const ALL: [Self; 2] = [Self::Feedback, Self::Nearest];

    /// Name in `model.toml`.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Nearest => "nearest",
            Self::Feedback => "feedback",
        }
    }

    /// Parses a name.
    pub fn parse(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|r| r.name() == name)
    }
}

/// `[calibrate]`: the input of calibration, and the profile of a build.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Calibrate {
    /// Texts; relative paths of the file are resolved against the file's own folder.
    pub text: Vec<PathBuf>,
    /// Profile of an earlier calibration.
    pub profile: Option<PathBuf>,
    /// Most tokens to read, over all texts.
    pub tokens: usize,
}

/// `[experts]`: static shapes of experts, for targets whose graphs are static.
#[derive(Clone, Debug, PartialEq)]
pub struct ExpertsConfig {
    /// Most capacity tiers of a layer.
    pub tiers: usize,
    /// Experts per graph; `None`: the number with the least cost.
    pub group: Option<usize>,
    /// Most row counts for which a graph has a function.
    pub sizes: usize,
    /// Treatment of tokens above a capacity; `None`: [`Config::overflow`] decides.
    pub overflow: Option<Overflow>,
    /// Rows of an expert's static graph.
    pub capacity: Capacity,
    /// Share of the calibration's chunks whose load an expert's capacity must cover.
    pub coverage: f64,
    /// Whether experts are computed neuron by neuron, without the neurons that a gate sets to 0.
    pub skip: Skip,
    /// Whether a predictor chooses the gates to read, if a step has few rows.
    pub predict: Predict,
    /// Share of the active neurons that a predictor must find.
    pub recall: f64,
    /// Threshold below which neurons with SiLU count as 0.
    pub threshold: Threshold,
}

/// Estimate of the rows that an expert requires, from its recorded loads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Capacity {
    /// A quantile of its load: [`ExpertsConfig::coverage`].
    Coverage,
    /// Its mean load; `r · B · k / E` for the busiest of a layer with imbalance `r` (NPUMoE, §4.1).
    Mean,
    /// Four times the mean load of a layer's experts for its busiest quarter, the mean load for the others
    /// (NPUMoE, §1).
    Quartile,
    /// The same number of rows for all.
    Rows(u32),
}

impl Capacity {
    /// Policies by their names in `model.toml`.
    pub const NAMED: [(&str, Self); 3] =
        [("coverage", Self::Coverage), ("mean", Self::Mean), ("quartile", Self::Quartile)];
}

/// Predictor of active neurons, which runs before gates are read (PowerInfer-2, §2.2).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Predict {
    /// No predictor: results do not change.
    Off,
    /// The predictor that reads least, if quality allows it.
    Auto,
    /// Low-rank matrices.
    LowRank,
    /// Gates in four-bit codes.
    Coarse,
}

impl Predict {
    /// All variants.
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

    /// Parses a name in `model.toml`.
    pub fn parse(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|p| p.name() == name)
    }

    /// Whether the user requests a predictor by name.
    pub const fn is_requested(self) -> bool {
        matches!(self, Self::LowRank | Self::Coarse)
    }
}

/// Threshold of neurons of experts with SiLU. A neuron counts as 0 if the magnitude of its gate is below a
/// threshold of its layer (CATS, arXiv 2404.08763).
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Threshold {
    /// No threshold: results do not change.
    Off,
    /// A threshold that sets this share of neurons to 0, in `0..=0.95`.
    Share(f64),
    /// The largest share that `max_perplexity_increase` allows.
    Auto,
}

impl Threshold {
    /// Largest share; above it a model is no longer useful.
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
    /// If the profile has seen enough inactive neurons.
    Auto,
    /// Wherever the result does not change.
    On,
    /// Never.
    Off,
}

impl Skip {
    /// Parses a name in `model.toml`.
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
    /// Defaults of keys that are absent from `model.toml`.
    pub const DEFAULT: Self = Self {
        tiers: 6,
        group: None,
        sizes: 4,
        overflow: None,
        capacity: Capacity::Coverage,
        coverage: 0.99,
        skip: Skip::Auto,
        predict: Predict::Off,
        recall: 0.99,
        threshold: Threshold::Off,
    };
}

/// `[decode]`: options of decoding.
#[derive(Clone, Debug, PartialEq)]
pub struct Decoding {
    /// Whether little entry points are compiled next to those of `decode` (MoBiLE, §III).
    pub big_little: bool,
    /// γ: a token of the little entry point is kept if its largest probability exceeds γ.
    pub gamma: Gamma,
    /// Experts per token of the little entry points; `None`: half of the model's, rounded up.
    pub little: Option<usize>,
}

impl Decoding {
    /// Defaults of keys that are absent from `model.toml`.
    pub const DEFAULT: Self = Self { big_little: false, gamma: Gamma::DEFAULT, little: None };

    /// The share of tokens that are to be decoded with all experts, if a profile chooses γ for it.
    pub fn fallback_share(&self) -> Option<f64> {
        match self.gamma {
            Gamma::Share(share) if self.big_little => Some(share),
            Gamma::Share(_) | Gamma::Above(_) => None,
        }
    }
}

/// γ of big-little decoding (MoBiLE, Algorithm 1), as given in `model.toml`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Gamma {
    /// This probability, in `0..=1`.
    Above(f64),
    /// The probability that a profile gives: this share of its tokens, in `0..=1`, does not exceed it.
    Share(f64),
}

impl Gamma {
    /// The paper's value (MoBiLE, §V-A).
    pub const DEFAULT: Self = Self::Above(0.7);

    /// Parses a share such as `15%`.
    pub fn parse(text: &str) -> Option<Self> {
        let percent: f64 = text.strip_suffix('%')?.trim().parse().ok()?;
        Some(percent / 100.0).filter(|s| (0.0..=1.0).contains(s)).map(Self::Share)
    }

    /// The probability, if no profile chooses it.
    pub const fn fixed(self) -> Option<f64> {
        match self {
            Self::Above(gamma) => Some(gamma),
            Self::Share(_) => None,
        }
    }
}

/// `[placement]`: units of operators that more than one unit can run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PlacementConfig {
    /// Attention and dense feed-forward networks.
    pub attention: UnitSetting,
    /// Token mixers other than attention.
    pub mixer: UnitSetting,
    /// Experts.
    pub experts: UnitSetting,
    /// Whole experts in decoding, where graphs are static.
    pub decode: UnitSetting,
    /// Everything else.
    pub rest: UnitSetting,
    /// Unit of experts' hot neurons; the CPU has the others.
    pub hot: UnitSetting,
    /// Policy that divides experts between the CPU and a unit with cache frames; `None` for fixed units.
    pub policy: Option<&'static System>,
    /// Experts of a layer that the memory of a hot unit holds; `None`: as many as fit.
    pub cached: Option<u32>,
    /// Division of the model between the hosts of a device; `None`: the compiler chooses.
    pub hosts: Option<HostPlacement>,
    /// Slices of their inner channels that experts are cut into, layer by layer, the last number for all others;
    /// empty: one for each host where costs divide the layer.
    pub slices: Vec<u32>,
    /// Slices of its heads that attention is cut into; `None`: one for each host where that costs less than none.
    pub attention_slices: Option<u32>,
    /// Refinement of the run-time assignment of experts to units.
    pub refine: Refine,
    /// Units of the experts of a prompt, where experts are assigned to units at run time.
    pub prefill: PromptUnits,
    /// Whether experts may change their location between steps: GPU memory, one DIMM or all DIMMs.
    pub moves: bool,
}

impl PlacementConfig {
    /// Slices that a layer's experts are cut into, if that is requested.
    pub fn slices_of(&self, layer: u32) -> Option<u32> {
        self.slices.get(layer as usize).or(self.slices.last()).copied()
    }

    /// Defaults of keys that are absent from `model.toml`.
    pub fn defaults() -> Self {
        Self {
            attention: UnitSetting::Auto,
            mixer: UnitSetting::Auto,
            experts: UnitSetting::Auto,
            decode: UnitSetting::Auto,
            rest: UnitSetting::Auto,
            hot: UnitSetting::Unit("cpu".to_owned()),
            policy: None,
            cached: None,
            hosts: None,
            slices: Vec::new(),
            attention_slices: None,
            refine: Refine::Full,
            prefill: PromptUnits::Auto,
            moves: true,
        }
    }
}

/// Division of one model between the hosts of a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum HostPlacement {
    /// Everything on the first host.
    Alone,
    /// A slice of every expert on each host, everything else on the first.
    Slices,
    /// Consecutive layers on each host, with their states; the embedding and the head on the first.
    Stages,
    /// Whole experts of every layer on each host, everything else on the first.
    Owners,
}

impl HostPlacement {
    /// All of them.
    pub const ALL: [Self; 4] = [Self::Alone, Self::Slices, Self::Stages, Self::Owners];

    /// Name in `model.toml`.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Alone => "alone",
            Self::Slices => "slices",
            Self::Stages => "stages",
            Self::Owners => "owners",
        }
    }
}

/// Typical request, which decides `placement.attention = "auto"`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mix {
    /// Tokens of the prompt.
    pub prompt: u32,
    /// Tokens of the answer.
    pub generate: u32,
}

impl Mix {
    /// A long prompt with a short answer, the use case of such units: the long prompt of NPUMoE's evaluation,
    /// and the mean answer of its workloads (§5.1).
    pub const DEFAULT: Self = Self { prompt: 4096, generate: 8 };
}

/// Choice of a unit.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub enum UnitSetting {
    /// The unit that the device's tables choose.
    #[default]
    Auto,
    /// The unit of that name, or the first of that kind, if it can run the operator.
    Unit(String),
    /// A unit for a percentage of the experts of each layer, the most popular ones in calibration. The CPU
    /// has the others.
    Share(String, u8),
}

impl UnitSetting {
    /// Spelling in `model.toml`: `auto`, a unit's name, or a name with a share (`gpu:50%`).
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

    /// Name of the unit.
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
    /// Largest increase of perplexity, as a share (0.01 for 1 %); `None`: `experts.coverage` decides.
    pub max_perplexity_increase: Option<f64>,
    /// Texts to measure the loss on; empty: those of `[calibrate]`.
    pub text: Vec<PathBuf>,
}

/// `[memory]`: memory use of a bundle at run time.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Memory {
    /// Storage of the KV cache.
    pub kv_cache: KvCache,
    /// Whether the KV cache holds [rotated](moec_ir::state::rotate) heads; `None`, as in every build: its format
    /// decides. No key sets it: measurements compare.
    pub rotate_cache: Option<bool>,
    /// Memory limit of a run in bytes; experts that do not fit stay on disk. `None`: all experts stay in
    /// memory.
    pub budget: Option<u64>,
    /// Limit in bytes of the memory with the cache frames of experts; `None`: its capacity.
    pub device_budget: Option<u64>,
    /// Policy of the cache of experts, with its parameters; `None`: the one that reads least in the profile.
    pub policy: Option<String>,
    /// Share of the cache for pinned experts.
    pub pin: Pin,
    /// Number of layers ahead for which experts are read before they are requested.
    pub prefetch: usize,
    /// Number of threads that the memory limit assumes; `None`: the number of cores of this machine.
    pub threads: Option<usize>,
}

impl Default for Memory {
    fn default() -> Self {
        let (policy, pin) = (None, Pin::Auto);
        Self {
            kv_cache: KvCache::Auto,
            rotate_cache: None,
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
    /// bf16; f32 if activations or the attention's weights are f32.
    #[default]
    Auto,
    /// The upper half of f32.
    Bf16,
    /// Exact.
    F32,
    /// 8 bits of rotated heads, in groups of 32 with a scale each.
    Q8,
    /// The same with 5 bits.
    Q5,
    /// The same with 4 bits.
    Q4,
}

impl KvCache {
    /// All variants, in the order of messages.
    pub const ALL: [Self; 6] = [Self::Auto, Self::Bf16, Self::F32, Self::Q8, Self::Q5, Self::Q4];

    /// Name in `model.toml`.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Auto => "auto",
            Self::Bf16 => "bf16",
            Self::F32 => "f32",
            Self::Q8 => "q8",
            Self::Q5 => "q5",
            Self::Q4 => "q4",
        }
    }

    /// Parses a name.
    pub fn parse(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|k| k.name() == name)
    }

    /// The variant that always stores numbers in that format.
    pub const fn of(format: Format) -> Self {
        match format {
            Format::Bf16 | Format::F16 => Self::Bf16,
            Format::F32 => Self::F32,
            Format::Q5 => Self::Q5,
            Format::Q4 => Self::Q4,
            _ => Self::Q8,
        }
    }
}

/// Name of the storage of [`Weights::stored`].
pub const STORED: &str = "stored";

impl Weights {
    /// Name of the storage of a class.
    pub fn name(&self, class: WeightClass) -> &'static str {
        if self.stored.contains(&class) { STORED } else { self.format(class).name() }
    }

    /// Storage format of a class, unless it is one of [`Self::stored`].
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
            KvCache::Q5 => Format::Q5,
            KvCache::Q4 => Format::Q4,
        }
    }

    /// Returns the configuration of an empty file at that path.
    pub fn defaults(path: &Path) -> Self {
        Self {
            path: path.into(),
            model: Model { source: folder(path).into(), allow_nonfinite: false },
            shapes: ShapesKeys {
                max_context: None,
                prefill_chunk: Some(DEFAULT_PREFILL_CHUNK),
                decode_batch: vec![1],
            },
            weights: Weights {
                experts: Format::Bf16,
                attention: Format::Bf16,
                embeddings: Format::Bf16,
                stored: Vec::new(),
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
            prompts: vec![Mix::DEFAULT.prompt],
            quality: Quality::default(),
        }
    }

    /// Reads and checks a file, and checks that the checkpoint's folder exists.
    ///
    /// # Errors
    /// Fails if the file cannot be read or is invalid; the message gives file, line and key.
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

    /// Checks a text; `path` is the path of its file, which need not exist.
    ///
    /// # Errors
    /// Fails if the text is invalid; the message gives file, line and key.
    pub fn parse(text: &str, path: &Path) -> Result<Self> {
        read::read(text, path).map(|(config, _)| config)
    }

    /// Experts per token of the little entry points, for a model with `experts` per token; `None` if there
    /// are none.
    ///
    /// # Errors
    /// Fails for a model without a mixture of experts or with one expert per token, and if `decode.little` is
    /// not smaller.
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
                "`decode.big_little` is true, but the model uses one expert per token, which cannot be reduced".into(),
            )
            .hint(off));
        }
        match self.decode.little {
            None => Ok(Some(k.div_ceil(2))),
            Some(little) if little < k => Ok(Some(little)),
            Some(little) => Err(wrong(
                "little",
                format!("`decode.little` is {little}, but the model uses {k} experts per token"),
            )
            .hint(format!("set it to {} or less; {} is the default", k - 1, k.div_ceil(2)))),
        }
    }

    /// Treatment of tokens above an expert's capacity. The CPU can compute them without loss on every target
    /// with static graphs. If the user allows a loss, the least salient rows are dropped.
    pub fn overflow(&self) -> Overflow {
        let budget = self.quality.max_perplexity_increase;
        self.experts.overflow.unwrap_or(if budget.is_some() { Overflow::Prune } else { Overflow::Spill })
    }

    /// The static shapes for a model whose own limit is `model_max` tokens.
    ///
    /// # Errors
    /// Fails if `shapes.max_context` is longer than that limit.
    pub fn shapes_for(&self, model_max: usize) -> Result<Shapes> {
        let max_context = self.shapes.max_context.unwrap_or(DEFAULT_MAX_CONTEXT.min(model_max));
        if max_context > model_max {
            return Err(Error::input(format!(
                "`{}`: `shapes.max_context` is {max_context}, but the model's limit is {model_max}",
                read::place(&self.path, "shapes", "max_context")
            ))
            .hint(format!("set it to {model_max} or less (`max_position_embeddings` in `config.json`)")));
        }
        Ok(Shapes {
            max_context,
            prefill_chunk: self.shapes.prefill_chunk.unwrap_or(DEFAULT_PREFILL_CHUNK).min(max_context),
            decode_batch: self.shapes.decode_batch.clone(),
        })
    }
}

/// Resolves a path in a file against that file's folder.
fn resolve(file: &Path, path: &str) -> PathBuf {
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
