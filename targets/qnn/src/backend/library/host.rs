//! Whole models on the library's emulator: every graph of a bundle in one process, sharing weights.

use super::super::read::network;
use super::super::sequences::{AttentionNetwork, Sequences};
use super::{Library, graph_io};
use crate::compose::compose;
use crate::net::Network;
use moec_ir::plan::GraphDecl;
use moec_qnn_sys::worker::Worker;
use moec_runtime::bundle::BundleReader;
use moec_runtime::error::{Error, Result};
use moec_runtime::exec::graphs::{Graphs, f16};
use std::sync::{Mutex, PoisonError};

/// A graph that is composed.
#[derive(Debug)]
struct Loaded {
    name: String,
    network: Network,
    /// Its number in the process.
    number: usize,
    attends: Option<AttentionNetwork>,
}

/// The library's emulator.
#[derive(Debug)]
pub(in crate::backend) struct LibraryHost {
    library: Library,
    worker: Option<Mutex<Worker>>,
    graphs: Vec<Loaded>,
    sequences: Sequences,
}

impl LibraryHost {
    /// A unit with nothing loaded yet.
    pub(in crate::backend) fn new(library: Library) -> Self {
        Self { library, worker: None, graphs: Vec::new(), sequences: Sequences::default() }
    }
}

impl Graphs for LibraryHost {
    fn name(&self) -> &'static str {
        "emulated by QNN"
    }

    fn load(&mut self, bundle: &BundleReader, graphs: &[GraphDecl], slots: usize) -> Result<()> {
        self.sequences = Sequences::new(slots);
        let failed = |name: &str, why: String| Error::graph(name.to_owned(), why);
        let mut worker = self.library.worker(true).map_err(|e| failed("QNN", e.to_string()))?;
        for graph in graphs {
            let name = format!("{} {}", graph.package, graph.function);
            let network = network(bundle, graph).map_err(|why| failed(&name, why))?;
            let attends =
                self.sequences.attention_network(graph, &network).map_err(|why| failed(&name, why))?;
            let files = bundle.below(&graph.package);
            let mut spec = compose(&network, Some(&files)).map_err(|e| failed(&name, e.to_string()))?;
            // The name must be unique in the context.
            spec.name.clone_from(&name);
            let number = worker.compose(&spec).map_err(|e| failed(&name, e.to_string()))?;
            self.graphs.push(Loaded { name, network, number, attends });
        }
        self.worker = Some(Mutex::new(worker));
        Ok(())
    }

    fn run(&self, graph: usize, slot: usize, inputs: &[&[f16]], outputs: &mut [&mut [f16]]) -> Result<()> {
        let missing = || Error::plan(format!("there is no graph {graph}"));
        let (loaded, worker) = self.graphs.get(graph).zip(self.worker.as_ref()).ok_or_else(missing)?;
        let failed = |why: String| Error::graph(loaded.name.clone(), why);
        let execute = |reals: &[&[f32]]| {
            let given = graph_io::encode(&loaded.network, reals)?;
            let mut worker = worker.lock().unwrap_or_else(PoisonError::into_inner);
            let results = worker.execute(loaded.number, given).map_err(|e| e.to_string())?;
            drop(worker);
            graph_io::decode(&loaded.network, &results)
        };
        let results = if let Some(attends) = &loaded.attends {
            self.sequences.run(attends, slot, inputs, execute)
        } else {
            let reals: Vec<Vec<f32>> =
                inputs.iter().map(|x| x.iter().map(|x| x.to_f32()).collect()).collect();
            execute(&reals.iter().map(|x| &**x).collect::<Vec<_>>())
        };
        super::super::host::store(&results.map_err(failed)?, outputs).map_err(failed)
    }
}
