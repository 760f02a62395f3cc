//! Executor of static graphs, as the runtime sees it, and how a bundle's `run` gets it.

use crate::attention::{Caches, Shape};
use crate::chip::{self, GraphSignature, LoadedGraphs, Memory, OpenError};
use crate::queue::Queue;
use half::f16;
use moec_ir::plan::{ArtifactBytes, GraphDecl};
use moec_qnn_sys::{Error as Qnn, Installation, VARIABLE};
use moec_runtime::bundle::BundleReader;
use moec_runtime::cli::Native;
use moec_runtime::error::{Error, Result};
use moec_runtime::exec::accelerators::Executor;
use moec_runtime::exec::graphs::{Graphs, LoadCounts};
use std::fmt::Display;
use std::sync::{Mutex, PoisonError};

/// The backend of units that this crate executes.
pub const BACKEND: &str = "qnn";

/// Executes a bundle's graphs on the Hexagon of this machine, or on the library's emulator of one.
#[derive(Debug, Default)]
pub struct Hexagon {
    /// `None`: as [`Installation::to_execute`] finds it beside the bundle.
    installation: Option<Installation>,
    /// Bytes of contexts, where memory has a budget.
    artifacts: Vec<ArtifactBytes>,
    loaded: Option<Loaded>,
}

#[derive(Debug)]
struct Loaded {
    queue: Queue<LoadedGraphs>,
    graphs: Vec<GraphSignature>,
    /// Memory of each graph's last call. Held while the graph is executed.
    memories: Vec<Mutex<Memory>>,
    /// Keys and values, as graphs store them, by the artifacts of the graphs in `artifacts`.
    caches: Mutex<Caches<u8>>,
    /// For each graph of attention the number of its artifact among those of `caches`.
    artifacts: Vec<usize>,
}

impl Hexagon {
    /// Creates a unit with this library. `Hexagon::default()` looks for it beside the bundle.
    pub fn with(installation: Installation) -> Self {
        Self { installation: Some(installation), ..Self::default() }
    }
}

impl Graphs for Hexagon {
    fn name(&self) -> &'static str {
        "QNN (Hexagon)"
    }

    fn load_on_demand(&mut self, artifacts: &[ArtifactBytes]) {
        self.artifacts = artifacts.to_vec();
    }

    fn load(&mut self, bundle: &BundleReader, graphs: &[GraphDecl], slots: usize) -> Result<()> {
        let found = self.installation.clone().map_or_else(|| Installation::to_execute(&bundle.folder()), Ok);
        let installation = found.map_err(|e| library(&e))?;
        let (bundle, declared) = (bundle.clone(), graphs.to_vec());
        let open = move || chip::open(&installation, &bundle, &declared);
        let started = Queue::start(graphs, &self.artifacts, open, OpenError::System);
        let (queue, graphs) = started.map_err(refused)?;
        let memories = graphs.iter().map(|_| Mutex::default()).collect();
        let mut caches = Caches::new(slots);
        let of = |p: &GraphSignature| p.attention.as_ref().map_or(0, |(_, package)| caches.package(package));
        let artifacts = graphs.iter().map(of).collect();
        let caches = Mutex::new(caches);
        self.loaded = Some(Loaded { queue, graphs, memories, caches, artifacts });
        Ok(())
    }

    fn prepare(&self, graphs: &[usize], memory: Option<u64>) {
        if let Some(loaded) = &self.loaded {
            loaded.queue.prepare(graphs, memory);
        }
    }

    fn loads(&self) -> LoadCounts {
        self.loaded.as_ref().map(|loaded| loaded.queue.counts()).unwrap_or_default()
    }

    fn run(&self, graph: usize, slot: usize, inputs: &[&[f16]], outputs: &mut [&mut [f16]]) -> Result<()> {
        let missing = || Error::plan(format!("there is no graph {graph}"));
        let loaded = self.loaded.as_ref().ok_or_else(missing)?;
        let signature = loaded.graphs.get(graph).ok_or_else(missing)?;
        let failed = |why: String| Error::graph(signature.name.clone(), why);
        let kept = loaded.memories.get(graph).ok_or_else(missing)?;
        let mut kept = kept.lock().unwrap_or_else(PoisonError::into_inner);
        let mut memory = std::mem::take(&mut *kept);
        memory.inputs.resize_with(signature.inputs.len(), Vec::new);
        memory.outputs.resize_with(signature.outputs.len(), Vec::new);
        for (tensor, to) in signature.outputs.iter().zip(&mut memory.outputs) {
            to.resize(tensor.bytes, 0);
        }
        let done = match &signature.attention {
            None => loaded.rows(graph, signature, memory, inputs, outputs),
            Some((shape, _)) => loaded.attention(graph, slot, (signature, shape), memory, inputs, outputs),
        };
        *kept = done.map_err(failed)?;
        Ok(())
    }
}

impl Loaded {
    /// Executes a graph whose inputs and results are those of the plan.
    fn rows(
        &self,
        graph: usize,
        signature: &GraphSignature,
        mut memory: Memory,
        inputs: &[&[f16]],
        outputs: &mut [&mut [f16]],
    ) -> Result<Memory, String> {
        if inputs.len() != signature.inputs.len() || outputs.len() != signature.outputs.len() {
            return Err(format!("it was called with {} inputs and {} results", inputs.len(), outputs.len()));
        }
        for ((tensor, from), to) in signature.inputs.iter().zip(inputs).zip(&mut memory.inputs) {
            to.resize(tensor.bytes, 0);
            tensor.encode(from, to)?;
        }
        let (memory, done) = self.queue.execute(graph, memory);
        done?;
        for ((tensor, from), to) in signature.outputs.iter().zip(&memory.outputs).zip(outputs) {
            tensor.decode(from, to)?;
        }
        Ok(memory)
    }

    /// Executes a graph of attention; it gets keys and values of the sequence as they are stored.
    fn attention(
        &self,
        graph: usize,
        slot: usize,
        (signature, shape): (&GraphSignature, &Shape),
        mut memory: Memory,
        inputs: &[&[f16]],
        outputs: &mut [&mut [f16]],
    ) -> Result<Memory, String> {
        let given = shape.call_inputs(inputs)?;
        let [y] = outputs else { return Err(format!("it was called with {} results", outputs.len())) };
        let mut caches = self.caches.lock().unwrap_or_else(PoisonError::into_inner);
        let zeros = |i: usize, count: usize| {
            let mut bytes = vec![0; signature.inputs[i].bytes];
            signature.inputs[i].encode(&vec![f16::ZERO; count], &mut bytes).map(|()| bytes)
        };
        let [keys, values] = shape.cache_lengths();
        let cache =
            caches.of_sequence(self.artifacts[graph], slot, || Ok([zeros(1, keys)?, zeros(2, values)?]))?;
        // Beyond every code: a row that sees a key gets the largest, any other the smallest.
        let mask: Vec<f16> = given.sees.iter().map(|sees| if *sees { f16::MAX } else { f16::MIN }).collect();
        let [cos, sin] = given.angles.unwrap_or_default();
        let taken = [Some(given.x), None, None, Some(&mask), Some(&cos), Some(&sin)];
        for ((tensor, from), to) in signature.inputs.iter().zip(taken).zip(&mut memory.inputs) {
            if let Some(from) = from {
                to.resize(tensor.bytes, 0);
                tensor.encode(from, to)?;
            }
        }
        (memory.inputs[1], memory.inputs[2]) = (std::mem::take(&mut cache[0]), std::mem::take(&mut cache[1]));
        let (mut memory, done) = self.queue.execute(graph, memory);
        if let [_, keys, values, ..] = memory.inputs.as_mut_slice() {
            *cache = [std::mem::take(keys), std::mem::take(values)];
        }
        done?;
        let [_, keys, values] = memory.outputs.as_slice() else {
            return Err("it has other results".into());
        };
        let [old_keys, old_values] = cache;
        shape.write_caches(
            [old_keys, old_values],
            [keys, values],
            [signature.inputs[1].width(), signature.inputs[2].width()],
            &given.places,
        );
        signature.outputs[0].decode(&memory.outputs[0], y)?;
        Ok(memory)
    }
}

/// Error of the library, as one of the runtime.
fn library(e: &Qnn) -> Error {
    let hint = match e {
        Qnn::NotInstalled { .. } | Qnn::NoLibrary { .. } | Qnn::Load { .. } | Qnn::Version { .. } => format!(
            "put QNN's libraries for this system next to `run`, or name their folder in `{VARIABLE}` and \
             that of their dependencies in `LD_LIBRARY_PATH`"
        ),
        _ => "check that the bundle is for the chip of this machine, and that `ADSP_LIBRARY_PATH` names the folder \
              with QNN's library for the Hexagon"
            .to_owned(),
    };
    failed(e).with_hint(hint)
}

/// A library of the operating system does not provide what the unit needs.
fn failed(why: impl Display) -> Error {
    Error::machine(format!("the unit of the backend `{BACKEND}`: {why}"))
}

fn refused(refused: OpenError) -> Error {
    match refused {
        OpenError::Library(e) => library(&e),
        OpenError::File(e) => e,
        OpenError::Context(path, why) => failed(format!("`{}`: {why}", path.display()))
            .with_hint("copy the bundle again, or build it again where QNN's library is installed"),
        OpenError::Graph(graph, why) => Error::graph(graph, why),
        OpenError::System(why) => failed(why).with_hint("this is a fault of the operating system or of moec"),
    }
}

/// This crate's unit, for the `run` of a bundle whose static graphs are executed here.
pub const NATIVE: Native<'static> = Native { backend: BACKEND, executor: &|_| Some(Ok(executor())) };

fn executor() -> Executor {
    Executor::Graphs(Box::new(Hexagon::default()))
}
