//! A model on its way through the pipeline.

use super::{Prints, Stops};
use moec_base::error::{Error, Result};
use moec_base::paths::{KERNELS, TOKENIZER};
use moec_base::progress::Progress;
use moec_config::Config;
use moec_costs::units::{UnitList, Units, Wish};
use moec_cpu::threads::Kernel;
use moec_cpu::{CpuTarget, KernelSpec};
use moec_family::HotLayer;
use moec_import::{Checkpoint, ModelSpec};
use moec_ir::placement::Placement;
use moec_ir::plan::{BigLittle, ModelInfo, Plan};
use moec_ir::{Module, Source, WeightId};
use moec_passes::decisions::{AttentionDecision, Decisions, FlashDecision, HotShare, PredictorDecision};
use moec_passes::format::Formats;
use moec_passes::home::Homes;
use moec_passes::lower;
use moec_passes::offload::Statics;
use moec_passes::rewrite::Applied;
use moec_passes::threshold::Thresholds;
use moec_passes::trained::Trained;
use moec_passes::tune::KernelTimer;
use moec_profile::Profile;
use moec_profile::loads::Loads;

/// Most bytes of logits that one call may give: a longer chunk gives fewer rows per call.
const LOGITS_BYTES: usize = 64 << 20;

/// A model on its way through the compiler.
#[derive(Debug)]
pub struct Compilation<'a> {
    /// What the user asked for.
    pub config: &'a Config,
    /// What is compiled.
    pub start: Start<'a>,
    /// For which CPU.
    pub target: &'a CpuTarget,
    /// The Graph, from `lower` on.
    pub module: Module,
    /// The units that share the model, where graphs are static; `None` where shapes are dynamic.
    pub units: Option<Units<'a>>,
    /// What calibration saw. Static graphs need it.
    pub profile: Option<&'a Profile>,
    /// Measures what a placement costs in quality, where the user states what it may cost.
    pub quality: Option<&'a dyn QualityProbe>,
    /// Loads of the experts in chunks of the build, from `tier` on where graphs are static. `tier` takes those of the profile
    /// where nobody has given others.
    pub loads: Option<Loads>,
    /// Where things run, from `tier` on where graphs are static. Where they are not, but somebody has given a placement,
    /// experts keep its capacities, and are all computed on the processor.
    pub placement: Option<Placement>,
    /// What a request costs with attention on either unit, from `reside` on where that decides.
    pub attention: Option<AttentionDecision>,
    /// What static graphs compute, from `offload` on.
    pub statics: Statics,
    /// Hot neurons by layer and batch, from `cluster` on where another unit computes densely.
    pub hot: Vec<HotShare>,
    /// Those that become networks, with the neurons of each expert, the hottest first: from `cluster` on where the user asks for it.
    pub hot_neurons: Vec<(HotLayer, Vec<Vec<u32>>)>,
    /// How experts on flash are read, from `cluster` on where there was a choice.
    pub on_flash: Option<FlashDecision>,
    /// Predictors of neurons, from `predict` on where they were asked for.
    pub predictors: Vec<PredictorDecision>,
    /// What they cost in quality, where that was measured.
    pub predictors_increase: Option<f64>,
    /// Numbers that passes computed for weights of their own.
    pub trained: Trained,
    /// All units of the device.
    pub list: UnitList<'a>,
    /// Where the rest lives, from `home` on.
    pub homes: Homes,
    /// The Plan, from `layout` on.
    pub plan: Option<Plan>,
    /// Whether the plan says who waits for whom: from `barriers` on.
    pub ordered: bool,
    /// Kernels of the plan.
    pub kernels: Vec<KernelSpec>,
    /// Kernels of threads, in the order of the plan's launches.
    pub thread_kernels: Vec<Kernel>,
    /// Weight that each segment of the plan packs.
    pub segment_weights: Vec<WeightId>,
    /// Times kernels, where the build was asked to.
    pub timer: Option<Box<dyn KernelTimer + 'a>>,
    /// Why kernels are what they are, from `tune` on.
    pub decisions: Option<Decisions>,
    /// How often each rewrite rule applied.
    pub applied: Applied,
    /// No rule applies: weights and nodes stay what `lower` made of them, for who looks at them by name.
    pub as_lowered: bool,
    /// Formats of weights that are not those of their classes.
    pub formats: Formats,
    /// Below which gates behind SiLU become 0, where they do.
    pub thresholds: Thresholds,
    /// What the last pass that ran has changed.
    pub(super) prints: Prints,
}

/// What a compilation begins with.
#[derive(Clone, Copy, Debug)]
pub enum Start<'a> {
    /// A checkpoint, and what import made of it.
    Checkpoint(&'a Checkpoint, &'a ModelSpec),
    /// A Graph that has been through the first passes already, of this model: a bundle's, or one in a file.
    Graph(&'a ModelInfo),
}

/// A model that the pipeline has compiled: what a bundle is written of.
#[derive(Debug)]
pub struct Compiled<'a> {
    /// The checkpoint.
    pub checkpoint: &'a Checkpoint,
    /// Its tokenizer, if it has one.
    pub tokenizer: Option<&'a [u8]>,
    /// For which CPU.
    pub target: &'a CpuTarget,
    /// The Graph.
    pub module: Module,
    /// The Plan.
    pub plan: Plan,
    /// Kernels of the plan.
    pub kernels: Vec<KernelSpec>,
    /// Kernels of threads, in the order of the plan's launches.
    pub thread_kernels: Vec<Kernel>,
    /// Weight that each segment of the plan packs.
    pub segment_weights: Vec<WeightId>,
    /// Numbers that passes computed for weights of their own.
    pub trained: Trained,
    /// All units of the device.
    pub list: UnitList<'a>,
    /// Where what static graphs leave lives.
    pub homes: Homes,
    /// The units that share the model, where graphs are static.
    pub units: Option<Units<'a>>,
    /// Where things run, where graphs are static.
    pub placement: Option<Placement>,
    /// Hot neurons that become networks, with the neurons of each expert, the hottest first.
    pub hot_neurons: Vec<(HotLayer, Vec<Vec<u32>>)>,
    /// Where graphs are static and calibration kept rows: the profile that has them, and the Graph that names their weights.
    pub samples: Option<(&'a Profile, Module)>,
    /// Why all of this is what it is.
    pub decisions: Decisions,
}

/// A placement whose cost in quality is asked for.
#[derive(Clone, Copy, Debug)]
pub struct Candidate<'a> {
    /// The Graph, without capacities.
    pub module: &'a Module,
    /// The model.
    pub model: &'a ModelInfo,
    /// The capacities.
    pub placement: &'a Placement,
}

/// A Graph that computes nearly what another computes, whose cost in quality is asked for.
#[derive(Clone, Copy)]
pub struct Change<'a> {
    /// The Graph without the change.
    pub exact: &'a Module,
    /// The Graph with it.
    pub changed: &'a Module,
    /// The model.
    pub model: &'a ModelInfo,
    /// Where the weights of either come from.
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

impl<'a> Compilation<'a> {
    /// A model before its first pass.
    pub fn new(
        config: &'a Config,
        checkpoint: &'a Checkpoint,
        spec: &'a ModelSpec,
        target: &'a CpuTarget,
    ) -> Self {
        Self::begin(config, Start::Checkpoint(checkpoint, spec), target, Module::default())
    }

    /// A model whose Graph there is: some pass behind `lower` is its first.
    pub fn of_graph(config: &'a Config, model: &'a ModelInfo, target: &'a CpuTarget, module: Module) -> Self {
        Self::begin(config, Start::Graph(model), target, module)
    }

    fn begin(config: &'a Config, start: Start<'a>, target: &'a CpuTarget, module: Module) -> Self {
        Self {
            config,
            start,
            target,
            module,
            units: None,
            profile: None,
            quality: None,
            loads: None,
            placement: None,
            attention: None,
            statics: Statics::default(),
            hot: Vec::new(),
            hot_neurons: Vec::new(),
            on_flash: None,
            predictors: Vec::new(),
            predictors_increase: None,
            trained: Trained::default(),
            homes: Homes::at_home(&UnitList::of(target.device())),
            list: UnitList::of(target.device()),
            plan: None,
            ordered: false,
            kernels: Vec::new(),
            thread_kernels: Vec::new(),
            segment_weights: Vec::new(),
            timer: None,
            decisions: None,
            applied: Applied::new(),
            as_lowered: false,
            formats: Formats::new(),
            thresholds: Thresholds::default(),
            prints: Prints::Graph,
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

    /// What import made of the checkpoint.
    ///
    /// # Errors
    /// Our bug: a compilation of a Graph has none.
    pub fn spec(&self) -> Result<&'a ModelSpec> {
        match self.start {
            Start::Checkpoint(_, spec) => Ok(spec),
            Start::Graph(_) => Err(Error::bug("a Graph is compiled, and no checkpoint")),
        }
    }

    /// The Graph as `lower` makes it, whatever has become of it since.
    ///
    /// # Errors
    /// As of [`Compilation::run`].
    pub fn lowered(&self) -> Result<Module> {
        let mut own = Compilation::new(self.config, self.checkpoint()?, self.spec()?, self.target);
        let stops = Stops { stop_after: Some("lower"), ..Stops::default() };
        own.run(stops, &Progress::silent(), &mut |_| {})?;
        Ok(own.module)
    }

    /// What a bundle is written of.
    ///
    /// # Errors
    /// Our bugs: a compilation of a Graph, or one that passes were left out of.
    pub fn finish(self) -> Result<Compiled<'a>> {
        let recorded = self.profile.filter(|p| self.units.is_some() && !p.samples.is_empty());
        let samples = match recorded {
            Some(profile) => Some((profile, self.lowered()?)),
            None => None,
        };
        Ok(Compiled {
            checkpoint: self.checkpoint()?,
            tokenizer: self.tokenizer()?,
            samples,
            target: self.target,
            module: self.module,
            plan: self.plan.ok_or_else(|| Error::bug("there is no plan yet"))?,
            kernels: self.kernels,
            thread_kernels: self.thread_kernels,
            segment_weights: self.segment_weights,
            trained: self.trained,
            list: self.list,
            homes: self.homes,
            units: self.units,
            placement: self.placement,
            hot_neurons: self.hot_neurons,
            decisions: self.decisions.ok_or_else(|| Error::bug("nothing was decided"))?,
        })
    }

    /// The plan.
    ///
    /// # Errors
    /// Before `layout` there is none.
    pub fn plan(&self) -> Result<&Plan> {
        self.plan.as_ref().ok_or_else(|| Error::bug("there is no plan yet"))
    }

    /// Text of what the last pass that ran has changed.
    pub fn text(&self) -> String {
        match (self.prints, &self.placement, &self.plan) {
            (Prints::Placement, Some(placement), _) => placement.to_string(),
            (Prints::Plan, _, Some(plan)) => plan.to_string(),
            _ => self.module.to_string(),
        }
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
        let attention = self.list.wish("attention", &self.config.placement.attention);
        Ok(lower::Shapes {
            max_context: shapes.max_context,
            rings: Units::of(self.list.device).is_none() || attention.is_ok_and(|a| a == Wish::Processor),
            prefill_chunk: rows,
            prefill_out_rows,
            slots: shapes.decode_batch.iter().copied().max().unwrap_or(1),
            decode_batch: shapes.decode_batch,
            little: self.config.little(spec.experts_per_token())?,
        })
    }

    /// What a plan says of the model.
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
            silenced: (!self.thresholds.by_layer.is_empty()).then_some(self.thresholds.percent),
        })
    }

    pub(super) fn verify(&self) -> Result<()> {
        moec_ir::verify::module(&self.module).map_err(|e| Error::bug(e.to_string()))?;
        if let Some(placement) = &self.placement {
            moec_ir::verify::placement(placement).map_err(|e| Error::bug(e.to_string()))?;
        }
        let check = if self.ordered { moec_ir::verify::plan } else { moec_ir::verify::draft };
        self.plan.as_ref().map_or(Ok(()), |plan| check(plan).map_err(|e| Error::bug(e.to_string())))
    }

    pub(super) fn plan_mut(&mut self) -> Result<&mut Plan> {
        self.plan.as_mut().ok_or_else(|| Error::bug("there is no plan yet"))
    }
}

/// The token in front of every text, where the tokenizer's configuration asks for one.
///
/// # Errors
/// One that the model does not have.
pub fn first_token(checkpoint: &Checkpoint, spec: &ModelSpec) -> Result<Option<u32>> {
    let config = checkpoint.tokenizer_config()?;
    let asks = config.map(|c| c.flag_or("add_bos_token", false)).transpose()?.unwrap_or(false);
    match spec.bos.filter(|_| asks) {
        Some(bos) if bos as usize >= spec.vocab => {
            Err(Error::input(format!("`bos_token_id` is {bos}, but the model has {} tokens", spec.vocab))
                .because("`add_bos_token` in `tokenizer_config.json` puts it in front of every text")
                .hint("the configuration files are not of this model: download them again"))
        }
        bos => Ok(bos),
    }
}
