//! The library, the chip, and the loaded graphs of a bundle, all on one thread.

use crate::attention::Shape;
use crate::graph_io::GraphTensor;
use crate::loader;
use crate::queue::{Chip, Reader};
use moec_ir::plan::{self, GraphDecl};
use moec_qnn_sys::{
    Backend, BinaryInfo, Context, Device, Error, Graph, GraphInfo, Installation, Soc, System, TensorInfo,
};
use moec_runtime::bundle::{BundleReader, CheckedFile};
use moec_runtime::platform::regular::Limit;
use std::path::PathBuf;
use std::rc::Rc;
use std::sync::Arc;

/// File of an artifact with its graphs compiled for the chip.
const CONTEXT: &str = "context.bin";
/// Maximum size of a context binary, which is the address space of an HTP process.
const BINARY: Limit = Limit { what: "a context binary", bytes: 4 << 30 };

/// Stored numbers of a call, tensor by tensor.
#[derive(Debug, Default)]
pub(crate) struct Memory {
    pub(crate) inputs: Vec<Vec<u8>>,
    pub(crate) outputs: Vec<Vec<u8>>,
}

/// Reason that a bundle's graphs cannot be opened.
#[derive(Debug)]
pub(crate) enum OpenError {
    /// The library, or the chip.
    Library(Error),
    /// A file of the bundle.
    File(moec_runtime::Error),
    /// An invalid context, and why.
    Context(PathBuf, String),
    /// A graph, and what is wrong with it.
    Graph(String, String),
    /// The operating system.
    System(String),
}

/// A context of a bundle.
#[derive(Debug)]
struct Package {
    /// Described and loaded from the same file, whatever is at its path by then.
    file: Arc<CheckedFile>,
    info: BinaryInfo,
    /// While it is loaded.
    context: Option<Context>,
}

/// A graph of one.
#[derive(Debug)]
struct Entry {
    name: String,
    package: usize,
    info: GraphInfo,
    /// Once it is found in its context, which is loaded.
    graph: Option<Graph>,
}

/// Inputs and outputs of a graph.
#[derive(Clone, Debug)]
pub(crate) struct GraphSignature {
    pub(crate) name: String,
    pub(crate) inputs: Vec<GraphTensor>,
    pub(crate) outputs: Vec<GraphTensor>,
    /// For attention: its sizes, and the artifact whose graphs keep the same.
    pub(crate) attention: Option<(Shape, String)>,
}

impl GraphSignature {
    /// The artifact whose keys and values it has.
    fn package(&self) -> Option<&str> {
        self.attention.as_ref().map(|(_, package)| &**package)
    }

    /// Whether another graph of the same artifact stores keys and values in the same form.
    fn shares_caches_with(&self, other: &Self) -> bool {
        let count = |p: &Self| p.attention.as_ref().map(|(shape, _)| shape.cache_lengths());
        let of = |p: &'_ Self| p.inputs.get(1..3).map(<[GraphTensor]>::to_vec).unwrap_or_default();
        let alike = of(self).iter().zip(of(other)).all(|(a, b)| a.alike(&b));
        count(self) == count(other) && alike
    }
}

/// See the module.
#[derive(Debug)]
pub(crate) struct LoadedGraphs {
    packages: Vec<Package>,
    graphs: Vec<Entry>,
    device: Rc<Device>,
}

/// Opens the library and the chip that a bundle's contexts are for, and reads what these say of the plan's
/// graphs. Nothing of a context is loaded yet.
///
/// # Errors
/// The library, the chip, a context that is missing or damaged or for another chip than the others, a graph
/// that the plan describes otherwise.
pub(crate) fn open(
    installation: &Installation,
    bundle: &BundleReader,
    graphs: &[GraphDecl],
) -> Result<(LoadedGraphs, Vec<GraphSignature>), OpenError> {
    let backend = Backend::htp(installation).map_err(OpenError::Library)?;
    let system = System::open(installation).map_err(OpenError::Library)?;
    let mut packages: Vec<Package> = Vec::new();
    let (mut entries, mut all) = (Vec::new(), Vec::new());
    for (graph, package) in graphs.iter().zip(loader::artifacts(graphs).1) {
        if package == packages.len() {
            packages.push(described(&system, context_of(bundle, graph)?)?);
        }
        let (entry, signature) = entry(&packages[package], package, graph)?;
        // Graphs of an artifact write and read the same keys and values.
        let before = all
            .iter()
            .find(|p: &&GraphSignature| p.package() == signature.package() && p.package().is_some());
        if before.is_some_and(|before| !before.shares_caches_with(&signature)) {
            let why =
                "its keys and values have another type than in another graph of its artifact".to_owned();
            return Err(OpenError::Graph(signature.name, why));
        }
        entries.push(entry);
        all.push(signature);
    }
    let soc = chip_of(&packages)?;
    let device = Device::new(&backend, soc).map_err(OpenError::Library)?;
    Ok((LoadedGraphs { packages, graphs: entries, device }, all))
}

/// The context of a graph.
fn context_of(bundle: &BundleReader, graph: &GraphDecl) -> Result<CheckedFile, OpenError> {
    let plain = |name: &str| !name.is_empty() && !name.contains(['/', '\\']) && !name.starts_with('.');
    if graph.package.strip_prefix("artifacts/").is_some_and(plain) {
        return bundle.below(&graph.package).open(CONTEXT).map_err(OpenError::File);
    }
    let why = format!("`{}` is not a path below `artifacts/`", graph.package);
    Err(OpenError::Graph(name_of(graph), why))
}

fn name_of(graph: &GraphDecl) -> String {
    format!("{} {}", graph.package, graph.function)
}

/// A context as it describes itself.
fn described(system: &System, file: CheckedFile) -> Result<Package, OpenError> {
    let info = system.binary_info(&file.read(BINARY).map_err(OpenError::File)?);
    let info = info.map_err(|e| OpenError::Context(file.path().to_owned(), e.to_string()))?;
    Ok(Package { file: Arc::new(file), info, context: None })
}

/// A graph of a context, with the ports that the plan says.
fn entry(package: &Package, index: usize, graph: &GraphDecl) -> Result<(Entry, GraphSignature), OpenError> {
    let name = name_of(graph);
    let wrong = |why: String| OpenError::Graph(name.clone(), why);
    let info = package.info.graph(&graph.function).cloned();
    let info =
        info.ok_or_else(|| wrong(format!("`{}` has no graph of that name", package.file.path().display())))?;
    if graph.stateful {
        let shape = Shape::of(graph, &named(&info.inputs), &named(&info.outputs)).map_err(&wrong)?;
        let tensors = |all: &[TensorInfo]| {
            all.iter().map(GraphTensor::stored).collect::<Result<Vec<_>, _>>().map_err(&wrong)
        };
        let (inputs, outputs) = (tensors(&info.inputs)?, tensors(&info.outputs)?);
        if [1, 2].iter().any(|&i| !inputs[i].alike(&outputs[i])) {
            return Err(wrong("its keys and values have different types as input and as output".to_owned()));
        }
        let attention = Some((shape, graph.package.clone()));
        let signature = GraphSignature { name: name.clone(), inputs, outputs, attention };
        return Ok((Entry { name, package: index, info, graph: None }, signature));
    }
    let tensors = |found: &[TensorInfo],
                   planned: &[plan::GraphTensor],
                   what: &str|
     -> Result<Vec<GraphTensor>, OpenError> {
        if found.len() != planned.len() {
            return Err(wrong(format!("it has {} {what}, but the plan has {}", found.len(), planned.len())));
        }
        found
            .iter()
            .zip(planned)
            .map(|(found, planned)| GraphTensor::of(found, planned).map_err(&wrong))
            .collect()
    };
    let inputs = tensors(&info.inputs, &graph.inputs, "inputs")?;
    let outputs = tensors(&info.outputs, &graph.outputs, "outputs")?;
    let signature = GraphSignature { name: name.clone(), inputs, outputs, attention: None };
    Ok((Entry { name, package: index, info, graph: None }, signature))
}

/// Names and extents of tensors.
fn named(all: &[TensorInfo]) -> Vec<(&str, Vec<usize>)> {
    all.iter().map(|t| (&*t.name, t.dims.iter().map(|&n| n as usize).collect())).collect()
}

/// The one chip that all contexts are for.
fn chip_of(packages: &[Package]) -> Result<Soc, OpenError> {
    let Some(first) = packages.first() else {
        return Err(OpenError::System("the plan has no graphs".to_owned()));
    };
    let at = |package: &Package, why: String| OpenError::Context(package.file.path().to_owned(), why);
    let model = first.info.soc_model.ok_or_else(|| at(first, "it does not name its chip".to_owned()))?;
    let soc = Soc::numbered(model)
        .ok_or_else(|| at(first, format!("it is for chip {model}, which is not supported")))?;
    for package in packages {
        package.info.expect(soc).map_err(|e| at(package, e.to_string()))?;
    }
    Ok(soc)
}

impl Chip for LoadedGraphs {
    type Call = Memory;
    type Content = Vec<u8>;

    fn is_loaded(&self, _: usize) -> bool {
        false
    }

    fn reader(&self, artifact: usize) -> Reader<Vec<u8>> {
        let file = self.packages.get(artifact).map(|package| Arc::clone(&package.file));
        Box::new(move || {
            let file = file.ok_or_else(|| format!("there is no artifact {artifact}"))?;
            file.read(BINARY).map_err(|e| e.to_string())
        })
    }

    fn load(&mut self, artifact: usize, content: Vec<u8>) -> Result<(), String> {
        let package =
            self.packages.get_mut(artifact).ok_or_else(|| format!("there is no artifact {artifact}"))?;
        let loaded = Context::load(&self.device, &package.info, &content);
        let loaded = loaded.map_err(|e| format!("`{}`: {e}", package.file.path().display()))?;
        package.context = Some(loaded);
        Ok(())
    }

    fn free(&mut self, artifact: usize) {
        // Graphs keep their context.
        self.graphs.iter_mut().filter(|entry| entry.package == artifact).for_each(|entry| entry.graph = None);
        if let Some(package) = self.packages.get_mut(artifact) {
            package.context = None;
        }
    }

    fn ready(&mut self, graph: usize) -> Result<(), String> {
        let entry = self.graphs.get_mut(graph).ok_or_else(|| format!("there is no graph {graph}"))?;
        if entry.graph.is_some() {
            return Ok(());
        }
        let Package { file, context, .. } = &self.packages[entry.package];
        let at = || format!("`{}`", file.path().display());
        let loaded = context.as_ref().ok_or_else(|| format!("{} is not loaded", at()))?;
        let found = loaded.retrieve(entry.info.clone());
        entry.graph = Some(found.map_err(|e: Error| format!("{}: {e}", at()))?);
        Ok(())
    }

    fn execute(&mut self, graph: usize, memory: &mut Memory) -> Result<(), String> {
        let entry = self.graphs.get(graph).and_then(|entry| Some((entry, entry.graph.as_ref()?)));
        let (entry, loaded) = entry.ok_or_else(|| format!("graph {graph} is not loaded"))?;
        let done = loaded.execute_in(&mut memory.inputs, &mut memory.outputs);
        done.map_err(|e| format!("`{}`: {e}", entry.name))
    }
}
