//! A model compiled for the machine that moec runs on, in place of the one that it was compiled for.
//!
//! The twin of a bundle computes what the bundle computes: the same Graph, the same split between static graphs and
//! processor, the bundle's own weights. Only its kernels are this machine's, with activations in f32, and static graphs
//! are executed by who emulates their unit. Its weights lie in a folder that goes away with it.

use crate::bundle::read::Bundle;
use crate::bundle::write::{Packing, pack};
use crate::bundle::{DENSE, EXPERTS, KERNELS};
use crate::config::Activations;
use crate::error::{Error, Result};
use crate::passes::offload::Statics;
use crate::passes::{barriers, layout, memory, schedule, tune};
use crate::progress::Progress;
use crate::scratch::Scratch;
use crate::verify::weights::{Packed, read_from_bundle};
use moec_cpu::HostUnit;
use moec_ir::plan::{ModelInfo, Plan};
use moec_ir::{Format, Module, Source};
use moec_runtime::graphs::Graphs;
use moec_runtime::{CheckLevel, Engine, LoadedProgram, Options};
use std::fs;
use std::path::Path;

/// What to compile.
#[derive(Clone, Copy)]
pub struct Original<'a> {
    /// The Graph, behind `offload`.
    pub module: &'a Module,
    /// Where its weights come from.
    pub source: &'a dyn Source,
    /// The model.
    pub model: &'a ModelInfo,
    /// Format of the KV cache.
    pub cache: Format,
    /// What static graphs compute.
    pub statics: &'a Statics,
}

/// A compiled model.
pub struct Twin {
    scratch: Scratch,
    program: LoadedProgram,
    /// The program's code; held as long as it runs.
    _unit: HostUnit,
}

impl Twin {
    /// Compiles `original` for this machine and packs its weights.
    ///
    /// # Errors
    /// A disk without room for the weights, a weight that cannot be read, an interrupt.
    pub fn new(original: &Original<'_>, progress: &Progress) -> Result<Self> {
        let Original { module, source, model, cache, statics } = *original;
        let target = crate::build::target("native")?.with_activations(Activations::F32);
        let draft = layout::layout(module, model.clone(), &target, cache, &[], statics)?;
        let (mut plan, mut kernels, mut writes) = (draft.plan, draft.kernels, draft.writes);
        tune::tune(&mut plan, &mut kernels, &target, None)?;
        schedule::schedule(&mut plan, &mut writes);
        memory::memory(&mut plan);
        barriers::barriers(&mut plan, &writes);
        // Units are those of the original.
        let units = plan.sets.iter().any(|s| !s.groups.is_empty());
        plan.target.units.resize(1 + usize::from(units) * statics.unit as usize, "npu".to_owned());
        plan.files.retain(|f| [DENSE, EXPERTS].contains(&f.path.as_str()));

        let scratch = Scratch::create("emulate a unit", &plan)?;
        let weights = scratch.path().join("weights");
        fs::create_dir(&weights).map_err(|e| crate::bundle::partial::io_error("create", &weights, &e))?;
        let packing = Packing { module, segment_weights: &draft.segment_weights, source, importance: None };
        pack(&packing, &mut plan, scratch.path(), progress)?;
        let object =
            target.compile(&kernels).map_err(|e| Error::bug("the kernels do not compile").because(e))?;
        let unit = HostUnit::load(&object, &plan.target)
            .map_err(|e| Error::environment(format!("`{KERNELS}` does not load here")).because(e))?;
        let program = LoadedProgram::from_plan(&plan, &|symbol| unit.resolve(symbol)).map_err(Error::from)?;
        Ok(Self { scratch, program, _unit: unit })
    }

    /// The twin of a bundle.
    ///
    /// # Errors
    /// As [`Twin::new`]; a bundle without its Graph.
    pub fn of(bundle: &Bundle, progress: &Progress) -> Result<Self> {
        let mut module = bundle.graph()?;
        read_from_bundle(&mut module);
        let source = Packed::open(bundle)?;
        let plan = &bundle.plan;
        let statics = statics(plan);
        let cache = plan.states.first().map_or(Format::F32, |s| s.format);
        let original =
            Original { module: &module, source: &source, model: &plan.model, cache, statics: &statics };
        Self::new(&original, progress)
    }

    /// The program.
    pub fn program(&self) -> &LoadedProgram {
        &self.program
    }

    /// Folder of its weights.
    pub fn folder(&self) -> &Path {
        self.scratch.path()
    }

    /// Runs `body` with an engine; `graphs` executes what the packages in a bundle hold.
    ///
    /// # Errors
    /// An engine that does not open, and what `body` returns.
    pub fn with_engine<T>(
        &self,
        graphs: Option<(Box<dyn Graphs>, &Path)>,
        body: impl FnOnce(&mut Engine<'_>) -> Result<T>,
    ) -> Result<T> {
        let options = Options { threads: None, check: CheckLevel::default(), stop: None };
        self.program.with(|program| {
            let engine = match graphs {
                Some((graphs, packages)) => {
                    Engine::with_graphs(program, self.folder(), graphs, packages, options)
                }
                None => Engine::open(program, self.folder(), options),
            };
            body(&mut engine.map_err(Error::from)?)
        })
    }
}

/// What a plan says of static graphs.
fn statics(plan: &Plan) -> Statics {
    let unit = plan.entries.iter().flat_map(|e| &e.steps).map(|s| s.unit).max().unwrap_or(0);
    Statics { graphs: plan.graphs.clone(), sets: plan.sets.clone(), unit }
}
