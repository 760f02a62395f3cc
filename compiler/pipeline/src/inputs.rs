//! Inputs of a compilation.

use super::{Compilation, Stops};
use moec_base::error::{Error, Result};
use moec_base::paths::{KERNELS, TOKENIZER};
use moec_base::progress::Progress;
use moec_config::{Config, Gamma, HostPlacement};
use moec_costs::units::{UnitList, UnitPreference, Units};
use moec_cpu::{CACHE_BLOCK, CpuTarget};
use moec_import::lower;
use moec_import::{Checkpoint, ModelSpec};
use moec_ir::placement::Placement;
use moec_ir::plan::{BigLittle, ModelInfo};
use moec_ir::{Module, Source};
use moec_passes::format::Formats;
use moec_passes::threshold::Thresholds;
use moec_profile::Profile;
use std::collections::BTreeSet;

/// Limit of the bytes of logits that one call returns: a longer chunk returns fewer rows per call.
const LOGITS_BYTES: usize = 64 << 20;

/// Inputs of a compilation: the user's options, and measurements. No pass changes them.
#[derive(Clone, Debug)]
pub struct Inputs<'a> {
    /// Options of the user.
    pub config: &'a Config,
    /// Model to compile.
    pub start: Start<'a>,
    /// CPU to compile for.
    pub target: &'a CpuTarget,
    /// All units of the device.
    pub list: UnitList<'a>,
    /// The units that share the model, if there are static graphs; `None` if all shapes are dynamic.
    pub units: Option<Units<'a>>,
    /// Profile of the calibration. Static graphs require it.
    pub profile: Option<&'a Profile>,
    /// Measures the loss of quality by a placement, if the user limits it.
    pub quality: Option<&'a dyn QualityProbe>,
    /// Formats of weights that differ from those of their classes.
    pub formats: Formats,
    /// Thresholds below which gates after SiLU become 0, if there are any.
    pub thresholds: Thresholds,
    /// γ of big-little decoding that a profile chose, if `model.toml` gives a share of tokens.
    pub gamma: Option<f64>,
    /// Tokens per prefill step that costs chose, if `model.toml` leaves them to these.
    pub chunk: Option<usize>,
    /// Division between hosts that costs chose, if `model.toml` leaves it to these.
    pub division: Option<HostPlacement>,
    /// Layers whose experts costs chose to leave whole on the first host, where those of others are cut into slices.
    pub whole_experts: BTreeSet<u32>,
    /// Layers whose attention costs chose to cut by heads, if `model.toml` leaves it to these.
    pub cut_attention: BTreeSet<u32>,
    /// Applies no rule: weights and nodes stay as `lower` made them, for callers that read them by name.
    pub as_lowered: bool,
}

/// Start of a compilation.
#[derive(Clone, Copy, Debug)]
pub enum Start<'a> {
    /// A checkpoint, and the specification that import made of it.
    Checkpoint(&'a Checkpoint, &'a ModelSpec),
    /// A Graph of this model after the first passes: that of a bundle, or one in a file.
    Graph(&'a ModelInfo),
}

/// A placement whose loss of quality is measured.
#[derive(Clone, Copy, Debug)]
pub struct Candidate<'a> {
    /// The Graph, without capacities.
    pub module: &'a Module,
    /// The model.
    pub model: &'a ModelInfo,
    /// The capacities.
    pub placement: &'a Placement,
}

/// A changed Graph that computes almost the same as another one; its loss of quality is measured.
#[derive(Clone, Copy)]
pub struct Change<'a> {
    /// The Graph without the change.
    pub exact: &'a Module,
    /// The Graph with it.
    pub changed: &'a Module,
    /// The model.
    pub model: &'a ModelInfo,
    /// Source of the weights of both.
    pub source: &'a dyn Source,
}

/// Measures the loss of quality by a placement or by another change.
pub trait QualityProbe: std::fmt::Debug {
    /// Increase of the perplexity on held-out text, as a share, if experts have the capacities of a
    /// placement.
    ///
    /// # Errors
    /// Fails if the model cannot run with them.
    fn perplexity_increase(&self, candidate: &Candidate<'_>) -> Result<f64>;

    /// The same increase for a change of the Graph.
    ///
    /// # Errors
    /// Fails if the model cannot run with it.
    fn increase_by(&self, change: &Change<'_>) -> Result<f64>;
}

impl<'a> Inputs<'a> {
    /// Inputs for a model of a checkpoint, on the CPU of a target only, without a profile.
    pub fn new(
        config: &'a Config,
        checkpoint: &'a Checkpoint,
        spec: &'a ModelSpec,
        target: &'a CpuTarget,
    ) -> Self {
        Self::begin(config, Start::Checkpoint(checkpoint, spec), target)
    }

    /// Inputs for a model that starts from a Graph.
    pub fn of_graph(config: &'a Config, model: &'a ModelInfo, target: &'a CpuTarget) -> Self {
        Self::begin(config, Start::Graph(model), target)
    }

    fn begin(config: &'a Config, start: Start<'a>, target: &'a CpuTarget) -> Self {
        Self {
            config,
            start,
            target,
            list: UnitList::of(target.device()),
            units: None,
            profile: None,
            quality: None,
            formats: Formats::new(),
            thresholds: Thresholds::default(),
            gamma: None,
            chunk: None,
            division: None,
            whole_experts: BTreeSet::new(),
            cut_attention: BTreeSet::new(),
            as_lowered: false,
        }
    }

    /// Division of the model between the hosts of the device: as requested, else what costs chose, else slices.
    pub fn hosts(&self) -> HostPlacement {
        match self.list.hosts().len() {
            1 => HostPlacement::Alone,
            _ => self.config.placement.hosts.or(self.division).unwrap_or(HostPlacement::Slices),
        }
    }

    /// Slices that the experts of a layer are cut into: as requested, else one for each host unless costs chose to leave
    /// them whole.
    pub fn slices(&self, layer: u32) -> usize {
        let cut = self.hosts() == HostPlacement::Slices && !self.whole_experts.contains(&layer);
        let hosts = if cut { self.list.hosts().len() } else { 1 };
        self.config.placement.slices_of(layer).map_or(hosts, |n| n as usize).max(1)
    }

    /// Whether experts of any layer are to be cut into slices.
    pub fn cuts_experts(&self) -> bool {
        let hosts = self.hosts() == HostPlacement::Slices && self.list.hosts().len() > 1;
        let requested = &self.config.placement.slices;
        if requested.is_empty() { hosts } else { requested.iter().any(|&n| n > 1) }
    }

    /// Whether every host is to have one slice of every expert.
    pub fn slices_are_of_hosts(&self) -> bool {
        let hosts = self.list.hosts().len();
        let requested = &self.config.placement.slices;
        self.hosts() == HostPlacement::Slices
            && self.whole_experts.is_empty()
            && requested.iter().all(|&n| n as usize == hosts)
    }

    /// Slices that the heads of a layer's attention are cut into: as requested, else one for each host where costs
    /// chose that.
    pub fn attention_slices(&self, layer: u32) -> usize {
        match self.config.placement.attention_slices {
            Some(slices) => slices as usize,
            None if self.cut_attention.contains(&layer) => self.list.hosts().len(),
            None => 1,
        }
    }

    /// Whether attention of any layer is to be cut by heads.
    pub fn cuts_attention(&self) -> bool {
        self.config.placement.attention_slices.map_or(!self.cut_attention.is_empty(), |slices| slices > 1)
    }

    /// The checkpoint.
    ///
    /// # Errors
    /// A bug of the compiler: a compilation that started from a Graph has none.
    pub fn checkpoint(&self) -> Result<&'a Checkpoint> {
        match self.start {
            Start::Checkpoint(checkpoint, _) => Ok(checkpoint),
            Start::Graph(_) => Err(Error::bug("a Graph is compiled, and no checkpoint")),
        }
    }

    /// Specification that import made of the checkpoint.
    ///
    /// # Errors
    /// A bug of the compiler: a compilation that started from a Graph has none.
    pub fn spec(&self) -> Result<&'a ModelSpec> {
        match self.start {
            Start::Checkpoint(_, spec) => Ok(spec),
            Start::Graph(_) => Err(Error::bug("a Graph is compiled, and no checkpoint")),
        }
    }

    /// The Graph as `lower` makes it.
    ///
    /// # Errors
    /// Fails as [`Compilation::run`] does.
    pub fn lowered(&self) -> Result<Module> {
        let own = Inputs::new(self.config, self.checkpoint()?, self.spec()?, self.target);
        let mut lowered = Compilation::new(own);
        let stops = Stops { stop_after: Some("lower"), ..Stops::default() };
        lowered.run(stops, &Progress::silent(), &mut |_| {})?;
        Ok(lowered.module)
    }

    /// Files other than weights that the runtime reads.
    pub(super) fn artifacts(&self) -> Result<Vec<&'static str>> {
        let tokenizer = self.tokenizer()?.map(|_| TOKENIZER);
        Ok([KERNELS].into_iter().chain(tokenizer).collect())
    }

    /// The checkpoint's tokenizer, if it has one.
    ///
    /// # Errors
    /// Fails if the tokenizer cannot be used with this model.
    pub fn tokenizer(&self) -> Result<Option<&'a [u8]>> {
        match self.start {
            Start::Checkpoint(checkpoint, spec) => checkpoint.tokenizer(spec),
            Start::Graph(_) => Ok(None),
        }
    }

    /// Sizes that this build fixes.
    ///
    /// # Errors
    /// Fails if the model does not have such a context. A bug of the compiler: a Graph, whose sizes are
    /// fixed.
    pub fn shapes(&self) -> Result<lower::Shapes> {
        let spec = self.spec()?;
        let shapes = self.config.shapes_for(spec.max_positions)?;
        let row = spec.vocab.max(1) * 4;
        let fit = LOGITS_BYTES / row;
        let rows = self.chunk.unwrap_or(shapes.prefill_chunk).min(shapes.max_context);
        let prefill_out_rows = if rows <= fit { rows } else { (fit / 16 * 16).clamp(1, rows) };
        let attention = self.list.preference("attention", &self.config.placement.attention);
        let rings =
            Units::of(self.list.device).is_none() || attention.is_ok_and(|a| a == UnitPreference::Cpu);
        Ok(lower::Shapes {
            max_context: shapes.max_context,
            rings: rings.then_some(CACHE_BLOCK),
            prefill_chunk: rows,
            prefill_out_rows,
            slots: shapes.decode_batch.iter().copied().max().unwrap_or(1),
            decode_batch: shapes.decode_batch,
            little: self.config.little(spec.experts_per_token())?,
        })
    }

    /// γ of big-little decoding. The default in place of a share, as long as no profile has chosen γ.
    fn gamma(&self) -> f64 {
        self.gamma.or(self.config.decode.gamma.fixed()).or(Gamma::DEFAULT.fixed()).unwrap_or(1.0)
    }

    /// Facts about the model in a plan.
    ///
    /// # Errors
    /// Fails if the model or a shape exceeds what a plan can hold.
    pub fn model_info(&self) -> Result<ModelInfo> {
        let (checkpoint, spec) = match self.start {
            Start::Checkpoint(checkpoint, spec) => (checkpoint, spec),
            Start::Graph(model) => return Ok(model.clone()),
        };
        let shapes = self.shapes()?;
        let int = |x: usize| {
            u32::try_from(x).map_err(|_| Error::limit(format!("{x} is past what a plan can hold")))
        };
        Ok(ModelInfo {
            family: spec.family.to_owned(),
            vocab: int(spec.vocab)?,
            hidden: int(spec.hidden)?,
            layers: int(spec.layers.len())?,
            max_context: int(shapes.max_context)?,
            slots: int(shapes.slots)?,
            bos: first_token(checkpoint, spec)?,
            eos: spec.eos.clone(),
            parameters: spec.params,
            active_parameters: spec.active_params,
            big_little: match shapes.little {
                Some(experts) => Some(BigLittle { experts: int(experts)?, gamma: self.gamma() as f32 }),
                None => None,
            },
            thresholded: (!self.thresholds.by_layer.is_empty()).then_some(self.thresholds.percent),
        })
    }
}

/// The token before every text, if the tokenizer's configuration requires one.
///
/// # Errors
/// Fails if the model does not have it.
pub fn first_token(checkpoint: &Checkpoint, spec: &ModelSpec) -> Result<Option<u32>> {
    let config = checkpoint.tokenizer_config()?;
    let adds_bos = config.map(|c| c.flag_or("add_bos_token", false)).transpose()?.unwrap_or(false);
    match spec.bos.filter(|_| adds_bos) {
        Some(bos) if bos as usize >= spec.vocab => {
            Err(Error::input(format!("`bos_token_id` is {bos}, but the model has {} tokens", spec.vocab))
                .because("`add_bos_token` in `tokenizer_config.json` puts it before every text")
                .hint("the configuration files are of another model: download them again"))
        }
        bos => Ok(bos),
    }
}
