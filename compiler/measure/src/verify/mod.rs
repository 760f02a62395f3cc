//! `moec verify`: executes every compiled step against the reference evaluator.
//!
//! Two errors are measured for each node of the Graph. For the **local** error, the evaluator gets the
//! operands of the compiled step, so this is the error of the step alone. The **chained** error compares with
//! an evaluator that ran the whole entry point by itself, so it shows how errors add up, layer by layer.
#![expect(clippy::cast_possible_truncation, reason = "ids of a graph and rows of one call")]

mod allowed;
mod artifacts;
mod probe;
pub mod statics;

use crate::host_build::HostBuild;
use allowed::Arithmetic;
use moec_base::error::{Error, Result};
use moec_base::progress::Progress;
use moec_bundle::packed;
use moec_bundle::read::Bundle;
use moec_import::Checkpoint;
use moec_ir::eval::{Evaluator, Tensor};
use moec_ir::plan::{Plan, UnitRef};
use moec_ir::{EntryKind, Graph, Module, NodeId};
use moec_runtime::CheckLevel;
use moec_runtime::{Engine, Options, Program, Row};
use moec_targets::backends;
use serde::Serialize;
use serde::ser::{SerializeMap as _, Serializer};
use std::collections::HashMap;

pub use moec_backend::{Check, Distance, FunctionReport};

/// Largest local error of a valid step in f32: root mean square, relative to the reference's.
pub const BOUND: f64 = 1e-4;
/// Factor by which the error of the logits may exceed the bound of one step.
pub const CHAIN: f64 = 10.0;
/// Most token rows of a probe.
const PROBE_ROWS: usize = 12;

/// Result of a verification. Its serialized form also has the verdict and its reasons.
#[derive(Clone, Debug)]
pub struct Report {
    /// Number of files whose hash was checked.
    pub files: usize,
    /// Largest local error that the user allows; `None`: the bound follows from the arithmetic of each step.
    pub bound: Option<f64>,
    /// Entry points; empty if this machine cannot execute the target's kernels.
    pub entries: Vec<EntryReport>,
    /// Functions of the artifacts of other units.
    pub packages: Vec<FunctionReport>,
    /// Parts that could not be verified on this machine, each in one line with the remedy.
    pub unverified: Vec<String>,
}

impl Serialize for Report {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let failures = self.failures();
        let mut map = serializer.serialize_map(None)?;
        map.serialize_entry("verdict", if failures.is_empty() { "right" } else { "wrong" })?;
        map.serialize_entry("failures", &failures)?;
        map.serialize_entry("files", &self.files)?;
        map.serialize_entry("bound", &self.bound)?;
        map.serialize_entry("entries", &self.entries)?;
        if !self.packages.is_empty() {
            map.serialize_entry("packages", &self.packages)?;
        }
        if !self.unverified.is_empty() {
            map.serialize_entry("unverified", &self.unverified)?;
        }
        map.end()
    }
}

/// Errors of one entry point.
#[derive(Clone, Debug, Serialize)]
pub struct EntryReport {
    /// `prefill[256]`
    pub entry: String,
    /// Nodes in order.
    pub nodes: Vec<NodeReport>,
    /// Error of the compared rows of logits, relative to the evaluator's own run.
    pub logits: Distance,
    /// Number of compared rows of logits. If steps round, rows of tokens with other experts than in the
    /// evaluator's run are left out.
    pub rows: usize,
    /// Rows of logits.
    pub all_rows: usize,
}

/// Errors of one node.
#[derive(Clone, Debug, Serialize)]
pub struct NodeReport {
    /// Index in the Graph.
    pub node: u32,
    /// `layers.0.attn`
    pub scope: String,
    /// `linear`
    pub op: &'static str,
    /// Kernels that compute it.
    pub kernels: Vec<String>,
    /// Error relative to the evaluator on the same operands.
    pub local: Distance,
    /// Local error that the formats of its operands and its arithmetic explain; 0 for f32.
    pub rounding: f64,
    /// Error relative to the evaluator's own run. `None` for values that depend on padding rows or on earlier
    /// sequences (dispatch tables, expert slots, whole caches).
    pub chained: Option<Distance>,
}

impl Report {
    /// Largest valid local error of a node.
    pub fn allowed(&self, node: &NodeReport) -> f64 {
        self.bound.unwrap_or_else(|| BOUND.max(node.rounding))
    }

    /// Largest valid chained error of an entry point's logits.
    pub fn allowed_of_logits(&self, entry: &EntryReport) -> f64 {
        CHAIN * entry.nodes.iter().map(|n| self.allowed(n)).fold(0.0, f64::max)
    }

    /// Verdict on the bundle `name`, in one line.
    pub fn verdict(&self, bundle: &str) -> String {
        let failures = self.failures().len();
        let steps: usize = self.entries.iter().map(|e| e.nodes.len()).sum();
        let mut counts = vec![format!("{} files", self.files)];
        if !self.entries.is_empty() {
            counts.push(format!("{steps} steps of {} entry points", self.entries.len()));
        }
        if !self.packages.is_empty() {
            counts.push(format!("{} functions of packages", self.packages.len()));
        }
        let counts = counts.join(", ");
        match failures {
            0 => format!("{bundle} is OK: {counts}, all within tolerance"),
            n => format!("{bundle} is wrong: of {counts}, {n} are out of tolerance"),
        }
    }

    /// Errors above their bound: local errors of steps, and chained errors of logits.
    pub fn failures(&self) -> Vec<String> {
        let mut found = Vec::new();
        for entry in &self.entries {
            for node in entry.nodes.iter().filter(|n| !n.local.within(self.allowed(n))) {
                found.push(format!(
                    "{} `{}` in `{}` is off by {:.1e}, more than {:.1e}",
                    entry.entry,
                    node.op,
                    node.scope,
                    node.local.relative,
                    self.allowed(node)
                ));
            }
            let worst = self.allowed_of_logits(entry);
            if !entry.logits.within(worst) {
                found.push(format!(
                    "{} logits are off by {:.1e}, more than {worst:.1e}",
                    entry.entry, entry.logits.relative
                ));
            }
        }
        for function in &self.packages {
            let place = format!("`{}` of `{}`", function.function, function.package);
            if !function.error.within(function.bound) {
                found.push(format!("{place} is off by {:.1e}", function.error.relative));
            }
            if function.refused {
                found.push(format!("{place} cannot run on its unit: {}", function.findings.join("; ")));
            }
            for check in function.checks.iter().filter(|check| !check.passes()) {
                let Check { by, share_of_spread, bound } = check;
                found.push(format!(
                    "{place}, by {by}, is off by {share_of_spread:.1e} of its spread, more than {bound:.1e}"
                ));
            }
        }
        found
    }
}

/// Verifies a bundle. With `source` the reference reads the checkpoint's weights instead of the bundle's.
/// With `bound` that is the bound of every step; else the bound follows from the step's arithmetic.
///
/// # Errors
/// Fails if a bundle cannot be read or run here. Errors above the bound are in the report instead.
pub fn verify(
    bundle: &Bundle,
    source: Option<&Checkpoint>,
    bound: Option<f64>,
    progress: &Progress,
) -> Result<Report> {
    progress.stage("Checking", &format!("{} files", bundle.manifest.files.len()));
    bundle.manifest.check(&bundle.folder, true)?;
    let files = &bundle.files(CheckLevel::All)?;
    let mut module = bundle.graph()?;
    agree(bundle, &module)?;
    let arithmetic = Arithmetic::of(bundle)?;
    let packed = packed::Packed::open(bundle)?;
    packed::split_tables(&mut module, &packed);
    if source.is_none() {
        packed::complete(&module, &packed, &bundle.folder)?;
        packed::read_from_bundle(&mut module, &packed);
    }
    let sources = source.map(|checkpoint| packed::CheckpointWithBundle { checkpoint, packed: &packed });
    let mut evaluator = match &sources {
        Some(sources) => Evaluator::new(&module, sources),
        None => Evaluator::new(&module, &packed),
    };
    evaluator.keep_weights(false);
    if source.is_some() {
        evaluator.map_weights(|weight, values| packed.round(weight, values));
    }

    let mut exact = match &sources {
        Some(sources) => Evaluator::new(&module, sources),
        None => Evaluator::new(&module, &packed),
    };
    exact.keep_weights(false);
    let (mut packages, mut unverified) =
        artifacts::verify(bundle, files, &module, &mut exact, source.is_none(), progress)?;
    packages.extend(artifacts::verify_streams(bundle, files, &module, &mut exact, progress)?);
    unverified.extend(artifacts::read_threads(bundle, files)?.1);
    let count = bundle.manifest.files.len();
    if bundle.is_foreign() {
        let triple = &bundle.plan.target.triple;
        if !packages.is_empty() {
            progress.warn(&format!("the kernels are for {triple}: only packages were executed"));
            return Ok(Report { files: count, bound, entries: Vec::new(), packages, unverified });
        }
        unverified.push(bundle.host_build_note());
        let host_build = HostBuild::of(bundle, progress)?;
        let run = Run {
            plan: host_build.plan(),
            module: &module,
            arithmetic: &Arithmetic::exact(host_build.plan()),
        };
        let entries =
            host_build.with_engine(Some(files), |engine| run.entries(engine, &mut evaluator, progress))?;
        return Ok(Report { files: count, bound, entries, packages, unverified });
    }
    let unit = bundle.emulated_unit(progress)?;
    let program = Program::new(bundle.plan.clone(), &|symbol| unit.resolve(symbol))
        .map_err(|e| Error::input("the plan cannot run on this machine").because(e))?
        .emulating(unit.emulated());
    let options = Options { threads: Some(1), ..Options::default() };
    let (folder, host) = (&bundle.folder, &mut |unit: &UnitRef| backends::host(&unit.backend, &unit.name));
    let mut engine = Engine::with_units(&program, folder, host, files, options)
        .map_err(|e| Error::input("the bundle does not open").because(e))?;
    let run = Run { plan: &bundle.plan, module: &module, arithmetic: &arithmetic };
    let entries = run.entries(&mut engine, &mut evaluator, progress)?;
    Ok(Report { files: count, bound, entries, packages, unverified })
}

/// A compiled model and the Graph that it computes.
#[derive(Clone, Copy)]
struct Run<'a> {
    plan: &'a Plan,
    module: &'a Module,
    arithmetic: &'a Arithmetic,
}

impl Run<'_> {
    /// Verifies every entry point.
    fn entries(
        self,
        engine: &mut Engine<'_>,
        evaluator: &mut Evaluator<'_>,
        progress: &Progress,
    ) -> Result<Vec<EntryReport>> {
        let graphs = &self.module.entries;
        let bar = progress.items("Verifying", graphs.iter().map(|g| g.nodes.len() as u64).sum(), "nodes");
        let mut entries = Vec::new();
        for (index, graph) in graphs.iter().enumerate() {
            bar.label(&graph.kind.to_string());
            entries.push(Job { of: self, index, graph }.run(engine, evaluator, &|| bar.add(1))?);
        }
        bar.finish();
        Ok(entries)
    }
}

/// Checks that the plan and the graph are of one build.
fn agree(bundle: &Bundle, module: &Module) -> Result<()> {
    let fits = bundle.plan.entries.len() == module.entries.len()
        && bundle.plan.entries.iter().zip(&module.entries).all(|(e, g)| {
            e.kind == g.kind
                && e.locations.len() == g.values.len()
                && e.steps.iter().all(|s| (s.node as usize) < g.nodes.len())
        });
    if fits {
        Ok(())
    } else {
        Err(Error::input("plan and graph are of different builds").hint("build the bundle again"))
    }
}

/// One entry point being verified.
struct Job<'a> {
    of: Run<'a>,
    index: usize,
    graph: &'a Graph,
}

impl Job<'_> {
    fn run(
        &mut self,
        engine: &mut Engine<'_>,
        evaluator: &mut Evaluator<'_>,
        tick: &dyn Fn(),
    ) -> Result<EntryReport> {
        evaluator.reset();
        let calls = self.calls();
        let mut report = None;
        for (i, rows) in calls.iter().enumerate() {
            let measured = i + 1 == calls.len();
            let outputs: Vec<usize> = {
                let most = self.graph.ty(Graph::ROWS).rows().min(rows.len());
                (rows.len() - most..rows.len()).collect()
            };
            let own = self.evaluate(evaluator, rows, &outputs)?;
            // The rows of a prefill are one prompt; those of decoding are separate sequences.
            let prompt = rows.iter().filter(|_| self.graph.kind.is_prefill());
            let seq_len = prompt.map(|r| r.pos + 1).max().unwrap_or(0);
            let Run { plan, module, arithmetic } = self.of;
            let (entry, states) = (&plan.entries[self.index], &plan.states);
            let mut probe = probe::Probe::new(module, self.graph, (entry, states), arithmetic, &own, seq_len);
            let mut failed = None;
            let result = engine.trace_entry(self.index, rows, &outputs, seq_len, &mut |moment, view| {
                if measured && failed.is_none() {
                    match probe.observe(evaluator, moment, view) {
                        Ok(true) => tick(),
                        Ok(false) => {}
                        Err(e) => failed = Some(e),
                    }
                }
                Ok(())
            });
            result.map_err(|e| Error::input("a compiled step failed").because(e))?;
            if let Some(e) = failed {
                return Err(e);
            }
            if measured {
                report = Some(probe.finish(plan, &outputs));
            }
        }
        report.ok_or_else(|| Error::bug("nothing was measured"))
    }

    /// Token rows of each call. The last call is measured, with a cache that is not empty.
    fn calls(&self) -> Vec<Vec<Row>> {
        let model = &self.of.plan.model;
        let (vocab, context) = (model.vocab, model.max_context as usize);
        // Fixed tokens that are spread over the vocabulary (Knuth's multiplicative hashing).
        let id = |i: usize| (i as u32 + 1).wrapping_mul(2_654_435_761) % vocab;
        match self.graph.kind {
            EntryKind::Prefill(t) => {
                let n = (t as usize).min(PROBE_ROWS).min((context / 2).max(1));
                let calls = if 2 * n <= context { 2 } else { 1 };
                let row = |pos| Row { slot: 0, pos, id: id(pos) };
                (0..calls).map(|c| (c * n..(c + 1) * n).map(row).collect()).collect()
            }
            EntryKind::Decode(b) | EntryKind::Little(b) => {
                let row = |slot: u32, pos: usize| Row { slot, pos, id: id(pos * b as usize + slot as usize) };
                (0..context.min(4)).map(|pos| (0..b).map(|slot| row(slot, pos)).collect()).collect()
            }
        }
    }

    /// Runs the evaluator by itself; returns the results of every node.
    fn evaluate(
        &self,
        evaluator: &mut Evaluator<'_>,
        rows: &[Row],
        outputs: &[usize],
    ) -> Result<HashMap<NodeId, Vec<Tensor>>> {
        let t = self.graph.kind.rows();
        let out = self.graph.ty(Graph::ROWS).rows();
        let column = |pad: i32, len: usize, of: &dyn Fn(usize) -> i32, n: usize| -> Vec<i32> {
            (0..len).map(|i| if i < n { of(i) } else { pad }).collect()
        };
        let ids = column(0, t, &|i| rows[i].id as i32, rows.len());
        let pos = column(-1, t, &|i| rows[i].pos as i32, rows.len());
        let slot = column(0, t, &|i| rows[i].slot as i32, rows.len());
        let picked = column(-1, out, &|i| outputs[i] as i32, outputs.len());
        let mut own = HashMap::new();
        let mut keep = |id: NodeId, results: &[&Tensor]| {
            own.insert(id, results.iter().map(|&t| t.clone()).collect::<Vec<_>>());
        };
        evaluator
            .run_with(self.index, &ids, &pos, &slot, &picked, &mut keep)
            .map_err(|e| Error::bug("the evaluator failed").because(e))?;
        Ok(own)
    }
}
