//! Compares models in candidate formats with the model in its own formats, on text.
//!
//! Two models have the same format for most weights. So weights are packed one by one, once in each format. A
//! model is a plan over packed weights, of which only the missing ones are packed. Kernels run from
//! memory, and no bundle is written.

use crate::calibrate::texts::Window;
use crate::evaluate::{greedy, kl, log_probabilities};
use crate::job::Job;
use crate::quality::{Measured, cautious};
use moec_base::error::{Error, Result, io_error};
use moec_base::human;
use moec_base::paths::DENSE;
use moec_base::progress::Progress;
use moec_base::scratch::Scratch;
use moec_bundle::objects::ObjectCache;
use moec_bundle::pack::{Packing, pack};
use moec_config::{Activations, Config, KvCache};
use moec_cpu::{CpuTarget, HostUnit, WeightImportance};
use moec_ir::WeightExpr;
use moec_ir::plan::{ALIGN, FileRef, Memory, Plan, Segment, UnitRef};
use moec_passes::format::Formats;
use moec_pipeline::{Compilation, Inputs, Stops};
use moec_profile::{Importance, Profile};
use moec_runtime::bundle::BundleReader;
use moec_runtime::{Engine, Options, Program};
use moec_targets::backends;
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;
use std::time::Instant;

/// Comparison of a model with another.
#[derive(Clone, Debug, Default)]
pub(super) struct MixResult {
    /// Mean Kullback-Leibler divergence from the other's probabilities, in nats per token.
    pub(super) divergence: f64,
    /// Increase of the loss of each window, in nats per token.
    losses: Vec<f64>,
    /// Sum of the increases of all predicted tokens, in nats, and their number.
    pub(super) nats: f64,
    pub(super) predicted: u64,
    /// Number of these whose most probable token is the same.
    pub(super) same: u64,
}

impl MixResult {
    /// Increase of perplexity, as a share: the mean plus two standard errors.
    pub(super) fn increase(&self) -> f64 {
        cautious(&self.losses).exp_m1()
    }
}

/// Size of a measurement, known before it begins.
#[derive(Clone, Copy, Debug)]
pub(super) struct Extent {
    /// Most models that are built, with the one in the formats of its classes.
    pub(super) models: usize,
    /// Bytes of the weights with a choice, in the formats of their classes.
    pub(super) own: u64,
    /// Bytes of the same weights in their smallest formats, and in all of their formats together.
    pub(super) least: u64,
    pub(super) all: u64,
    /// Most bytes of all weights.
    pub(super) most: u64,
}

/// Packed weights that models share, each once in every format.
struct Store {
    scratch: Scratch,
    files: Vec<FileRef>,
    /// Packed weights and their locations, by name.
    packed: BTreeMap<String, Vec<(WeightExpr, Segment)>>,
}

impl Store {
    /// Points the segments of a compiled plan to packed weights. Missing weights are packed.
    fn place(
        &mut self,
        c: &Compilation<'_>,
        importance: &dyn WeightImportance,
        plan: &mut Plan,
        progress: &Progress,
    ) -> Result<()> {
        let of_segments = &c.planned()?.segment_weights;
        let expr = |i: usize| of_segments.get(i).map(|&w| &c.module.weight(w).expr);
        let mut missing = Vec::new();
        for (i, segment) in plan.segments.iter_mut().enumerate() {
            let same = |(of, at): &&(WeightExpr, Segment)| {
                let place = Segment { file: at.file, offset: at.offset, ..segment.clone() };
                expr(i) == Some(of) && place == *at
            };
            match self.packed.get(&segment.name).and_then(|all| all.iter().find(same)) {
                Some((_, at)) => *segment = at.clone(),
                None => missing.push(i),
            }
        }
        if !missing.is_empty() {
            let (file, mut end) = (self.files.len() as u32, 0_u64);
            let mut segments = Vec::new();
            for segment in missing.iter().filter_map(|&i| plan.segments.get(i)) {
                let offset = end.next_multiple_of(ALIGN);
                segments.push(Segment { file: 0, offset, ..segment.clone() });
                end = offset + segment.bytes;
            }
            let files = vec![FileRef { path: DENSE.to_owned(), bytes: 0, sha256: [0; 32] }];
            let memories = plan.memories.iter().map(|m| Memory { paging: None, ..m.clone() }).collect();
            let mut own = Plan { segments, files, memories, paging: None, ..plan.clone() };
            let folder = self.scratch.path().join(file.to_string());
            let parent = folder.join(Path::new(DENSE).parent().unwrap_or(Path::new("")));
            fs::create_dir_all(&parent).map_err(|e| io_error("create", &parent, &e))?;
            let weights: Vec<_> = missing.iter().filter_map(|&i| of_segments.get(i).copied()).collect();
            let packing = Packing {
                module: &c.module,
                segment_weights: &weights,
                source: c.inputs.checkpoint()?,
                importance: Some(importance),
                reuse: None,
            };
            pack(&packing, &mut own, &folder, progress)?;
            self.files
                .extend(own.files.into_iter().map(|f| FileRef { path: format!("{file}/{}", f.path), ..f }));
            for (&i, segment) in missing.iter().zip(own.segments) {
                let at = Segment { file, ..segment };
                if let (Some(expr), Some(segment)) = (expr(i), plan.segments.get_mut(i)) {
                    self.packed.entry(at.name.clone()).or_default().push((expr.clone(), at.clone()));
                    *segment = at;
                }
            }
        }
        // Files without any weight of this model are left out.
        let used: BTreeSet<u32> = plan.segments.iter().map(|s| s.file).collect();
        plan.files = used.iter().filter_map(|&f| self.files.get(f as usize).cloned()).collect();
        let numbers: BTreeMap<u32, u32> = used.into_iter().zip(0..).collect();
        for segment in &mut plan.segments {
            segment.file = numbers.get(&segment.file).copied().unwrap_or(segment.file);
        }
        Ok(())
    }
}

impl Store {
    /// Removes all files but the first ones, with the weights in them.
    fn forget(&mut self, first: usize) -> Result<()> {
        for file in first..self.files.len() {
            let folder = self.scratch.path().join(file.to_string());
            fs::remove_dir_all(&folder).map_err(|e| io_error("remove", &folder, &e))?;
        }
        self.files.truncate(first);
        for all in self.packed.values_mut() {
            all.retain(|(_, at)| (at.file as usize) < first);
        }
        Ok(())
    }
}

/// A model that can run.
struct Model {
    program: Program,
    bytes: u64,
    /// Code of the program, kept as long as the program runs.
    _unit: HostUnit,
}

impl Model {
    fn with_engine<T>(&self, folder: &Path, body: impl FnOnce(&mut Engine<'_>) -> Result<T>) -> Result<T> {
        let host = &mut |unit: &UnitRef| backends::host(&unit.backend, &unit.name);
        // Its files hold weights of other models, too, so only the weights that it reads are loaded.
        let options = Options { lazy: true, ..Options::default() };
        let mut engine =
            Engine::with_units(&self.program, folder, host, &BundleReader::unchecked(folder), options)
                .map_err(Error::from)?;
        body(&mut engine)
    }
}

/// Compiler of models. Activations are in f32, so that only the formats of weights matter.
struct Builder<'a> {
    original: &'a Inputs<'a>,
    config: Config,
    target: CpuTarget,
    profile: &'a Profile,
    progress: &'a Progress,
}

impl Builder<'_> {
    fn compile(&self, formats: &Formats) -> Result<Compilation<'_>> {
        let (checkpoint, spec) = (self.original.checkpoint()?, self.original.spec()?);
        let inputs = Inputs::new(&self.config, checkpoint, spec, &self.target);
        let mut c = Compilation::new(Inputs { formats: formats.clone(), ..inputs });
        c.run(Stops::default(), &Progress::silent(), &mut |_| {})?;
        moec_base::interrupt::check()?;
        Ok(c)
    }

    fn model(&self, c: &Compilation<'_>, store: &mut Store) -> Result<Model> {
        let profile = self.profile;
        let quantised = |w: &moec_ir::Weight| w.format.is_quantised();
        let importance =
            Importance::new(profile, &c.inputs.lowered()?, &c.module, c.inputs.checkpoint()?, quantised)?;
        let importance = importance.rounded(self.config.weights.rounding, profile.correlations.clone());
        let mut plan = c.plan()?.clone();
        store.place(c, &importance, &mut plan, self.progress)?;
        let bytes = bytes(&plan);
        let object = self.target.compile(&c.planned()?.kernels, &ObjectCache::open());
        let object = object.map_err(|e| Error::bug("the kernels do not compile").because(e))?;
        let unit = HostUnit::load(&object, &plan.target)
            .map_err(|e| Error::environment("the compiled kernels do not load here").because(e))?;
        let program = Program::new(plan, &|symbol| unit.resolve(symbol)).map_err(Error::from)?;
        Ok(Model { program, bytes, _unit: unit })
    }
}

fn bytes(plan: &Plan) -> u64 {
    plan.segments.iter().map(|s| s.bytes).sum()
}

/// Builder of models, which also compares them.
pub(super) struct Bench<'a> {
    builder: Builder<'a>,
    store: Store,
    windows: Vec<Window>,
    reference: Model,
    job: Job<'a>,
}

impl<'a> Bench<'a> {
    /// Builds the model in the formats of its classes, and returns the cost of measuring others.
    ///
    /// # Errors
    /// Fails if a model cannot be built here, or if no choice has the size. Also fails if the disk has too
    /// little room for the weights in all of their formats.
    pub(super) fn new(
        c: &'a Inputs<'a>,
        profile: &'a Profile,
        measured: &'a Measured<'a>,
        extent: Extent,
        progress: &'a Progress,
    ) -> Result<Self> {
        let mut config = Config::defaults(&c.config.path);
        config.model = c.config.model.clone();
        config.weights = c.config.weights.clone();
        config.shapes.max_context = Some(measured.window());
        config.shapes.prefill_chunk = Some(c.shapes()?.prefill_chunk.min(measured.window()));
        config.memory.kv_cache = KvCache::F32;
        let target = moec_targets::target("native")?.with_activations(Activations::F32);
        let builder = Builder { original: c, config, target, profile, progress };
        let compiled = builder.compile(&Formats::new())?;
        let models = extent.models;
        let own_bytes = bytes(compiled.plan()?);
        let fixed = own_bytes.saturating_sub(extent.own);
        super::check_size(extent.most, fixed + extent.least)?;
        let most = fixed + extent.all;
        let scratch = Scratch::with_room("choose formats", most)?;
        let bos = compiled.plan()?.model.bos;
        let windows = measured.windows(&measured.text(bos)?)?;
        progress.stage(
            "Measuring",
            &format!(
                "formats: up to {models} models are measured on {} windows of text, with up to {} of weights in `{}`, which are \
                 removed afterwards",
                windows.len(),
                human::bytes(most),
                scratch.path().display()
            ),
        );
        let mut store = Store { scratch, files: Vec::new(), packed: BTreeMap::new() };
        let start = Instant::now();
        let reference = builder.model(&compiled, &mut store)?;
        drop(compiled);
        let packing = start.elapsed().as_secs_f64() * (most as f64 / own_bytes.max(1) as f64 - 1.0);
        let start = Instant::now();
        reference.with_engine(store.scratch.path(), |engine| {
            let one = windows.first().map(|window| log_probabilities(engine, &window.ids));
            one.transpose().map_err(Error::from).map(|_| ())
        })?;
        // Both models of a comparison read every window.
        let others = models.saturating_sub(1);
        let reading = start.elapsed().as_secs_f64() * (2 * windows.len() * others) as f64;
        progress.stage(
            "Estimated",
            &format!("up to {} for {others} other models", human::duration(packing + reading)),
        );
        Ok(Self { builder, store, windows, reference, job: measured.job() })
    }

    /// Bytes of the weights in the formats of their classes.
    pub(super) fn bytes(&self) -> u64 {
        self.reference.bytes
    }

    /// Returns the bytes of the model in other formats, and its comparison on text.
    ///
    /// # Errors
    /// Fails if a model cannot be built or run here, or on an interrupt.
    pub(super) fn measure(&mut self, formats: &Formats) -> Result<(u64, MixResult)> {
        let model = self.builder.model(&self.builder.compile(formats)?, &mut self.store)?;
        Ok((model.bytes, self.compare(&model)?))
    }

    fn compare(&self, model: &Model) -> Result<MixResult> {
        let folder = self.store.scratch.path();
        let bar = self.builder.progress.items("Reading", self.windows.len() as u64, "windows of text");
        let found = self.reference.with_engine(folder, |exact| {
            model.with_engine(folder, |rounded| {
                let of_window = |at: usize| {
                    moec_base::interrupt::check()?;
                    let window = &self.windows[at];
                    let p = log_probabilities(exact, &window.ids).map_err(Error::from)?;
                    let q = log_probabilities(rounded, &window.ids).map_err(Error::from)?;
                    let divergence = p.iter().zip(&q).map(|(p, q)| kl(p, q)).sum::<f64>();
                    let predictions = p.iter().zip(&q).take(window.ids.len() - 1);
                    let same = predictions.filter(|(p, q)| greedy(p) == greedy(q)).count() as u64;
                    let next = window.ids.iter().skip(1);
                    let rise = p
                        .iter()
                        .zip(&q)
                        .zip(next)
                        .map(|((p, q), &id)| f64::from(p[id as usize] - q[id as usize]));
                    Ok((rise.sum::<f64>(), divergence, same, p.len()))
                };
                self.job.all(self.windows.len(), of_window, || bar.add(1))
            })
        })?;
        bar.finish();
        let (mut result, mut tokens) = (MixResult::default(), 0);
        for (window, (rise, divergence, same, rows)) in self.windows.iter().zip(found) {
            let predicted = window.ids.len() - 1;
            result.losses.push(rise / predicted.max(1) as f64);
            (result.nats, result.predicted) = (result.nats + rise, result.predicted + predicted as u64);
            (result.divergence, result.same) = (result.divergence + divergence, result.same + same);
            tokens += rows;
        }
        result.divergence /= tokens.max(1) as f64;
        Ok(result)
    }

    /// Compares the model with a KV cache of another form, with rotated heads or without, and reads passages that
    /// consist of the same tokens twice. Returns also the tokens of second halves that are the most probable ones.
    ///
    /// # Errors
    /// Those of [`Self::measure`].
    pub(super) fn measure_cache(
        &mut self,
        cache: KvCache,
        rotates: bool,
        passages: &[Vec<u32>],
    ) -> Result<(MixResult, u64)> {
        let memory = &mut self.builder.config.memory;
        (memory.kv_cache, memory.rotate_cache) = (cache, Some(rotates));
        let model = self.builder.compile(&Formats::new());
        let model = model.and_then(|compiled| self.builder.model(&compiled, &mut self.store));
        let memory = &mut self.builder.config.memory;
        (memory.kv_cache, memory.rotate_cache) = (KvCache::F32, None);
        let model = model?;
        let repeated = model.with_engine(self.store.scratch.path(), |engine| {
            let mut hits = 0;
            for ids in passages {
                moec_base::interrupt::check()?;
                let rows = log_probabilities(engine, ids).map_err(Error::from)?;
                let second = rows.iter().zip(ids.iter().skip(1)).skip(ids.len() / 2);
                hits += second.filter(|(row, id)| greedy(row) == **id as usize).count() as u64;
            }
            Ok(hits)
        })?;
        Ok((self.compare(&model)?, repeated))
    }

    /// Most tokens of a sequence of the models.
    pub(super) fn window(&self) -> usize {
        self.builder.config.shapes.max_context.unwrap_or(2)
    }

    /// Compares the model in formats and with a KV cache that no other model has. Removes its own weights afterwards.
    ///
    /// # Errors
    /// Those of [`Self::measure`].
    pub(super) fn measure_alone(&mut self, formats: &Formats, cache: KvCache) -> Result<MixResult> {
        let shared = self.store.files.len();
        let own = std::mem::replace(&mut self.builder.config.memory.kv_cache, cache);
        let found = self.measure(formats);
        self.builder.config.memory.kv_cache = own;
        self.store.forget(shared)?;
        Ok(found?.1)
    }
}
