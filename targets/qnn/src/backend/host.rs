//! The HTP, emulated: networks of a bundle, read back from disk and evaluated in whole numbers.

use super::read::network;
use super::sequences::{AttentionNetwork, Sequences};
use crate::exec::{Executor, Shared};
use moec_ir::plan::{ArtifactBytes, GraphDecl};
use moec_qnn_unit::artifacts;
use moec_qnn_unit::queue::{Chip, Queue, Reader};
use moec_runtime::bundle::BundleReader;
use moec_runtime::error::{Error, Result};
use moec_runtime::exec::graphs::{Graphs, LoadCounts, f16};
use std::sync::Arc;

/// Evaluates networks on this machine. Inputs are encoded, and outputs decoded, in here. Artifacts are loaded
/// and freed as [`moec_qnn_unit::Hexagon`] does.
#[derive(Debug, Default)]
pub struct Emulated {
    /// Bytes of artifacts, where memory has a budget.
    artifacts: Vec<ArtifactBytes>,
    queue: Option<Queue<EmulatedChip>>,
    /// By graph.
    names: Vec<(String, Option<AttentionNetwork>)>,
    sequences: Sequences,
}

/// A graph, and its index.
type Declared = (usize, GraphDecl);

/// Networks of artifacts that are loaded.
#[derive(Debug)]
struct EmulatedChip {
    bundle: BundleReader,
    /// Graphs of each artifact.
    declared: Vec<Arc<[Declared]>>,
    /// By graph.
    loaded: Vec<Option<Executor>>,
}

/// Numbers of a call.
#[derive(Debug, Default)]
struct Call {
    inputs: Vec<Vec<f32>>,
    outputs: Vec<Vec<f32>>,
}

impl EmulatedChip {
    fn new(bundle: &BundleReader, graphs: &[GraphDecl]) -> Self {
        let (names, of) = artifacts(graphs);
        let own = |artifact: usize| {
            let graphs = graphs.iter().enumerate().zip(&of).filter(|(_, a)| **a == artifact);
            graphs.map(|((i, graph), _)| (i, graph.clone())).collect()
        };
        let loaded = graphs.iter().map(|_| None).collect();
        Self { bundle: bundle.clone(), declared: (0..names.len()).map(own).collect(), loaded }
    }
}

/// Name of a graph, for messages.
fn name_of(graph: &GraphDecl) -> String {
    format!("{} {}", graph.package, graph.function)
}

/// Reads the networks of an artifact. They share weights.
///
/// # Errors
/// The graph that cannot be read, and why.
fn read(bundle: &BundleReader, graphs: &[Declared]) -> Result<Vec<(usize, Executor)>, (String, String)> {
    let mut shared = Shared::default();
    let one = |(i, graph): &Declared| {
        let failed = |why: String| (name_of(graph), why);
        let network = network(bundle, graph).map_err(failed)?;
        let files = bundle.below(&graph.package);
        let executor = Executor::sharing(network.into(), Some(&files), &mut shared);
        executor.map(|executor| (*i, executor)).map_err(|e| failed(e.to_string()))
    };
    graphs.iter().map(one).collect()
}

impl Chip for EmulatedChip {
    type Call = Call;
    type Content = Vec<(usize, Executor)>;

    fn is_loaded(&self, artifact: usize) -> bool {
        let mut own = self.declared.get(artifact).into_iter().flat_map(|graphs| graphs.iter());
        own.all(|(i, _)| self.loaded.get(*i).is_some_and(Option::is_some))
    }

    fn reader(&self, artifact: usize) -> Reader<Self::Content> {
        let (bundle, graphs) = (self.bundle.reopened(), self.declared.get(artifact).cloned());
        Box::new(move || {
            let graphs = graphs.ok_or_else(|| format!("there is no artifact {artifact}"))?;
            read(&bundle, &graphs).map_err(|(name, why)| format!("`{name}`: {why}"))
        })
    }

    fn load(&mut self, _: usize, content: Self::Content) -> Result<(), String> {
        for (i, executor) in content {
            if let Some(slot) = self.loaded.get_mut(i) {
                *slot = Some(executor);
            }
        }
        Ok(())
    }

    fn free(&mut self, artifact: usize) {
        for (i, _) in self.declared.get(artifact).into_iter().flat_map(|graphs| graphs.iter()) {
            if let Some(slot) = self.loaded.get_mut(*i) {
                *slot = None;
            }
        }
    }

    fn ready(&mut self, graph: usize) -> Result<(), String> {
        match self.loaded.get(graph) {
            Some(Some(_)) => Ok(()),
            _ => Err(format!("graph {graph} is not loaded")),
        }
    }

    fn execute(&mut self, graph: usize, call: &mut Call) -> Result<(), String> {
        let executor = self.loaded.get(graph).and_then(Option::as_ref);
        let executor = executor.ok_or_else(|| format!("graph {graph} is not loaded"))?;
        let inputs: Vec<&[f32]> = call.inputs.iter().map(|x| &**x).collect();
        call.outputs = executor.run(&inputs).map_err(|e| e.to_string())?.outputs;
        Ok(())
    }
}

impl Graphs for Emulated {
    fn name(&self) -> &'static str {
        "emulated"
    }

    fn load_on_demand(&mut self, artifacts: &[ArtifactBytes]) {
        self.artifacts = artifacts.to_vec();
    }

    fn load(&mut self, bundle: &BundleReader, graphs: &[GraphDecl], slots: usize) -> Result<()> {
        self.sequences = Sequences::new(slots);
        self.names.clear();
        for graph in graphs {
            let name = name_of(graph);
            let attends = if graph.stateful {
                let failed = |why: String| Error::graph(name.clone(), why);
                let network = network(bundle, graph).map_err(failed)?;
                self.sequences.attention_network(graph, &network).map_err(failed)?
            } else {
                None
            };
            self.names.push((name, attends));
        }
        let mut chip = EmulatedChip::new(bundle, graphs);
        if self.artifacts.is_empty() {
            for graphs in chip.declared.clone() {
                let content = read(bundle, &graphs).map_err(|(name, why)| Error::graph(name, why))?;
                for (i, executor) in content {
                    chip.loaded[i] = Some(executor);
                }
            }
        }
        let failed = |why: String| Error::machine(format!("the emulated HTP: {why}"));
        self.queue = Some(Queue::start(graphs, &self.artifacts, move || Ok((chip, ())), failed)?.0);
        Ok(())
    }

    fn prepare(&self, graphs: &[usize], memory: Option<u64>) {
        if let Some(queue) = &self.queue {
            queue.prepare(graphs, memory);
        }
    }

    fn loads(&self) -> LoadCounts {
        self.queue.as_ref().map(Queue::counts).unwrap_or_default()
    }

    fn run(&self, graph: usize, slot: usize, inputs: &[&[f16]], outputs: &mut [&mut [f16]]) -> Result<()> {
        let missing = || Error::plan(format!("there is no graph {graph}"));
        let (queue, (name, attends)) = self.queue.as_ref().zip(self.names.get(graph)).ok_or_else(missing)?;
        let failed = |why: String| Error::graph(name.clone(), why);
        let execute = |inputs: Vec<Vec<f32>>| {
            let (call, done) = queue.execute(graph, Call { inputs, outputs: Vec::new() });
            done.map(|()| call.outputs)
        };
        if let Some(attends) = attends {
            let reals = |inputs: &[&[f32]]| execute(inputs.iter().map(|x| x.to_vec()).collect());
            let results = self.sequences.run(attends, slot, inputs, reals).map_err(failed)?;
            return store(&results, outputs).map_err(failed);
        }
        let reals = inputs.iter().map(|x| x.iter().map(|x| x.to_f32()).collect()).collect();
        store(&execute(reals).map_err(failed)?, outputs).map_err(failed)
    }
}

/// Stores results where the caller has them.
///
/// # Errors
/// Another number of them, or one that f16 does not hold.
pub(super) fn store(results: &[Vec<f32>], outputs: &mut [&mut [f16]]) -> Result<(), String> {
    if results.len() != outputs.len() {
        return Err(format!("it has {} results", results.len()));
    }
    for (got, out) in results.iter().zip(outputs) {
        if got.len() != out.len() {
            return Err("a result has another size".to_owned());
        }
        for (x, out) in got.iter().zip(out.iter_mut()) {
            *out = f16::from_f32(*x);
            if !out.is_finite() {
                return Err(format!("a result is {x:e}, which is not an f16"));
            }
        }
    }
    Ok(())
}
