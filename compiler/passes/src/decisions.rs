//! `decisions.json` of a bundle: the decisions of its build, with reasons. `moec explain` reads it.
//!
//! Every choice among alternatives leaves a [`Decision`], which one printer prints. Schedules of matrix
//! kernels, which are many and come with loads and predictions, are [`KernelDecision`]s.

use moec_config::Rounding;
use moec_cpu::{CpuTarget, KernelSpec, Knob, Schedule};
use moec_sim::cache::{Choice, Reason};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// Version of the file.
pub const VERSION: u32 = 2;

/// Fields of a schedule that a kernel reads, by name.
pub type ScheduleFields = BTreeMap<String, usize>;

/// Numbers by name. A name ends in its unit (`_bytes`, `_share` of 1, `_us`, `_ms`, `_mj`, `_nats`,
/// `_tokens_per_s`); any other is a count.
pub type Figures = BTreeMap<String, f64>;

/// The file.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Decisions {
    /// [`VERSION`].
    pub version: u32,
    /// `activations` of `model.toml`.
    pub activations: String,
    /// Rounding of weights in groups.
    #[serde(default)]
    pub rounding: Rounding,
    /// Threads of the measurements, if there were any.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub threads: Option<usize>,
    /// Figures of a core in the cost model.
    pub figures: Vec<Figure>,
    /// Matrix kernels, once for every entry point that calls them.
    pub kernels: Vec<KernelDecision>,
    /// Other decisions, in the order of the build.
    pub decisions: Vec<Decision>,
    /// Recorded choices of experts, by layer, if the build took a profile.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub expert_use: Vec<ExpertUse>,
}

/// Recorded choices of a layer's experts.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ExpertUse {
    /// Layer.
    pub layer: u32,
    /// Tokens that chose each expert.
    pub chosen: Vec<u64>,
}

/// Decision about one thing.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Decision {
    /// The pass that decided (`moec passes` lists them). Otherwise `size`, `threshold`, `gamma`,
    /// `prefill_chunk` or `hosts`, which are decided before passes run, or `legalise` for the changes that a backend
    /// makes to a graph.
    pub pass: String,
    /// Subject of the decision. The same thing in several layers, or of several weights, has one subject.
    pub subject: String,
    /// Layer, if each has its own decision.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub layer: Option<u32>,
    /// Weights that it is about, by their names before any rewriting.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub weights: Vec<String>,
    /// The chosen alternative.
    pub chosen: String,
    /// Reason.
    pub reason: String,
    /// Figures of the choice.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub figures: Figures,
    /// All alternatives, the chosen one included, if they were compared.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub alternatives: Vec<Alternative>,
}

/// An alternative of a decision.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Alternative {
    /// Name, as in [`Decision::chosen`].
    pub what: String,
    /// Measured, simulated or estimated figures of it.
    pub figures: Figures,
}

impl Decision {
    /// A decision with its reason only.
    pub fn new(pass: &str, subject: &str, chosen: impl Into<String>, reason: impl Into<String>) -> Self {
        let (pass, subject) = (pass.to_owned(), subject.to_owned());
        Self { pass, subject, chosen: chosen.into(), reason: reason.into(), ..Self::default() }
    }

    /// Sets the layer.
    #[must_use]
    pub fn in_layer(self, layer: u32) -> Self {
        Self { layer: Some(layer), ..self }
    }

    /// Adds figures.
    #[must_use]
    pub fn with(mut self, figures: &[(&str, f64)]) -> Self {
        self.figures.extend(named(figures));
        self
    }

    /// Adds an alternative.
    #[must_use]
    pub fn or(mut self, what: impl Into<String>, figures: &[(&str, f64)]) -> Self {
        self.alternatives.push(Alternative { what: what.into(), figures: named(figures).collect() });
        self
    }

    /// A figure of the chosen alternative.
    pub fn figure(&self, name: &str) -> Option<f64> {
        self.figures.get(name).copied()
    }

    /// The chosen alternative, if alternatives were compared.
    pub fn chosen_alternative(&self) -> Option<&Alternative> {
        self.alternatives.iter().find(|a| a.what == self.chosen)
    }

    /// Results of policies on recorded routing.
    pub fn of_cache(choice: &Choice) -> Self {
        let name = |policy: &dyn std::fmt::Display, pinned: u8| match pinned {
            0 => policy.to_string(),
            share => format!("{policy}, {share} % pinned to the hottest experts"),
        };
        let reason = match choice.reason {
            Reason::BeatsLru => "better than LRU on held-out text",
            Reason::NothingBeatsLru => "no policy is enough better than LRU on held-out text",
        };
        let chosen = name(&choice.chosen.setting, choice.chosen.pinned);
        let mut own = Self::new("size_expert_cache", "cache of experts", chosen, reason).with(&[
            ("held_out_hit_share", choice.held_out.hit_rate()),
            ("lru_held_out_hit_share", choice.held_out_lru.hit_rate()),
            ("bound_hit_share", choice.optimum.hit_rate()),
        ]);
        if !choice.pinned_rows.is_empty() {
            own = own.with(&[("unpinned_held_out_hit_share", choice.held_out_unpinned.hit_rate())]);
        }
        let rows = choice.rows.iter().chain(&choice.pinned_rows);
        let mut rows: Vec<_> = rows.map(|r| (name(&r.setting, r.pinned), r.counters.hit_rate())).collect();
        rows.sort_by(|a, b| b.1.total_cmp(&a.1));
        rows.into_iter().fold(own, |own, (what, rate)| own.or(what, &[("hit_share", rate)]))
    }
}

/// Figures by their names.
fn named(figures: &[(&str, f64)]) -> impl Iterator<Item = (String, f64)> {
    figures.iter().map(|&(name, value)| (name.to_owned(), value))
}

/// A figure of the target.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Figure {
    /// Name of the figure.
    pub what: String,
    /// Value, in `unit`.
    pub value: f64,
    /// `GOP/s` or `GB/s`.
    pub unit: String,
    /// Source.
    pub source: String,
}

/// Method that chose a schedule.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ScheduleSource {
    /// The cost model.
    Model,
    /// Measurements, which may have confirmed the model.
    #[serde(rename = "clock")]
    Measured,
}

/// A matrix kernel in an entry point.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct KernelDecision {
    /// Index into the kernels of the plan.
    pub kernel: u32,
    /// Kind of kernel (`expert_gate_up`).
    pub kind: String,
    /// Entry point.
    pub entry: String,
    /// Rows of the call that the schedule was planned for.
    pub rows: usize,
    /// Load of such a call.
    pub load: DecisionLoad,
    /// Format of the weights.
    pub format: String,
    /// Compute type.
    pub compute: String,
    /// Reason for that compute type.
    pub why: String,
    /// The schedule.
    pub schedule: ScheduleFields,
    /// Method that chose it.
    pub by: ScheduleSource,
    /// Prediction of the cost model.
    pub predicted: Predicted,
    /// Times on all threads, for every schedule that was tried: by those of a part of the matrix.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub measured: Vec<Measured>,
}

impl KernelDecision {
    /// Seconds of a call on all threads, if they were measured.
    pub fn seconds(&self) -> Option<f64> {
        let own = self.measured.iter().find(|m| m.schedule == self.schedule);
        own.map(|m| m.ms / 1e3)
    }
}

/// Load of a call.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DecisionLoad {
    /// Matrices.
    pub matrices: usize,
    /// Rows that multiply each matrix.
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
    /// Arithmetic including that added by the schedule, divided by arithmetic without it.
    pub overhead: f64,
}

/// A measured schedule.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Measured {
    /// The schedule.
    pub schedule: ScheduleFields,
    /// Median milliseconds.
    pub ms: f64,
}

/// A schedule by the names of its fields.
pub fn pieces(target: &CpuTarget, spec: &KernelSpec, schedule: Schedule) -> ScheduleFields {
    target.pieces(spec, schedule).into_iter().map(|(knob, value)| (knob.name().to_owned(), value)).collect()
}

/// The schedule of these fields; `None` if a name is invalid or the target has no such kernels.
pub fn schedule(target: &CpuTarget, pieces: &ScheduleFields) -> Option<Schedule> {
    let knob = |name: &str| Knob::ALL.into_iter().find(|k| k.name() == name);
    let all = pieces.iter().map(|(name, value)| Some((knob(name)?, *value))).collect::<Option<Vec<_>>>()?;
    target.schedule(&all)
}

/// `rows 96, unroll 4`
pub fn shown(pieces: &ScheduleFields) -> String {
    let fields = Knob::ALL.into_iter().filter_map(|k| Some(format!("{k} {}", pieces.get(k.name())?)));
    fields.collect::<Vec<_>>().join(", ")
}
