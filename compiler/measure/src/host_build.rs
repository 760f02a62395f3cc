//! A model compiled for the machine that moec runs on, in place of its target.
//!
//! The host build of a bundle computes what the bundle computes: the same Graph, the same split between
//! static graphs and CPU, the bundle's own weights. Only its kernels are this machine's, with activations in
//! f32. Static graphs are executed by emulators of their unit. Its weights are in a temporary folder, which
//! is removed with it.

use moec_base::error::{Error, Result, io_error};
use moec_base::paths::{KERNELS, has_weights};
use moec_base::progress::Progress;
use moec_base::scratch::Scratch;
use moec_bundle::objects::ObjectCache;
use moec_bundle::pack::{Packing, pack};
use moec_bundle::packed::{Packed, read_from_bundle};
use moec_bundle::read::Bundle;
use moec_config::{Activations, Config, KvCache};
use moec_costs::units::Units;
use moec_cpu::{HostUnit, Stored};
use moec_ir::placement::Placement;
use moec_ir::plan::{FileRef, ModelInfo, Paging, Plan, Segment, UnitRef};
use moec_ir::{Format, Module, Source};
use moec_passes::assign_units::UnitAssignment;
use moec_passes::outline_graphs::Statics;
use moec_pipeline::{Compilation, Inputs, Stops};
use moec_runtime::bundle::BundleReader;
use moec_runtime::{Engine, Options, Program};
use moec_targets::backends;
use std::fs;
use std::path::Path;
use std::rc::Rc;

/// Model to compile.
#[derive(Clone, Copy)]
pub struct Original<'a> {
    /// The Graph.
    pub module: &'a Module,
    /// Source of its weights.
    pub source: &'a dyn Source,
    /// Specification of the model.
    pub model: &'a ModelInfo,
    /// Format of the KV cache.
    pub cache: Format,
    /// Capacities of experts.
    pub experts: HostBuildExperts<'a>,
}

/// Capacities of the experts of a host build.
#[derive(Clone, Copy, Debug)]
pub enum HostBuildExperts<'a> {
    /// None, all rows are computed: the Graph is as it was before `outline_graphs`.
    Unbounded,
    /// The capacities of a placement, all of them computed on the CPU, before `outline_graphs`.
    Bounded(&'a Placement),
    /// The static graphs and the plan of a bundle: the Graph is as `outline_graphs` left it, and the plan has
    /// the placement of the rest. Experts that stay on disk in the bundle stay there in the host build, with
    /// as many in memory at once.
    Built(&'a Statics, &'a Plan),
}

/// Packed weights on disk. Host builds of one model can share them, even if they compute different things.
struct Weights {
    scratch: Scratch,
    segments: Vec<Segment>,
    files: Vec<FileRef>,
}

/// A compiled model.
pub struct HostBuild {
    weights: Rc<Weights>,
    program: Program,
    /// Code of the program, kept as long as the program runs.
    _unit: HostUnit,
}

impl HostBuild {
    /// Compiles `original` for this machine and packs its weights.
    ///
    /// # Errors
    /// Fails if the disk has too little room for the weights, if a weight cannot be read, or on an interrupt.
    pub fn new(original: &Original<'_>, progress: &Progress) -> Result<Self> {
        Self::sharing_weights(None, original, progress)
    }

    /// Like [`HostBuild::new`], but reuses the weights of another host build of the same model if they are
    /// packed alike.
    ///
    /// # Errors
    /// Those of [`HostBuild::new`].
    pub fn sharing_weights(
        other: Option<&Self>,
        original: &Original<'_>,
        progress: &Progress,
    ) -> Result<Self> {
        let Original { module, source, model, cache, experts } = *original;
        let target = moec_targets::target("native")?.with_activations(Activations::F32);
        let mut config = Config::defaults(Path::new(""));
        config.memory.kv_cache = KvCache::of(cache);
        // Nodes and values have the ids of the original.
        let inputs = Inputs { as_lowered: true, ..Inputs::of_graph(&config, model, &target) };
        let mut c = Compilation::of_graph(inputs, module.clone());
        let first = match experts {
            HostBuildExperts::Unbounded => "layout",
            HostBuildExperts::Bounded(placement) => {
                c.placed.placement = Some(placement.clone());
                "outline_graphs"
            }
            HostBuildExperts::Built(statics, plan) => {
                (c.placed.statics, c.placed.assignment) =
                    (statics.clone(), UnitAssignment::of_plan(plan, module));
                "layout"
            }
        };
        let stops = Stops { start_at: Some(first), ..Stops::default() };
        c.run(stops, &Progress::silent(), &mut |_| {})?;
        let planned = c.planned()?;
        let mut plan = planned.plan.clone();
        if let (Some(own), HostBuildExperts::Built(_, Plan { paging: Some(of), .. })) =
            (&mut plan.paging, experts)
        {
            *own = Paging {
                threads: of.threads,
                frames: of.frames,
                staging: of.staging,
                block_bytes: of.block_bytes,
                policy: of.policy.clone(),
                pinned: of.pinned.clone(),
                uses: of.uses.clone(),
                artifacts: of.artifacts.clone(),
                regions: of.regions.clone(),
                ..own.clone()
            };
        }
        plan.files.retain(|f| has_weights(&f.path));

        let weights = if let Some(other) = other.filter(|o| o.weights.segments == plan.segments) {
            Rc::clone(&other.weights)
        } else {
            let scratch = Scratch::create("emulate the bundle", &plan)?;
            let folder = scratch.path().join("weights");
            fs::create_dir(&folder).map_err(|e| io_error("create", &folder, &e))?;
            let (module, segment_weights) = (&c.module, &planned.segment_weights);
            // Weights that a bundle stores are rounded to the same groups again.
            let packing = Packing { module, segment_weights, source, importance: Some(&Stored), reuse: None };
            pack(&packing, &mut plan, scratch.path(), progress)?;
            Rc::new(Weights { scratch, segments: plan.segments.clone(), files: plan.files.clone() })
        };
        plan.files.clone_from(&weights.files);
        let object = target
            .compile(&planned.kernels, &ObjectCache::open())
            .map_err(|e| Error::bug("the kernels do not compile").because(e))?;
        let unit = HostUnit::load(&object, &plan.target)
            .map_err(|e| Error::environment(format!("`{KERNELS}` does not load here")).because(e))?;
        let program = Program::new(plan, &|symbol| unit.resolve(symbol)).map_err(Error::from)?;
        Ok(Self { weights, program, _unit: unit })
    }

    /// Creates the host build of a bundle.
    ///
    /// # Errors
    /// Those of [`HostBuild::new`]; also fails if the bundle has no Graph.
    pub fn of(bundle: &Bundle, progress: &Progress) -> Result<Self> {
        let mut module = bundle.graph()?;
        let source = Packed::open(bundle)?;
        read_from_bundle(&mut module, &source);
        let plan = &bundle.plan;
        let device = bundle.device()?;
        let statics = match Units::of(&device) {
            Some(units) => Statics::of(&module, &plan.placement, &units)?,
            None => Statics::default(),
        };
        if (&statics.graphs, &statics.sets, &statics.parts)
            != (&plan.graphs, &plan.expert_sets, &plan.subgraphs)
        {
            return Err(Error::input("plan and graph are of different builds").hint("build the bundle again"));
        }
        let cache = plan.cache_format().unwrap_or(Format::F32);
        let experts = HostBuildExperts::Built(&statics, plan);
        let original = Original { module: &module, source: &source, model: &plan.model, cache, experts };
        Self::new(&original, progress)
    }

    /// Plan that the program executes. Its nodes and values have the ids of the original's Graph.
    pub fn plan(&self) -> &Plan {
        &self.program
    }

    /// The program.
    pub fn program(&self) -> &Program {
        &self.program
    }

    /// Folder of its weights.
    pub fn folder(&self) -> &Path {
        self.weights.scratch.path()
    }

    /// Runs `body` with an engine. Accelerators are emulated as their backends do on this machine; `packages`
    /// is the files of the bundle that has the artifacts.
    ///
    /// # Errors
    /// Fails if the engine does not open; errors of `body` are returned.
    pub fn with_engine<T>(
        &self,
        packages: Option<&BundleReader>,
        body: impl FnOnce(&mut Engine<'_>) -> Result<T>,
    ) -> Result<T> {
        let (folder, host) = (self.folder(), &mut |unit: &UnitRef| backends::host(&unit.backend, &unit.name));
        let none = BundleReader::unchecked(folder);
        let packages = packages.unwrap_or(&none);
        let engine = Engine::with_units(&self.program, folder, host, packages, Options::default());
        body(&mut engine.map_err(Error::from)?)
    }
}
