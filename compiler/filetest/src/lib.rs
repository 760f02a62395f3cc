//! Filetests: one pass on one small file, which has the input and the expected output of the pass.
//!
//! ```text
//! ;! pass: prefetch_experts         the pass
//! ;! memory.budget = "17 MiB"       its options, as in model.toml
//! ; What the file shows.
//!
//! ;! graph                          the input
//! weight @embed: …
//! ;! expect                         the expected output; `expect error` if the pass must fail
//! …
//! ```
//!
//! A file goes through the same list as any compilation ([`moec_pipeline::PIPELINE`]), with the verifier
//! before and after each pass. The inputs are:
//!
//! * a `graph`;
//! * for passes that decide the placement, the `loads` of experts and the earlier `placement`;
//! * for `threshold`, the `thresholds` of layers, each as `LAYER = THRESHOLD`;
//! * for `cluster`, the `hot` neurons;
//! * for `lower`, the `config` and the `tensors` of a checkpoint in place of a Graph.
//!
//! Passes that change a Plan also begin with a Graph, and run after the passes from `layout` on, because a
//! Plan has no text form with all of its data. Their output is the changes of the Plan, line by line.
//!
//! Further keys of the header: `target` (x86-64-v3 by default; a device file in the same folder if it ends in
//! `.toml`), `from` (the first pass to run), and `show: changes` (the changes of a Graph instead of all of it).
#![expect(clippy::cast_possible_truncation, reason = "small graphs of tests")]

mod checkpoint;
mod parse;

use moec_backend::{HotBatch, HotLayer};
use moec_base::error::{Error, Result, io_error};
use moec_base::progress::Progress;
use moec_config::Config;
use moec_costs::units::Units;
use moec_cpu::CpuTarget;
use moec_device::Device;
use moec_import::ImportOptions;
use moec_ir::Module;
use moec_ir::placement::Placement;
use moec_ir::plan::ModelInfo;
use moec_ir::text::{ParseError, parse_module, parse_placement};
use moec_passes::threshold::Thresholds;
use moec_pipeline::{Compilation, Inputs, IrLevel, PIPELINE, Pass, Stops};
use moec_profile::loads::{LayerLoads, Loads};
use parse::{Sections, with_expectation};
use serde::Deserialize;
use similar::{DiffTag, TextDiff};
use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

/// Default target: one that is the same everywhere.
const TARGET: &str = "x86-64-v3";
/// The first pass that makes a Plan.
const LAYOUT: &str = "layout";
/// Text that represents an unchanged Graph.
const UNCHANGED: &str = "; nothing changes";

/// A file that was read.
#[derive(Clone, Debug)]
pub struct Filetest {
    path: PathBuf,
    pass: &'static Pass,
    from: &'static Pass,
    sections: Sections,
}

impl Filetest {
    /// Reads a file. `name` is the pass, in place of the one that the header names.
    ///
    /// # Errors
    /// Fails if the file cannot be read, its header is invalid, or the pass does not exist.
    pub fn read(path: &Path, name: Option<&str>) -> Result<Self> {
        let text = fs::read_to_string(path).map_err(|e| io_error("read", path, &e))?;
        let sections = Sections::parse(&text, path)?;
        let named = name.map(moec_pipeline::find).transpose()?;
        let pass = named.map_or_else(|| sections.pass("pass", path), |pass| Ok(Some(pass)))?;
        let pass = pass.ok_or_else(|| {
            Error::input(format!("`{}` does not name a pass", path.display()))
                .hint("write `;! pass: NAME` into its first line")
        })?;
        let from = match sections.pass("from", path)? {
            Some(from) => from,
            None if sections.input("graph").is_none() => moec_pipeline::find("lower")?,
            None if pass.ir_level == IrLevel::Plan => moec_pipeline::find(LAYOUT)?,
            None => pass,
        };
        Ok(Self { path: path.into(), pass, from, sections })
    }

    /// The pass.
    pub fn pass(&self) -> &'static Pass {
        self.pass
    }

    /// Output of the pass.
    ///
    /// # Errors
    /// Fails if the input is invalid, or the pass fails.
    pub fn run(&self) -> Result<String> {
        let config = Config::parse(&self.sections.settings, &self.path)?;
        let name = self.sections.key("target").unwrap_or(TARGET);
        // A device file is in the same folder as the file that names it.
        let sibling = self.path.with_file_name(name);
        let is_file = Path::new(name).extension().is_some_and(|e| e == "toml");
        let name = if is_file { &*sibling.to_string_lossy() } else { name };
        let device = moec_targets::device(name)?;
        let target = moec_targets::target_of(&device, name)?.with_activations(config.weights.activations);
        match self.sections.input("graph") {
            Some(graph) => self.on_graph(graph, &config, &device, &target),
            None => self.on_checkpoint(&config, &device, &target),
        }
    }

    fn on_checkpoint(&self, config: &Config, device: &Device, target: &CpuTarget) -> Result<String> {
        let input = |name: &str| {
            self.sections.input(name).ok_or_else(|| {
                Error::input(format!("`{}` has no section `{name}`", self.path.display()))
                    .hint("the input is a `graph`, or `config` and `tensors` of a checkpoint")
            })
        };
        let folder = checkpoint::write(input("config")?, input("tensors")?, &self.path)?;
        let (checkpoint, spec) = moec_import::open(folder.path(), &ImportOptions::default())?;
        self.compile(Compilation::new(Inputs::new(config, &checkpoint, &spec, target)), device)
    }

    fn on_graph(&self, graph: &str, config: &Config, device: &Device, target: &CpuTarget) -> Result<String> {
        let module = parse_module(graph).map_err(|e| self.at(&e))?;
        let wrong = |what: &str, e: &dyn std::fmt::Display| {
            Error::input(format!("the {what} of `{}` is wrong", self.path.display())).because(e)
        };
        moec_ir::verify::module(&module).map_err(|e| wrong("Graph", &e))?;
        let placement = self.sections.input("placement").map(parse_placement).transpose();
        let placement = placement.map_err(|e| self.at(&e))?;
        if let Some(placement) = &placement {
            moec_ir::verify::placement(placement).map_err(|e| wrong("placement", &e))?;
        }
        let loads = self.sections.input("loads").map(|text| self.loads(text)).transpose()?;
        agree(&module, placement.as_ref(), loads.as_ref()).map_err(|e| wrong("input", &e))?;
        let thresholds = self.sections.input("thresholds").map(|text| self.thresholds(text)).transpose()?;
        let model = model_of(&module);
        let thresholds = thresholds.unwrap_or_default();
        let inputs = Inputs { thresholds, ..Inputs::of_graph(config, &model, target) };
        let mut c = Compilation::of_graph(inputs, module);
        (c.placed.placement, c.placed.loads) = (placement, loads);
        c.neurons.networks =
            self.sections.input("hot").map(|text| self.hot(text)).transpose()?.unwrap_or_default();
        self.compile(c, device)
    }

    /// Runs the pass, and what it needs before it.
    fn compile<'d>(&self, mut c: Compilation<'d>, device: &'d Device) -> Result<String> {
        c.inputs.units = Units::of(device);
        let Pass { name, when, ir_level, .. } = *self.pass;
        let first = PIPELINE.iter().position(|p| p.name == self.from.name).unwrap_or(0);
        let last = PIPELINE.iter().position(|p| p.name == name).unwrap_or(0);
        if first > last {
            return Err(Error::input(format!("`{}` comes after `{name}`", self.from.name)));
        }
        let silent = Progress::silent();
        if let Some(before) = last.checked_sub(1).filter(|&before| before >= first) {
            let stops = Stops {
                start_at: Some(self.from.name),
                stop_after: Some(PIPELINE[before].name),
                ..Stops::default()
            };
            c.run(stops, &silent, &mut |_| {})?;
        }
        if !when.applies(&c) {
            return Err(Error::input(format!("pass `{name}` has nothing to do here"))
                .because(format!("it runs {}", when.words())));
        }
        let before = c.text();
        let stops = Stops { start_at: Some(name), stop_after: Some(name), ..Stops::default() };
        c.run(stops, &silent, &mut |_| {})?;
        let requested = self.sections.key("show").is_some();
        Ok(if requested || (ir_level == IrLevel::Plan && name != LAYOUT) {
            changes(&before, &c.text())
        } else {
            c.text()
        })
    }

    fn at(&self, e: &ParseError) -> Error {
        Error::input(format!("`{}:{e}`", self.path.display()))
    }

    fn hot(&self, text: &str) -> Result<Vec<(HotLayer, Vec<Vec<u32>>)>> {
        let given: Hot = toml::from_str(text).map_err(|e| {
            Error::input(format!("the hot neurons of `{}` are wrong", self.path.display())).because(e)
        })?;
        let of = |LayerHotNeurons { layer, neurons, batches, hottest }: LayerHotNeurons| {
            let batches = batches.iter().map(|&[batch, neurons]| HotBatch { batch, neurons }).collect();
            let order = |own: Vec<u32>| {
                let others: Vec<u32> = (0..neurons).filter(|n| !own.contains(n)).collect();
                [own, others].concat()
            };
            (HotLayer { layer, batches }, hottest.into_iter().map(order).collect())
        };
        Ok(given.layer.into_iter().map(of).collect())
    }

    fn loads(&self, text: &str) -> Result<Loads> {
        let wrong = |why: String| {
            Error::input(format!("the loads of `{}` are wrong", self.path.display())).because(why)
        };
        let given: CalibrationLoads = toml::from_str(text).map_err(|e| wrong(e.to_string()))?;
        let mut layers = Vec::new();
        for LayerSamples { layer, k, samples, tokens } in given.layer {
            let experts = samples.first().map_or(0, Vec::len);
            if experts == 0 || samples.iter().any(|s| s.len() != experts) {
                return Err(wrong(format!(
                    "layer {layer} does not have the same number of experts in every chunk"
                )));
            }
            let of = |e: usize| samples.iter().map(|s| u64::from(s[e])).sum();
            let chosen: Vec<u64> = (0..experts).map(of).collect();
            let tokens = tokens.unwrap_or(samples.len() as u64 * u64::from(given.chunk));
            layers.push(LayerLoads { layer, k, tokens, chosen, samples });
        }
        Ok(Loads { chunk: given.chunk, origin: String::new(), layers })
    }

    /// Thresholds of layers; how many neurons they make inactive is not known.
    fn thresholds(&self, text: &str) -> Result<Thresholds> {
        let wrong = |why: String| {
            Error::input(format!("the thresholds of `{}` are wrong", self.path.display())).because(why)
        };
        let given: BTreeMap<String, f32> = toml::from_str(text).map_err(|e| wrong(e.to_string()))?;
        let layer = |name: String| name.parse().map_err(|_| wrong(format!("`{name}` is not a layer")));
        let by_layer = given.into_iter().map(|(name, t)| Ok((layer(name)?, t))).collect::<Result<_>>()?;
        Ok(Thresholds { by_layer, percent: 0.0 })
    }
}

/// Neurons that are hot: of every layer how many at which batch, and the hottest of each expert, which the
/// others follow.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Hot {
    layer: Vec<LayerHotNeurons>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct LayerHotNeurons {
    layer: u32,
    neurons: u32,
    batches: Vec<[u32; 2]>,
    hottest: Vec<Vec<u32>>,
}

/// Loads as calibration records them: by layer and chunk, the number of tokens that chose each expert.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct CalibrationLoads {
    chunk: u32,
    layer: Vec<LayerSamples>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct LayerSamples {
    layer: u32,
    k: u32,
    samples: Vec<Vec<u32>>,
    /// Tokens that were read, if they were more than those of the samples.
    tokens: Option<u64>,
}

/// Checks that a placement and loads are of the layers of a Graph.
fn agree(module: &Module, placement: Option<&Placement>, loads: Option<&Loads>) -> Result<(), String> {
    let nodes = module.entries.first().into_iter().flat_map(|g| &g.nodes);
    let routers: Vec<_> = nodes.filter_map(|n| Some((n.scope.layer, n.op.router()?.experts))).collect();
    let tables = placement.map(|p| p.experts.iter().map(|t| (Some(t.layer), t.experts.len())).collect());
    let seen = loads.map(|l| l.layers.iter().map(|l| (Some(l.layer), l.experts())).collect());
    for (what, found) in [("placement", tables), ("loads", seen)] {
        if found.is_some_and(|found: Vec<_>| found != routers) {
            return Err(format!("the {what} has other layers or experts than the Graph"));
        }
    }
    Ok(())
}

/// Model of a Graph.
fn model_of(module: &Module) -> ModelInfo {
    let nodes = || module.entries.iter().flat_map(|g| g.nodes.iter().map(move |n| (g, n)));
    let cols = |(g, n): (&moec_ir::Graph, &moec_ir::Node)| Some(g.ty(*n.outputs.first()?).cols() as u32);
    let axis = |i: usize| module.states.iter().filter_map(|s| s.ty.shape.get(i)).max().map(|&d| d as u32);
    let rows = module.entries.iter().map(|g| g.kind.rows() as u32).max().unwrap_or(1);
    let parameters = module.weights.iter().map(|w| w.shape.iter().map(|&d| d as u64).product::<u64>()).sum();
    ModelInfo {
        family: "graph".into(),
        vocab: module.entries.first().map_or(1, |g| g.ty(g.output).cols() as u32),
        hidden: nodes().next().and_then(cols).unwrap_or(1),
        layers: nodes().filter_map(|(_, n)| n.scope.layer).max().map_or(1, |l| l.saturating_add(1)),
        max_context: axis(2).unwrap_or(rows),
        slots: axis(0).unwrap_or(1),
        bos: None,
        eos: Vec::new(),
        parameters,
        active_parameters: parameters,
        big_little: None,
        thresholded: None,
    }
}

/// Lines that differ, without context. If as many lines are removed as added, they are shown in pairs.
fn changes(before: &str, after: &str) -> String {
    let (old, new): (Vec<_>, Vec<_>) = (before.lines().collect(), after.lines().collect());
    let diff = TextDiff::from_slices(&old, &new);
    let mut lines = Vec::new();
    for op in diff.ops() {
        let removed = op.old_range().map(|i| format!("- {}", old[i]));
        let added = op.new_range().map(|i| format!("+ {}", new[i]));
        match op.tag() {
            DiffTag::Equal => {}
            DiffTag::Replace if op.old_range().len() == op.new_range().len() => {
                lines.extend(removed.zip(added).flat_map(|(removed, added)| [removed, added]));
            }
            _ => lines.extend(removed.chain(added)),
        }
    }
    if lines.is_empty() { UNCHANGED.to_owned() } else { lines.join("\n") }
}

/// An error with its causes and its hint, each on a line.
fn error_text(e: &Error) -> String {
    let causes = e.causes.iter().map(|cause| format!("  caused by: {cause}"));
    let hint = e.hint.iter().map(|hint| format!("hint: {hint}"));
    let lines = std::iter::once(format!("error: {}", e.message)).chain(causes).chain(hint);
    lines.collect::<Vec<_>>().join("\n")
}

/// Checks that a file's pass gives what the file expects. With `bless` the file is rewritten instead.
///
/// # Errors
/// Fails if the file cannot be read or written, or the output differs; the message has the difference.
pub fn check(path: &Path, bless: bool) -> Result<()> {
    let test = Filetest::read(path, None)?;
    // Messages name the file as it was called.
    let output = test.run().map_err(|e| error_text(&e).replace(&path.display().to_string(), "FILE"));
    let front = &test.sections.front;
    let found = with_expectation(front, &output);
    if bless {
        let stale = fs::read_to_string(path).is_ok_and(|text| text != found);
        return if stale { fs::write(path, found).map_err(|e| io_error("write", path, &e)) } else { Ok(()) };
    }
    let expected = match &test.sections.expect {
        Some((true, text)) => with_expectation(front, &Err(text.clone())),
        Some((false, text)) => with_expectation(front, &Ok(text.clone())),
        None => front.clone(),
    };
    if expected == found {
        return Ok(());
    }
    let diff = TextDiff::from_lines(&expected, &found);
    Err(Error::input(format!("`{}` expects another output of `{}`", path.display(), test.pass.name))
        .because(diff.unified_diff().header("expected", "found").to_string())
        .hint("read the difference; if the new output is right, `MOEC_BLESS=1` rewrites the file"))
}
