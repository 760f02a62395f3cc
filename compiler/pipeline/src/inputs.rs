//! Inputs of a compilation.

use super::{Compilation, Stops};
use moec_base::error::{Error, Result};
use moec_base::paths::{KERNELS, TOKENIZER};
use moec_base::progress::Progress;
use moec_config::Config;
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

/// Most bytes of logits that one call may give: a longer chunk gives fewer rows per call.
const LOGITS_BYTES: usize = 64 << 20;

/// Inputs of a compilation: the user's options, and measurements. No pass changes them.
#[derive(Clone, Debug)]
pub struct Inputs<'a> {
    /// Options of the user.
    pub config: &'a Config,
    /// Model to compile.
    pub start: Start<'a>,
    /// For which CPU.
    pub target: &'a CpuTarget,
    /// All units of the device.
    pub list: UnitList<'a>,
    /// The units that share the model, where graphs are static; `None` where shapes are dynamic.
    pub units: Option<Units<'a>>,
    /// Profile of the calibration. Static graphs need it.
    pub profile: Option<&'a Profile>,
    /// Measures what a placement costs in quality, where the user states what it may cost.
    pub quality: Option<&'a dyn QualityProbe>,
    /// Formats of weights that are not those of their classes.
    pub formats: Formats,
    /// Below which gates after SiLU become 0, where they do.
    pub thresholds: Thresholds,
    /// No rule applies: weights and nodes stay what `lower` made of them, for who looks at them by name.
    pub as_lowered: bool,
}

/// Start of a compilation.
#[derive(Clone, Copy, Debug)]
pub enum Start<'a> {
    /// A checkpoint, and what import made of it.
    Checkpoint(&'a Checkpoint, &'a ModelSpec),
    /// A Graph that has been through the first passes already, of this model: a bundle's, or one in a file.
    Graph(&'a ModelInfo),
}

/// A placement whose cost in quality is requested.
#[derive(Clone, Copy, Debug)]
pub struct Candidate<'a> {
    /// The Graph, without capacities.
    pub module: &'a Module,
    /// The model.
    pub model: &'a ModelInfo,
    /// The capacities.
    pub placement: &'a Placement,
}

/// A Graph that computes nearly what another computes, whose cost in quality is requested.
#[derive(Clone, Copy)]
pub struct Change<'a> {
    /// The Graph without the change.
    pub exact: &'a Module,
    /// The Graph with it.
    pub changed: &'a Module,
    /// The model.
    pub model: &'a ModelInfo,
    /// Source of the weights of either.
    pub source: &'a dyn Source,
}

/// Measures what a placement, or another change, costs in quality.
pub trait QualityProbe: std::fmt::Debug {
    /// By how much perplexity on held-out text rises, as a share, when experts have the capacities of a placement.
    ///
    /// # Errors
    /// The model cannot be run so.
    fn perplexity_increase(&self, candidate: &Candidate<'_>) -> Result<f64>;

    /// By how much it rises, as a share, with a change of the Graph.
    ///
    /// # Errors
    /// The model cannot be run so.
    fn increase_by(&self, change: &Change<'_>) -> Result<f64>;
}

impl<'a> Inputs<'a> {
    /// A model of a checkpoint, for the CPU of a target alone, without a profile.
    pub fn new(
        config: &'a Config,
        checkpoint: &'a Checkpoint,
        spec: &'a ModelSpec,
        target: &'a CpuTarget,
    ) -> Self {
        Self::begin(config, Start::Checkpoint(checkpoint, spec), target)
    }

    /// A model whose Graph there is.
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
            as_lowered: false,
        }
    }

    /// The checkpoint.
    ///
    /// # Errors
    /// Our bug: a compilation of a Graph has none.
    pub fn checkpoint(&self) -> Result<&'a Checkpoint> {
        match self.start {
            Start::Checkpoint(checkpoint, _) => Ok(checkpoint),
            Start::Graph(_) => Err(Error::bug("a Graph is compiled, and no checkpoint")),
        }
    }

    /// Specification that import made of the checkpoint.
    ///
    /// # Errors
    /// Our bug: a compilation of a Graph has none.
    pub fn spec(&self) -> Result<&'a ModelSpec> {
        match self.start {
            Start::Checkpoint(_, spec) => Ok(spec),
            Start::Graph(_) => Err(Error::bug("a Graph is compiled, and no checkpoint")),
        }
    }

    /// The Graph as `lower` makes it.
    ///
    /// # Errors
    /// As of [`Compilation::run`].
    pub fn lowered(&self) -> Result<Module> {
        let own = Inputs::new(self.config, self.checkpoint()?, self.spec()?, self.target);
        let mut lowered = Compilation::new(own);
        let stops = Stops { stop_after: Some("lower"), ..Stops::default() };
        lowered.run(stops, &Progress::silent(), &mut |_| {})?;
        Ok(lowered.module)
    }

    /// Files beside weights that the runtime reads.
    pub(super) fn artifacts(&self) -> Result<Vec<&'static str>> {
        let tokenizer = self.tokenizer()?.map(|_| TOKENIZER);
        Ok([KERNELS].into_iter().chain(tokenizer).collect())
    }

    /// The checkpoint's tokenizer, if it has one.
    ///
    /// # Errors
    /// One that cannot be used with this model.
    pub fn tokenizer(&self) -> Result<Option<&'a [u8]>> {
        match self.start {
            Start::Checkpoint(checkpoint, spec) => checkpoint.tokenizer(spec),
            Start::Graph(_) => Ok(None),
        }
    }

    /// Sizes that this build fixes.
    ///
    /// # Errors
    /// A context that the model does not have; our bug: those of a Graph are fixed.
    pub fn shapes(&self) -> Result<lower::Shapes> {
        let spec = self.spec()?;
        let shapes = self.config.shapes_for(spec.max_positions)?;
        let row = spec.vocab.max(1) * 4;
        let fit = LOGITS_BYTES / row;
        let rows = shapes.prefill_chunk;
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

    /// Facts about the model in a plan.
    ///
    /// # Errors
    /// A model or a shape past what a plan can hold.
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
                Some(experts) => {
                    Some(BigLittle { experts: int(experts)?, gamma: self.config.decode.gamma as f32 })
                }
                None => None,
            },
            thresholded: (!self.thresholds.by_layer.is_empty()).then_some(self.thresholds.percent),
        })
    }
}

/// The token before every text, where the tokenizer's configuration requires one.
///
/// # Errors
/// One that the model does not have.
pub fn first_token(checkpoint: &Checkpoint, spec: &ModelSpec) -> Result<Option<u32>> {
    let config = checkpoint.tokenizer_config()?;
    let asks = config.map(|c| c.flag_or("add_bos_token", false)).transpose()?.unwrap_or(false);
    match spec.bos.filter(|_| asks) {
        Some(bos) if bos as usize >= spec.vocab => {
            Err(Error::input(format!("`bos_token_id` is {bos}, but the model has {} tokens", spec.vocab))
                .because("`add_bos_token` in `tokenizer_config.json` puts it before every text")
                .hint("the configuration files are not of this model: download them again"))
        }
        bos => Ok(bos),
    }
}
