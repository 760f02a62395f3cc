//! The library, the chip, and what is loaded of a bundle: all on one thread.

use crate::attention::Shape;
use crate::ports::GraphTensor;
use crate::queue::{Chip, Memory};
use moec_ir::plan::{self, GraphDecl};
use moec_qnn_sys::{
    Backend, BinaryInfo, Context, Device, Error, Graph, GraphInfo, Installation, Soc, System, TensorInfo,
};
use moec_runtime::bundle::{BundleReader, CheckedFile};
use moec_runtime::platform::regular::Limit;
use std::path::PathBuf;
use std::rc::Rc;

/// File of an artifact with its graphs compiled for the chip.
const CONTEXT: &str = "context.bin";
/// Most bytes of a context binary that is read: what a process of the HTP has addresses for.
const BINARY: Limit = Limit { what: "a context binary", bytes: 4 << 30 };

/// Reason that a bundle's graphs cannot be opened.
#[derive(Debug)]
pub(crate) enum Refused {
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
    file: CheckedFile,
    info: BinaryInfo,
    /// Once it is loaded.
    context: Option<Context>,
}

/// A graph of one.
#[derive(Debug)]
struct Entry {
    name: String,
    package: usize,
    info: GraphInfo,
    /// Once it is found in its context.
    graph: Option<Graph>,
}

/// Inputs and outputs of a graph.
#[derive(Clone, Debug)]
pub(crate) struct Ports {
    pub(crate) name: String,
    pub(crate) inputs: Vec<GraphTensor>,
    pub(crate) outputs: Vec<GraphTensor>,
    /// For attention: its sizes, and the artifact whose graphs keep the same.
    pub(crate) attention: Option<(Shape, String)>,
}

impl Ports {
    /// The artifact whose keys and values it has.
    fn package(&self) -> Option<&str> {
        self.attention.as_ref().map(|(_, package)| &**package)
    }

    /// Whether another graph of the same artifact stores keys and values alike.
    fn keeps_as(&self, other: &Self) -> bool {
        let count = |p: &Self| p.attention.as_ref().map(|(shape, _)| shape.cached());
        let of = |p: &'_ Self| p.inputs.get(1..3).map(<[GraphTensor]>::to_vec).unwrap_or_default();
        let alike = of(self).iter().zip(of(other)).all(|(a, b)| a.alike(&b));
        count(self) == count(other) && alike
    }
}

/// See the module.
#[derive(Debug)]
pub(crate) struct Loaded {
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
) -> Result<(Loaded, Vec<Ports>), Refused> {
    let backend = Backend::htp(installation).map_err(Refused::Library)?;
    let system = System::open(installation).map_err(Refused::Library)?;
    let (mut packages, mut names): (Vec<Package>, Vec<&str>) = (Vec::new(), Vec::new());
    let (mut entries, mut all) = (Vec::new(), Vec::new());
    for graph in graphs {
        let known = names.iter().position(|name| *name == graph.package);
        let package = if let Some(package) = known {
            package
        } else {
            packages.push(described(&system, context_of(bundle, graph)?)?);
            names.push(&graph.package);
            packages.len() - 1
        };
        let (entry, ports) = entry(&packages[package], package, graph)?;
        // Graphs of an artifact write and read the same keys and values.
        let before = all.iter().find(|p: &&Ports| p.package() == ports.package() && p.package().is_some());
        if before.is_some_and(|before| !before.keeps_as(&ports)) {
            let why =
                "it keeps keys and values in another form than another graph of its artifact".to_owned();
            return Err(Refused::Graph(ports.name, why));
        }
        entries.push(entry);
        all.push(ports);
    }
    let soc = chip_of(&packages)?;
    let device = Device::new(&backend, soc).map_err(Refused::Library)?;
    Ok((Loaded { packages, graphs: entries, device }, all))
}

/// The context of a graph.
fn context_of(bundle: &BundleReader, graph: &GraphDecl) -> Result<CheckedFile, Refused> {
    let plain = |name: &str| !name.is_empty() && !name.contains(['/', '\\']) && !name.starts_with('.');
    if graph.package.strip_prefix("artifacts/").is_some_and(plain) {
        return bundle.below(&graph.package).open(CONTEXT).map_err(Refused::File);
    }
    let why = format!("`{}` is not a place below `artifacts/`", graph.package);
    Err(Refused::Graph(name_of(graph), why))
}

fn name_of(graph: &GraphDecl) -> String {
    format!("{} {}", graph.package, graph.function)
}

/// A context as it describes itself.
fn described(system: &System, file: CheckedFile) -> Result<Package, Refused> {
    let info = system.binary_info(&file.read(BINARY).map_err(Refused::File)?);
    let info = info.map_err(|e| Refused::Context(file.path().to_owned(), e.to_string()))?;
    Ok(Package { file, info, context: None })
}

/// A graph of a context, with the ports that the plan says.
fn entry(package: &Package, index: usize, graph: &GraphDecl) -> Result<(Entry, Ports), Refused> {
    let name = name_of(graph);
    let wrong = |why: String| Refused::Graph(name.clone(), why);
    let info = package.info.graph(&graph.function).cloned();
    let info =
        info.ok_or_else(|| wrong(format!("`{}` has no graph of that name", package.file.path().display())))?;
    if graph.stateful {
        let shape = Shape::of(graph, &named(&info.inputs), &named(&info.outputs)).map_err(&wrong)?;
        let ports = |all: &[TensorInfo]| {
            all.iter().map(GraphTensor::stored).collect::<Result<Vec<_>, _>>().map_err(&wrong)
        };
        let (inputs, outputs) = (ports(&info.inputs)?, ports(&info.outputs)?);
        if [1, 2].iter().any(|&i| !inputs[i].alike(&outputs[i])) {
            return Err(wrong("its keys and values come out in another form than they go in".to_owned()));
        }
        let attention = Some((shape, graph.package.clone()));
        let ports = Ports { name: name.clone(), inputs, outputs, attention };
        return Ok((Entry { name, package: index, info, graph: None }, ports));
    }
    let ports = |found: &[TensorInfo],
                 wanted: &[plan::GraphTensor],
                 what: &str|
     -> Result<Vec<GraphTensor>, Refused> {
        if found.len() != wanted.len() {
            return Err(wrong(format!("it has {} {what}, and the plan says {}", found.len(), wanted.len())));
        }
        found
            .iter()
            .zip(wanted)
            .map(|(found, wanted)| GraphTensor::of(found, wanted).map_err(&wrong))
            .collect()
    };
    let inputs = ports(&info.inputs, &graph.inputs, "inputs")?;
    let outputs = ports(&info.outputs, &graph.outputs, "outputs")?;
    let ports = Ports { name: name.clone(), inputs, outputs, attention: None };
    Ok((Entry { name, package: index, info, graph: None }, ports))
}

/// Names and extents of tensors.
fn named(all: &[TensorInfo]) -> Vec<(&str, Vec<usize>)> {
    all.iter().map(|t| (&*t.name, t.dims.iter().map(|&n| n as usize).collect())).collect()
}

/// The one chip that all contexts are for.
fn chip_of(packages: &[Package]) -> Result<Soc, Refused> {
    let Some(first) = packages.first() else {
        return Err(Refused::System("the plan has no graphs".to_owned()));
    };
    let at = |package: &Package, why: String| Refused::Context(package.file.path().to_owned(), why);
    let model =
        first.info.soc_model.ok_or_else(|| at(first, "it does not say for which chip it is".to_owned()))?;
    let soc = Soc::numbered(model)
        .ok_or_else(|| at(first, format!("it is for chip {model}, which is not known")))?;
    for package in packages {
        package.info.expect(soc).map_err(|e| at(package, e.to_string()))?;
    }
    Ok(soc)
}

impl Chip for Loaded {
    fn ready(&mut self, graph: usize) -> Result<(), String> {
        let entry = self.graphs.get_mut(graph).ok_or_else(|| format!("there is no graph {graph}"))?;
        if entry.graph.is_some() {
            return Ok(());
        }
        let Package { file, info, context } = &mut self.packages[entry.package];
        let said = |e: Error| format!("`{}`: {e}", file.path().display());
        let loaded = if let Some(loaded) = context {
            loaded
        } else {
            let bytes = file.read(BINARY).map_err(|e| e.to_string())?;
            context.insert(Context::load(&self.device, info, &bytes).map_err(said)?)
        };
        entry.graph = Some(loaded.retrieve(entry.info.clone()).map_err(said)?);
        Ok(())
    }

    fn execute(&mut self, graph: usize, memory: &mut Memory) -> Result<(), String> {
        let entry = self.graphs.get(graph).and_then(|entry| Some((entry, entry.graph.as_ref()?)));
        let (entry, loaded) = entry.ok_or_else(|| format!("graph {graph} is not loaded"))?;
        let done = loaded.execute_in(&mut memory.inputs, &mut memory.outputs);
        done.map_err(|e| format!("`{}`: {e}", entry.name))
    }
}
