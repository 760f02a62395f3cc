//! A model on its way through the pipeline.

use super::{Inputs, IrLevel};
use moec_backend::HotLayer;
use moec_base::error::{Error, Result};
use moec_costs::units::{UnitList, Units};
use moec_cpu::gpu::Kernel;
use moec_cpu::{CpuTarget, KernelSpec};
use moec_import::Checkpoint;
use moec_ir::placement::Placement;
use moec_ir::plan::Plan;
use moec_ir::{Module, WeightId};
use moec_passes::assign_units::UnitAssignment;
use moec_passes::decisions::{Decision, Decisions};
use moec_passes::hot::HotShare;
use moec_passes::outline_graphs::Statics;
use moec_passes::trained::Trained;
use moec_passes::tune::KernelTimer;
use moec_profile::Profile;
use moec_profile::loads::Loads;

/// A model on its way through the compiler: what it is made from, and what passes made of it so far, stage by stage.
#[derive(Debug)]
pub struct Compilation<'a> {
    /// Inputs.
    pub inputs: Inputs<'a>,
    /// Times kernels, where tuning was requested.
    pub timer: Option<Box<dyn KernelTimer + 'a>>,
    /// The Graph, from `lower` on.
    pub module: Module,
    /// Placement of all parts, from `tier` on.
    pub placed: Placed,
    /// Experts as neurons, from `cluster` on.
    pub neurons: Neurons,
    /// The Plan, from `layout` on.
    pub planned: Option<Planned>,
    /// IR that the last pass has changed.
    pub(super) ir_level: IrLevel,
}

/// Placement of all parts.
#[derive(Clone, Debug)]
pub struct Placed {
    /// Loads of the experts in chunks of the build, where graphs are static. `tier` takes those of the profile unless others
    /// were given.
    pub loads: Option<Loads>,
    /// Placement on units with static graphs. Where graphs are not static, but a placement was given, experts
    /// keep its capacities, and are all computed on the CPU.
    pub placement: Option<Placement>,
    /// Unit of attention and the reason, where `assign_residency` decided it by the costs of a request.
    pub attention: Option<Decision>,
    /// Which units run the experts of each layer, and why, where `assign_units` decided that.
    pub of_experts: Vec<Decision>,
    /// What static graphs compute, from `outline_graphs` on.
    pub statics: Statics,
    /// Decisions of legalisation on them.
    pub legalised: Vec<Decision>,
    /// Units of the rest, from `assign_units` on.
    pub assignment: UnitAssignment,
}

/// Experts as neurons.
#[derive(Clone, Debug, Default)]
pub struct Neurons {
    /// Hot neurons by layer and batch, where another unit computes densely.
    pub shares: Vec<HotShare>,
    /// Those that become networks, with the neurons of each expert, the hottest first, where the user asks for it.
    pub networks: Vec<(HotLayer, Vec<Vec<u32>>)>,
    /// Decisions on reads of experts on disk, and on predictors.
    pub decisions: Vec<Decision>,
    /// Numbers that were computed for weights of their own.
    pub trained: Trained,
}

/// Planned Plan, with what it is made of.
#[derive(Clone, Debug)]
pub struct Planned {
    /// The Plan.
    pub plan: Plan,
    /// Whether it has dependencies between steps: from `barriers` on.
    pub ordered: bool,
    /// Its kernels.
    pub kernels: Vec<KernelSpec>,
    /// GPU kernels, in the order of its launches.
    pub gpu_kernels: Vec<Kernel>,
    /// Weight that each of its segments packs.
    pub segment_weights: Vec<WeightId>,
    /// Reasons for the choice of kernels, from `tune` on.
    pub decisions: Option<Decisions>,
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
    /// GPU kernels, in the order of the plan's launches.
    pub gpu_kernels: Vec<Kernel>,
    /// Weight that each segment of the plan packs.
    pub segment_weights: Vec<WeightId>,
    /// Numbers that passes computed for weights of their own.
    pub trained: Trained,
    /// All units of the device.
    pub list: UnitList<'a>,
    /// Units of what static graphs leave.
    pub assignment: UnitAssignment,
    /// The units that share the model, where graphs are static.
    pub units: Option<Units<'a>>,
    /// Placement, where graphs are static.
    pub placement: Option<Placement>,
    /// Hot neurons that become networks, with the neurons of each expert, the hottest first.
    pub hot_neurons: Vec<(HotLayer, Vec<Vec<u32>>)>,
    /// Profile with rows, and the Graph that names their weights, where graphs are static and calibration kept rows.
    pub samples: Option<(&'a Profile, Module)>,
    /// Reasons for all of this.
    pub decisions: Decisions,
}

impl<'a> Compilation<'a> {
    /// A model before its first pass.
    pub fn new(inputs: Inputs<'a>) -> Self {
        Self::of_graph(inputs, Module::default())
    }

    /// A model whose Graph there is: some pass after `lower` is its first.
    pub fn of_graph(inputs: Inputs<'a>, module: Module) -> Self {
        let placed = Placed {
            loads: None,
            placement: None,
            attention: None,
            of_experts: Vec::new(),
            statics: Statics::default(),
            legalised: Vec::new(),
            assignment: UnitAssignment::all_on_cpu(&inputs.list),
        };
        let (neurons, ir_level) = (Neurons::default(), IrLevel::Graph);
        Self { inputs, timer: None, module, placed, neurons, planned: None, ir_level }
    }

    /// Parts that a bundle is written of.
    ///
    /// # Errors
    /// Our bugs: a compilation of a Graph, or one that passes were left out of.
    pub fn finish(self) -> Result<Compiled<'a>> {
        let Self { inputs, module, placed, neurons, planned, .. } = self;
        let recorded = inputs.profile.filter(|p| inputs.units.is_some() && !p.samples.is_empty());
        let samples = match recorded {
            Some(profile) => Some((profile, inputs.lowered()?)),
            None => None,
        };
        let planned = planned.ok_or_else(|| Error::bug("there is no plan yet"))?;
        Ok(Compiled {
            checkpoint: inputs.checkpoint()?,
            tokenizer: inputs.tokenizer()?,
            target: inputs.target,
            module,
            plan: planned.plan,
            kernels: planned.kernels,
            gpu_kernels: planned.gpu_kernels,
            segment_weights: planned.segment_weights,
            trained: neurons.trained,
            list: inputs.list,
            assignment: placed.assignment,
            units: inputs.units,
            placement: placed.placement,
            hot_neurons: neurons.networks,
            samples,
            decisions: planned.decisions.ok_or_else(|| Error::bug("nothing was decided"))?,
        })
    }

    /// Plan of the passes so far.
    ///
    /// # Errors
    /// Before `layout` there is nothing.
    pub fn planned(&self) -> Result<&Planned> {
        self.planned.as_ref().ok_or_else(|| Error::bug("there is no plan yet"))
    }

    /// The plan.
    ///
    /// # Errors
    /// Before `layout` there is none.
    pub fn plan(&self) -> Result<&Plan> {
        self.planned().map(|planned| &planned.plan)
    }

    /// Text of what the last pass that ran has changed.
    pub fn text(&self) -> String {
        match (self.ir_level, &self.placed.placement, &self.planned) {
            (IrLevel::Placement, Some(placement), _) => placement.to_string(),
            (IrLevel::Plan, _, Some(planned)) => planned.plan.to_string(),
            _ => self.module.to_string(),
        }
    }

    pub(super) fn verify(&self) -> Result<()> {
        moec_ir::verify::module(&self.module).map_err(|e| Error::bug(e.to_string()))?;
        if let Some(placement) = &self.placed.placement {
            moec_ir::verify::placement(placement).map_err(|e| Error::bug(e.to_string()))?;
        }
        let Some(planned) = &self.planned else { return Ok(()) };
        let check =
            if planned.ordered { moec_ir::verify::plan } else { moec_ir::verify::unsynchronized_plan };
        check(&planned.plan).map_err(|e| Error::bug(e.to_string()))
    }
}
