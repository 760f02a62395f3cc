//! The HTP, emulated: networks of a bundle, read back from disk and evaluated in whole numbers.

use super::read::network;
use super::sequences::{AttentionNetwork, Sequences};
use crate::exec::{Executor, Shared};
use moec_ir::plan::GraphDecl;
use moec_runtime::bundle::BundleReader;
use moec_runtime::error::{Error, Result};
use moec_runtime::exec::graphs::{Graphs, f16};

/// A network that is ready to run.
#[derive(Debug)]
struct Loaded {
    name: String,
    executor: Executor,
    attends: Option<AttentionNetwork>,
}

/// Evaluates networks on this machine. Inputs are encoded, and outputs decoded, in here.
#[derive(Debug, Default)]
pub struct Emulated {
    graphs: Vec<Loaded>,
    sequences: Sequences,
}

impl Graphs for Emulated {
    fn name(&self) -> &'static str {
        "emulated"
    }

    fn load(&mut self, bundle: &BundleReader, graphs: &[GraphDecl], slots: usize) -> Result<()> {
        self.sequences = Sequences::new(slots);
        let mut shared = Shared::default();
        for graph in graphs {
            let name = format!("{} {}", graph.package, graph.function);
            let failed = |why: String| Error::graph(name.clone(), why);
            let network = network(bundle, graph).map_err(failed)?;
            let attends = self.sequences.attention_network(graph, &network).map_err(failed)?;
            let files = bundle.below(&graph.package);
            let executor = Executor::sharing(network.into(), Some(&files), &mut shared);
            let executor = executor.map_err(|e| failed(e.to_string()))?;
            self.graphs.push(Loaded { name, executor, attends });
        }
        Ok(())
    }

    fn run(&self, graph: usize, slot: usize, inputs: &[&[f16]], outputs: &mut [&mut [f16]]) -> Result<()> {
        let missing = || Error::plan(format!("there is no graph {graph}"));
        let loaded = self.graphs.get(graph).ok_or_else(missing)?;
        let failed = |why: String| Error::graph(loaded.name.clone(), why);
        let execute = |reals: &[&[f32]]| {
            loaded.executor.run(reals).map(|outcome| outcome.outputs).map_err(|e| e.to_string())
        };
        if let Some(attends) = &loaded.attends {
            let results = self.sequences.run(attends, slot, inputs, execute).map_err(failed)?;
            return store(&results, outputs).map_err(failed);
        }
        let reals: Vec<Vec<f32>> = inputs.iter().map(|x| x.iter().map(|x| x.to_f32()).collect()).collect();
        let reals: Vec<&[f32]> = reals.iter().map(|x| &**x).collect();
        store(&execute(&reals).map_err(failed)?, outputs).map_err(failed)
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
