//! `decisions.json` of a bundle: why each matrix kernel is what it is. `moec explain` reads it.

use moec_config::Rounding;
use moec_cpu::{CpuTarget, KernelSpec, Knob, Schedule};
use moec_sim::cache::{Choice, Reason};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// Version of the file.
pub const VERSION: u32 = 1;

/// Fields of a schedule that a kernel looks at, by name.
pub type Pieces = BTreeMap<String, usize>;

/// The file.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Decisions {
    /// [`VERSION`].
    pub version: u32,
    /// `activations` of `model.toml`.
    pub activations: String,
    /// How weights in groups were rounded.
    #[serde(default)]
    pub rounding: Rounding,
    /// Threads of the measurements, if there were any.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub threads: Option<usize>,
    /// What the cost model knew of a core.
    pub figures: Vec<Figure>,
    /// Matrix kernels, once for every entry point that calls them.
    pub kernels: Vec<Decision>,
    /// Formats of single weights under a size, where there was one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mix: Option<MixDecision>,
    /// Thresholds of gates behind SiLU, where there are some.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub thresholds: Option<ThresholdDecision>,
    /// Why the cache of experts keeps whom it keeps, where policies were replayed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cache: Option<CacheDecision>,
    /// Frames that experts are brought into while the plan runs, where there are some.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub frames: Option<FramesDecision>,
    /// Whether experts on flash are read whole or by neurons, where there was a choice.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub on_flash: Option<FlashDecision>,
    /// Hot neurons by layer and batch, where a unit for dense work computes beside the processor.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub hot: Vec<HotShare>,
    /// Predictors of neurons by layer, where they were asked for.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub predictors: Vec<PredictorDecision>,
    /// By how much perplexity on held-out text rises with them, as a share, two standard errors included, where `auto` measured it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub predictors_increase: Option<f64>,
    /// Where attention lives and why, where the costs of a request decided.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub attention: Option<AttentionDecision>,
    /// How often calibration saw experts chosen, by layer, where the build took a profile.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub expert_use: Vec<ExpertUse>,
}

/// How often calibration saw the experts of a layer chosen.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ExpertUse {
    /// Layer.
    pub layer: u32,
    /// Tokens that chose each expert.
    pub chosen: Vec<u64>,
}

/// Frames of a memory beside the processor's, and who begins in them.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FramesDecision {
    /// Who divides experts and brings them.
    pub system: String,
    /// What that does.
    pub says: String,
    /// The memory.
    pub memory: String,
    /// Bytes that a run may take of it: the budget, or its capacity.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub limit: Option<u64>,
    /// Bytes of a frame.
    pub each: u64,
    /// Frames.
    pub frames: u64,
    /// Experts of all layers.
    pub experts: u64,
    /// Experts that never leave their frames.
    pub pinned: u64,
    /// Policy of the others, with its parameters.
    pub keeps: String,
    /// Why these.
    pub why: String,
}

/// Formats that were chosen for a size.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MixDecision {
    /// Bytes that were allowed; `None`: as few as quality allows.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub size: Option<u64>,
    /// Most by which perplexity may rise, as a share, if that was said.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub limit: Option<f64>,
    /// Bytes that the weights take on the machine that measured.
    pub bytes: u64,
    /// By how much perplexity rose there, as a share, two standard errors included.
    pub increase: f64,
    /// What every weight got.
    pub weights: Vec<MixedWeight>,
}

/// Weights that read one input, and their format.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MixedWeight {
    /// Their names, before any rewriting.
    pub weights: Vec<String>,
    /// The format.
    pub format: String,
    /// What that adds to the loss, in nats per token, as it was estimated.
    pub loss: f64,
}

/// Thresholds below which neurons of experts with SiLU count as 0.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ThresholdDecision {
    /// Share of the neurons that were to be 0.
    pub share: f64,
    /// Most by which perplexity may rise, as a share, if that was said.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub limit: Option<f64>,
    /// What they cost; `None` where there was no text to measure on.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cost: Option<ThresholdCost>,
    /// Every share that was measured, in order.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub tried: Vec<ThresholdCost>,
    /// Layer and threshold of `|silu(gate)|`.
    pub layers: Vec<(u32, f32)>,
}

/// What thresholds cost on text, beside the model without.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ThresholdCost {
    /// Share of the neurons that were to be 0.
    pub share: f64,
    /// By how much perplexity rose, as a share, two standard errors included.
    pub increase: f64,
    /// Mean Kullback-Leibler divergence, in nats per token.
    pub divergence: f64,
    /// Share of tokens after which the most probable next one is the same.
    pub same_choice: f64,
}

/// A request with attention on either unit, simulated.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct AttentionDecision {
    /// Tokens of the prompt.
    pub prompt: u32,
    /// Tokens generated behind it.
    pub generate: u32,
    /// The unit where attention and the KV cache live: the first of the homes.
    pub chosen: String,
    /// What the request costs, the least first.
    pub homes: Vec<HomeCost>,
}

/// A request with attention on one unit.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct HomeCost {
    /// The unit.
    pub unit: String,
    /// Milliseconds from the request to its last token.
    pub ms: f64,
    /// Millijoules per token, of the prompt and generated.
    pub mj_per_token: f64,
}

impl HomeCost {
    /// `12.3 ms and 0.456 mJ per token`
    pub fn shown(&self) -> String {
        format!("{:.1} ms and {:.3} mJ per token", self.ms, self.mj_per_token)
    }
}

/// How experts on flash are read, and why.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FlashDecision {
    /// Neurons one by one, gates in memory; else whole experts.
    pub by_neurons: bool,
    /// Why.
    pub why: String,
    /// Bytes that a token is expected to read of whole experts.
    pub experts: f64,
    /// The same of neurons; `None` where memory has no room for their gates.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub neurons: Option<f64>,
    /// How many times a byte of the small reads of neurons counts.
    pub times: f64,
}

impl FlashDecision {
    /// `by neurons: a token is expected to read …`
    pub fn shown(&self) -> String {
        format!("{}: {}", if self.by_neurons { "by neurons" } else { "whole" }, self.why)
    }
}

/// What policies made of recorded routing.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CacheDecision {
    /// The policy that was taken.
    pub chosen: String,
    /// Whether it gains enough on LRU on held-out text; otherwise LRU was taken.
    pub beats_lru: bool,
    /// Every policy that was tried, with its hit rate.
    pub policies: Vec<(String, f64)>,
    /// Hit rate that no policy passes.
    pub bound: f64,
    /// Hit rate of what was taken, on text that it was not chosen on; and of LRU there.
    pub held_out: [f64; 2],
    /// Percent of the cache that is pinned to the hottest experts.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub pinned: u8,
    /// Every policy that was tried with pins: policy, percent, hit rate.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub pins: Vec<(String, u8, f64)>,
    /// Hit rate of what would have been taken without pins, on text that it was not chosen on.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub held_out_unpinned: Option<f64>,
}

#[allow(clippy::trivially_copy_pass_by_ref, reason = "serde asks for a reference")]
fn is_zero(n: &u8) -> bool {
    *n == 0
}

#[allow(clippy::trivially_copy_pass_by_ref, reason = "serde asks for a reference")]
fn is_false(b: &bool) -> bool {
    !*b
}

impl CacheDecision {
    /// What is kept of a choice.
    pub fn of(choice: &Choice) -> Self {
        let rows = choice.rows.iter().map(|r| (r.setting.to_string(), r.tally.hit_rate()));
        let pins = choice.pinned_rows.iter();
        let pins: Vec<_> = pins.map(|r| (r.setting.to_string(), r.pinned, r.tally.hit_rate())).collect();
        Self {
            chosen: choice.chosen.setting.to_string(),
            beats_lru: choice.reason == Reason::BeatsLru,
            policies: rows.collect(),
            bound: choice.optimum.hit_rate(),
            held_out: [choice.held_out.hit_rate(), choice.held_out_lru.hit_rate()],
            pinned: choice.chosen.pinned,
            held_out_unpinned: (!pins.is_empty()).then(|| choice.held_out_unpinned.hit_rate()),
            pins,
        }
    }
}

/// A figure of the target.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Figure {
    /// Of what.
    pub what: String,
    /// In `unit`.
    pub value: f64,
    /// `GOP/s` or `GB/s`.
    pub unit: String,
    /// Where it comes from.
    pub source: String,
}

/// Who chose a schedule.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum By {
    /// The cost model.
    Model,
    /// Measurements, which may have confirmed the model.
    Clock,
}

/// A matrix kernel in an entry point.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Decision {
    /// Index into the kernels of the plan.
    pub kernel: u32,
    /// What it computes (`expert_gate_up`).
    pub kind: String,
    /// Entry point.
    pub entry: String,
    /// Rows of a call that was planned for.
    pub rows: usize,
    /// What such a call does.
    pub load: DecisionLoad,
    /// Format of the weights.
    pub format: String,
    /// Form of the arithmetic.
    pub compute: String,
    /// Why that form.
    pub why: String,
    /// The schedule.
    pub schedule: Pieces,
    /// Who chose it.
    pub by: By,
    /// What the cost model says.
    pub predicted: Predicted,
    /// What the clock says of a part of the matrix, in every schedule that was tried.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub measured: Vec<Measured>,
}

/// What a call does.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DecisionLoad {
    /// Matrices.
    pub matrices: usize,
    /// Rows that meet each.
    pub rows: usize,
    /// Input channels.
    pub k: usize,
    /// Output channels.
    pub n: usize,
}

/// The cost model's prediction for one core.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Predicted {
    /// Milliseconds.
    pub ms: f64,
    /// 10⁹ operations per second.
    pub gops: f64,
    /// 10⁹ bytes per second.
    pub gb_per_s: f64,
    /// `arithmetic` or `memory`.
    pub bound: String,
    /// Arithmetic with what the schedule adds, over arithmetic without.
    pub overhead: f64,
}

/// A measured schedule.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Measured {
    /// The schedule.
    pub schedule: Pieces,
    /// Median milliseconds.
    pub ms: f64,
}

/// A schedule by the names of its fields.
pub fn pieces(target: &CpuTarget, spec: &KernelSpec, schedule: Schedule) -> Pieces {
    target.pieces(spec, schedule).into_iter().map(|(knob, value)| (knob.name().to_owned(), value)).collect()
}

/// The schedule of these fields; `None` where a name is none or the target has no such kernels.
pub fn schedule(target: &CpuTarget, pieces: &Pieces) -> Option<Schedule> {
    let knob = |name: &str| Knob::ALL.into_iter().find(|k| k.name() == name);
    let all = pieces.iter().map(|(name, value)| Some((knob(name)?, *value))).collect::<Option<Vec<_>>>()?;
    target.schedule(&all)
}

/// `rows 96, unroll 4`
pub fn shown(pieces: &Pieces) -> String {
    let fields = Knob::ALL.into_iter().filter_map(|k| Some(format!("{k} {}", pieces.get(k.name())?)));
    fields.collect::<Vec<_>>().join(", ")
}

/// The hot neurons of a layer at a batch size.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct HotShare {
    /// Layer.
    pub layer: u32,
    /// Sequences that are decoded together.
    pub batch: u32,
    /// Hot neurons of each expert: the first ones by activity.
    pub hot: u32,
    /// Neurons of an expert.
    pub neurons: u32,
    /// Microseconds that attention and experts are expected to take.
    pub us: f64,
    /// The same without hot neurons: the processor alone.
    pub cold_us: f64,
    /// Whether the bundle has networks of them.
    #[serde(default, skip_serializing_if = "is_false")]
    pub networks: bool,
}

/// What was trained to say which neurons of a layer are awake, and what is used of it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PredictorDecision {
    /// Layer.
    pub layer: u32,
    /// `off`, or one of those that were tried.
    pub chosen: String,
    /// Why.
    pub why: String,
    /// Share of neurons that rows wake.
    pub awake: f64,
    /// Rows that were fitted to, and rows that shares are counted on.
    pub rows: [usize; 2],
    /// Bytes that a token reads of the layer's experts without a predictor.
    pub exact_bytes: u64,
    /// All that were trained.
    pub tried: Vec<TriedPredictor>,
}

/// A predictor of a layer's neurons.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TriedPredictor {
    /// `low-rank 32` or `coarse`.
    pub kind: String,
    /// Standard errors of a neuron by which the border is lower.
    pub errors: f64,
    /// Of the neurons that rows wake, those that are found.
    pub recall: f64,
    /// Of all neurons, those that are taken to be awake.
    pub predicted: f64,
    /// Bytes that a token reads of the layer's experts.
    pub bytes: u64,
    /// Bytes of the predictors of all experts.
    pub held: u64,
}
