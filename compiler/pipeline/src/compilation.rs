//! A model in the pipeline.

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
use moec_passes::trained::TrainedTensors;
use moec_passes::tune::KernelTimer;
use moec_profile::Profile;
use moec_profile::loads::Loads;

/// State of a compilation: its inputs, and the results of the passes so far, stage by stage.
#[derive(Debug)]
pub struct Compilation<'a> {
    /// Inputs.
    pub inputs: Inputs<'a>,
    /// Times kernels, if tuning was requested.
    pub timer: Option<Box<dyn KernelTimer + 'a>>,
    /// The Graph, from `lower` on.
    pub module: Module,
    /// Placement of all parts, from `tier` on.
    pub placed: Placed,
    /// Experts as neurons, from `cluster` on.
    pub neurons: Neurons,
    /// The Plan, from `layout` on.
    pub planned: Option<Planned>,
    /// IR that the last pass changed.
    pub(super) ir_level: IrLevel,
}

/// Placement of all parts of the model.
#[derive(Clone, Debug)]
pub struct Placed {
    /// Loads of the experts in chunks of the build, for static graphs. `tier` takes those of the profile
    /// unless others were given.
    pub loads: Option<Loads>,
    /// Placement on units with static graphs. If there are no static graphs but a placement was given,
    /// experts keep its capacities, and all run on the CPU.
    pub placement: Option<Placement>,
    /// Unit of attention and the reason, if `assign_residency` decided it by the costs of a request.
    pub attention: Option<Decision>,
    /// Units of each layer's experts, with reasons, if `assign_units` decided them.
    pub of_experts: Vec<Decision>,
    /// Static graphs and their contents, from `outline_graphs` on.
    pub statics: Statics,
    /// Decisions of legalisation on static graphs.
    pub legalised: Vec<Decision>,
    /// Units of everything outside of static graphs, from `assign_units` on.
    pub assignment: UnitAssignment,
}

/// Experts as neurons.
#[derive(Clone, Debug, Default)]
pub struct Neurons {
    /// Hot neurons by layer and batch, if another unit computes them densely.
    pub shares: Vec<HotShare>,
    /// Hot neurons that become networks, with the neurons of each expert, the hottest first, if the user
    /// requests networks.
    pub networks: Vec<(HotLayer, Vec<Vec<u32>>)>,
    /// Decisions on reads of experts on disk, and on predictors.
    pub decisions: Vec<Decision>,
    /// Numbers that passes computed for separate weights.
    pub trained: TrainedTensors,
}

/// The Plan, with the data that it is made from.
#[derive(Clone, Debug)]
pub struct Planned {
    /// The Plan.
    pub plan: Plan,
    /// True if it has dependencies between steps: from `barriers` on.
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

/// A compiled model: the contents of a bundle.
#[derive(Debug)]
pub struct Compiled<'a> {
    /// The checkpoint.
    pub checkpoint: &'a Checkpoint,
    /// Its tokenizer, if it has one.
    pub tokenizer: Option<&'a [u8]>,
    /// CPU that it was compiled for.
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
    /// Numbers that passes computed for separate weights.
    pub trained: TrainedTensors,
    /// All units of the device.
    pub list: UnitList<'a>,
    /// Units of everything outside of static graphs.
    pub assignment: UnitAssignment,
    /// The units that share the model, if there are static graphs.
    pub units: Option<Units<'a>>,
    /// Placement, if there are static graphs.
    pub placement: Option<Placement>,
    /// Hot neurons that become networks, with the neurons of each expert, the hottest first.
    pub hot_neurons: Vec<(HotLayer, Vec<Vec<u32>>)>,
    /// Profile with rows, and the Graph that names their weights, if there are static graphs and calibration
    /// kept rows.
    pub samples: Option<(&'a Profile, Module)>,
    /// Reasons for all choices.
    pub decisions: Decisions,
}

impl<'a> Compilation<'a> {
    /// A model before its first pass.
    pub fn new(inputs: Inputs<'a>) -> Self {
        Self::of_graph(inputs, Module::default())
    }

    /// A model that starts from a Graph: its first pass comes after `lower`.
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

    /// Returns the contents of a bundle.
    ///
    /// # Errors
    /// Bugs of the compiler: a compilation that started from a Graph, or one that skipped passes.
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
    /// Fails before `layout`.
    pub fn planned(&self) -> Result<&Planned> {
        self.planned.as_ref().ok_or_else(|| Error::bug("there is no plan yet"))
    }

    /// The plan.
    ///
    /// # Errors
    /// Fails before `layout`.
    pub fn plan(&self) -> Result<&Plan> {
        self.planned().map(|planned| &planned.plan)
    }

    /// Text of the IR that the last pass changed.
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
