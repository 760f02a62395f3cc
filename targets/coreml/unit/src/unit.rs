//! Core ML itself: loads functions of packages, and predicts.

use crate::cache::Cache;
use crate::{compute_plan, strides};
use block2::RcBlock;
use moec_ir::plan::{self, GraphDecl};
use moec_runtime::bundle::BundleReader;
use moec_runtime::error::{Error, Result};
use moec_runtime::exec::graphs::{Graphs, f16};
use moec_runtime::exec::operations::OperationReport;
use objc2::rc::{Retained, autoreleasepool};
use objc2::runtime::{AnyObject, ProtocolObject};
use objc2::{AnyThread as _, Message};
use objc2_core_ml::{
    MLComputeUnits, MLDictionaryFeatureProvider, MLFeatureDescription, MLFeatureProvider, MLFeatureValue,
    MLModel, MLModelConfiguration, MLMultiArray, MLMultiArrayDataType, MLPredictionOptions, MLState,
};
use objc2_foundation::{NSArray, NSDictionary, NSError, NSNumber, NSProcessInfo, NSString, NSURL};
use std::cell::RefCell;
use std::collections::BTreeMap;
use std::ffi::c_void;
use std::fmt;
use std::path::{Path, PathBuf};
use std::ptr::NonNull;
use std::slice;
use std::sync::{Mutex, PoisonError};

/// First version of macOS with functions and states of packages.
const SYSTEM: isize = 15;

/// Executes packages by Core ML, which runs on the CPU what the Neural Engine does not support.
#[derive(Debug)]
pub(crate) struct CoreMl {
    cache: Cache,
    /// Functions, each of which one thread at a time runs. Different ones may run at a time: every function is
    /// a model of its own.
    graphs: Vec<Mutex<Graph>>,
    /// States of every package that keeps one, by sequence slot.
    states: Vec<Vec<Mutex<State>>>,
}

/// State of a sequence in a package.
#[derive(Debug)]
struct State(Retained<MLState>);

// SAFETY: a handle of Core ML, which is not bound to the thread that created it. The mutex around it lets one
// thread at a time use it, as Apple requires for states.
unsafe impl Send for State {}

/// A function of a package.
struct Graph {
    /// Package and function.
    name: String,
    model: Retained<MLModel>,
    inputs: Vec<GraphTensor>,
    outputs: Vec<GraphTensor>,
    /// Index of its package's states.
    states: Option<usize>,
    /// Last call; kept while callers come with the same memory.
    call: Option<Call>,
}

/// A tensor at the boundary.
struct GraphTensor {
    name: Retained<NSString>,
    label: String,
    shape: [u32; 4],
    len: usize,
    /// The shape and dense strides as Core ML takes them.
    axes: Retained<NSArray<NSNumber>>,
    steps: Retained<NSArray<NSNumber>>,
}

/// Memory of a caller, wrapped.
struct Call {
    /// Addresses of inputs and outputs.
    places: Vec<usize>,
    features: Retained<MLDictionaryFeatureProvider>,
    options: Retained<MLPredictionOptions>,
    backings: Vec<Retained<MLMultiArray>>,
}

// SAFETY: handles of Core ML and Foundation, and addresses. None is bound to the thread that created it. The
// mutex around them lets one thread at a time use them, as Apple requires for models.
unsafe impl Send for Graph {}

impl fmt::Debug for Graph {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Graph").field("name", &self.name).finish_non_exhaustive()
    }
}

impl CoreMl {
    /// Core ML of this machine.
    ///
    /// # Errors
    /// [`Error::Machine`] if the system is too old, or there is no cache folder.
    pub(crate) fn new() -> Result<Self> {
        let version = NSProcessInfo::processInfo().operatingSystemVersion();
        if version.majorVersion < SYSTEM {
            let (major, minor) = (version.majorVersion, version.minorVersion);
            let why = format!("its packages need macOS {SYSTEM} or later, but this is {major}.{minor}");
            return Err(refused("Core ML", why));
        }
        Ok(Self { cache: Cache::open()?, graphs: Vec::new(), states: Vec::new() })
    }

    /// Folder of a package, compiled for this machine. `compiled` has those that were found before.
    fn compiled<'g>(
        &self,
        bundle: &BundleReader,
        package: &'g str,
        compiled: &mut BTreeMap<&'g str, PathBuf>,
    ) -> Result<PathBuf> {
        if let Some(path) = compiled.get(package) {
            return Ok(path.clone());
        }
        let system = NSProcessInfo::processInfo().operatingSystemVersionString().to_string();
        let path = self.cache.compiled(bundle, package, &system, &mut |path| compile(path, package))?;
        compiled.insert(package, path.clone());
        Ok(path)
    }
}

impl Graphs for CoreMl {
    fn name(&self) -> &'static str {
        "Core ML (Neural Engine and CPU)"
    }

    fn load(&mut self, bundle: &BundleReader, graphs: &[GraphDecl], slots: usize) -> Result<()> {
        let mut compiled = BTreeMap::new();
        let mut of_packages: BTreeMap<&str, usize> = BTreeMap::new();
        let (mut functions, mut states) = (Vec::new(), Vec::new());
        for g in graphs {
            autoreleasepool(|_| {
                let path = self.compiled(bundle, &g.package, &mut compiled)?;
                let mut graph = Graph::load(&path, g)?;
                if g.stateful {
                    let index = *of_packages.entry(&g.package).or_insert_with(|| {
                        // SAFETY: the model is loaded; a state is made and nothing else happens.
                        let new = || State(unsafe { graph.model.newState() });
                        states.push((0..slots).map(|_| Mutex::new(new())).collect());
                        states.len() - 1
                    });
                    graph.states = Some(index);
                }
                functions.push(Mutex::new(graph));
                Ok::<_, Error>(())
            })?;
        }
        (self.graphs, self.states) = (functions, states);
        Ok(())
    }

    fn operations(&self, bundle: &BundleReader, graphs: &[GraphDecl]) -> Result<OperationReport> {
        if !compute_plan::is_available() {
            return Ok(OperationReport::Unknown("not reported by this macOS".to_owned()));
        }
        let mut compiled = BTreeMap::new();
        let operations = graphs.iter().map(|g| {
            autoreleasepool(|_| {
                let path = self.compiled(bundle, &g.package, &mut compiled)?;
                compute_plan::operations(&path, g)
            })
        });
        Ok(OperationReport::Known(operations.collect::<Result<_>>()?))
    }

    fn run(&self, graph: usize, slot: usize, inputs: &[&[f16]], outputs: &mut [&mut [f16]]) -> Result<()> {
        let graph = self
            .graphs
            .get(graph)
            .ok_or_else(|| refused("packages", format!("there is no graph {graph}; were they loaded?")))?;
        let mut graph = graph.lock().unwrap_or_else(PoisonError::into_inner);
        let state = match graph.states {
            Some(of) => {
                let state = self.states.get(of).and_then(|slots| slots.get(slot));
                let missing = || refused(&graph.name, format!("it has no state for sequence {slot}"));
                Some(state.ok_or_else(missing)?.lock().unwrap_or_else(PoisonError::into_inner))
            }
            None => None,
        };
        autoreleasepool(|_| graph.predict(state.as_ref().map(|s| &*s.0), inputs, outputs))
    }
}

/// Compiles a package into a temporary folder.
#[expect(
    deprecated,
    reason = "its successor calls back from another thread, and there is nothing to do meanwhile"
)]
fn compile(package: &Path, name: &str) -> Result<PathBuf> {
    let url = url(package, name)?;
    // SAFETY: the URL names a folder; what Core ML finds there it checks itself.
    let made = unsafe { MLModel::compileModelAtURL_error(&url) };
    let made = made.map_err(|e| refused(name, format!("Core ML cannot compile it: {}", error_text(&e))))?;
    made.to_file_path()
        .ok_or_else(|| refused(name, "Core ML returned no folder of the compiled package".to_owned()))
}

/// Configuration of a function: it may use the Neural Engine and the CPU.
pub(crate) fn configuration(function: &str) -> Retained<MLModelConfiguration> {
    // SAFETY: a new object, and properties of it that take these types.
    unsafe {
        let new = MLModelConfiguration::new();
        new.setComputeUnits(MLComputeUnits::CPUAndNeuralEngine);
        new.setFunctionName(Some(&NSString::from_str(function)));
        new
    }
}

impl Graph {
    /// Loads a function and compares its signature with the plan's.
    fn load(compiled: &Path, g: &GraphDecl) -> Result<Self> {
        let name = format!("{}:{}", g.package, g.function);
        let url = url(compiled, &name)?;
        let configuration = configuration(&g.function);
        // SAFETY: the URL names a folder that Core ML itself has written.
        let model = unsafe { MLModel::modelWithContentsOfURL_configuration_error(&url, &configuration) };
        let model =
            model.map_err(|e| refused(&name, format!("Core ML cannot load it: {}", error_text(&e))))?;
        // SAFETY: properties of a loaded model.
        let (takes, gives, keeps) = unsafe {
            let d = model.modelDescription();
            (d.inputDescriptionsByName(), d.outputDescriptionsByName(), d.stateDescriptionsByName())
        };
        if g.stateful == keeps.is_empty() {
            let (has, needed) = if g.stateful { ("no state", "one") } else { ("a state", "none") };
            return Err(refused(&name, format!("it has {has}, but the plan names {needed}")));
        }
        let inputs = tensors(&name, "takes", &g.inputs, &takes)?;
        let outputs = tensors(&name, "gives", &g.outputs, &gives)?;
        Ok(Self { name, model, inputs, outputs, states: None, call: None })
    }

    /// Runs it to its end.
    fn predict(
        &mut self,
        state: Option<&MLState>,
        inputs: &[&[f16]],
        outputs: &mut [&mut [f16]],
    ) -> Result<()> {
        let sizes = |tensors: &[GraphTensor]| tensors.iter().map(|p| p.len).collect::<Vec<_>>();
        let given: [Vec<usize>; 2] =
            [inputs.iter().map(|s| s.len()).collect(), outputs.iter().map(|s| s.len()).collect()];
        if given != [sizes(&self.inputs), sizes(&self.outputs)] {
            return Err(refused(&self.name, "it is called with tensors of other sizes".to_owned()));
        }
        let memory: Vec<NonNull<f16>> = inputs
            .iter()
            .map(|s| NonNull::from(*s).cast())
            .chain(outputs.iter_mut().map(|s| NonNull::from(&mut **s).cast()))
            .collect();
        let places: Vec<usize> = memory.iter().map(|p| p.as_ptr() as usize).collect();
        if self.call.as_ref().is_none_or(|c| c.places != places) {
            self.call = Some(self.wrap(&memory, places)?);
        }
        let Some(call) = &self.call else { return Ok(()) };
        let features = ProtocolObject::from_ref(&*call.features);
        // SAFETY: features and backings point to the slices of this call, of the sizes of their shapes;
        // nothing else reads or writes them until Core ML returns. The caller holds the mutexes of model and
        // state, so that both see one prediction.
        let result = unsafe {
            match state {
                Some(state) => {
                    let model = &self.model;
                    model.predictionFromFeatures_usingState_options_error(features, state, &call.options)
                }
                None => self.model.predictionFromFeatures_options_error(features, &call.options),
            }
        };
        let result =
            result.map_err(|e| refused(&self.name, format!("Core ML cannot run it: {}", error_text(&e))))?;
        for ((tensor, backing), to) in self.outputs.iter().zip(&call.backings).zip(outputs) {
            tensor.collect(&result, backing, to).map_err(|why| refused(&self.name, why))?;
            if let Some(at) = strides::overflow(to) {
                let why =
                    format!("element {at} of `{}` is {}, which f16 does not hold", tensor.label, to[at]);
                return Err(refused(&self.name, why));
            }
        }
        Ok(())
    }

    /// Wraps the memory of a call: inputs, then outputs.
    fn wrap(&self, memory: &[NonNull<f16>], places: Vec<usize>) -> Result<Call> {
        let failed = |what: &str, e: &NSError| refused(&self.name, format!("{what}: {}", error_text(e)));
        let wrapped = |tensor: &GraphTensor, at: &NonNull<f16>| {
            tensor.array(*at).map_err(|e| failed(&format!("Core ML does not accept `{}`", tensor.label), &e))
        };
        let (given, results) = memory.split_at(self.inputs.len());
        let arrays = self.inputs.iter().zip(given).map(|(p, at)| wrapped(p, at));
        let value = |array: Result<Retained<MLMultiArray>>| {
            // SAFETY: a value is made of an array.
            array.map(|a| unsafe { MLFeatureValue::featureValueWithMultiArray(&a) })
        };
        let values = arrays.map(value).collect::<Result<Vec<_>>>()?;
        let features = dictionary(&self.inputs, &values);
        // SAFETY: the dictionary holds values under names, as it must.
        let features = unsafe {
            MLDictionaryFeatureProvider::initWithDictionary_error(
                MLDictionaryFeatureProvider::alloc(),
                &features,
            )
        };
        let features = features.map_err(|e| failed("Core ML does not accept the inputs", &e))?;
        let backings =
            self.outputs.iter().zip(results).map(|(p, at)| wrapped(p, at)).collect::<Result<Vec<_>>>()?;
        // SAFETY: a new object, and a property that takes arrays under the names of outputs.
        let options = unsafe {
            let new = MLPredictionOptions::new();
            new.setOutputBackings(&dictionary(&self.outputs, &backings));
            new
        };
        Ok(Call { places, features, options, backings })
    }
}

impl GraphTensor {
    fn new(tensor: &plan::GraphTensor) -> Option<Self> {
        let steps = strides::dense(tensor.shape)?;
        let numbers = |n: [usize; 4]| NSArray::from_retained_slice(&n.map(NSNumber::new_usize));
        Some(Self {
            name: NSString::from_str(&tensor.name),
            label: tensor.name.clone(),
            shape: tensor.shape,
            len: tensor.elements(),
            axes: numbers(tensor.shape.map(|n| n as usize)),
            steps: numbers(steps),
        })
    }

    /// An array over memory of the tensor's size. It frees nothing.
    fn array(&self, at: NonNull<f16>) -> std::result::Result<Retained<MLMultiArray>, Retained<NSError>> {
        // SAFETY: the caller's memory holds `len` numbers, the product of the shape, densely. It may end
        // before the array does, which is used in calls with memory at the same address only.
        unsafe {
            MLMultiArray::initWithDataPointer_shape_dataType_strides_deallocator_error(
                MLMultiArray::alloc(),
                at.cast::<c_void>(),
                &self.axes,
                MLMultiArrayDataType::Float16,
                &self.steps,
                None,
            )
        }
    }

    /// Sees that an output is in the caller's memory: copies it where Core ML did not use the backing.
    fn collect(
        &self,
        result: &ProtocolObject<dyn MLFeatureProvider>,
        backing: &MLMultiArray,
        to: &mut [f16],
    ) -> std::result::Result<(), String> {
        // SAFETY: this only queries the result of a prediction.
        let array = unsafe { result.featureValueForName(&self.name).and_then(|v| v.multiArrayValue()) };
        let array = array.ok_or_else(|| format!("Core ML returned no `{}`", self.label))?;
        if std::ptr::eq(&raw const *array, backing) {
            return Ok(());
        }
        // SAFETY: as above.
        let (shape, strides, kind) = unsafe { (array.shape(), array.strides(), array.dataType()) };
        if !same(&shape, self.shape) || kind != MLMultiArrayDataType::Float16 {
            return Err(format!("Core ML returned `{}` in another shape or type", self.label));
        }
        let strides: Vec<isize> = strides.iter().map(|n| n.as_isize()).collect();
        let done = RefCell::new(Err("Core ML gives no access to its bytes".to_owned()));
        let to = RefCell::new(to);
        let copy = RcBlock::new(|bytes: NonNull<c_void>, size: isize| {
            if !bytes.cast::<f16>().is_aligned() {
                *done.borrow_mut() = Err("Core ML's memory is not aligned".to_owned());
                return;
            }
            let len = usize::try_from(size).unwrap_or(0) / size_of::<f16>();
            // SAFETY: Core ML keeps that many bytes valid while this block runs, and every bit pattern of f16
            // is valid.
            let from = unsafe { slice::from_raw_parts(bytes.cast::<f16>().as_ptr(), len) };
            *done.borrow_mut() = strides::gather(from, self.shape, &strides, &mut to.borrow_mut());
        });
        // SAFETY: the block is called before this returns, with bytes that it only reads.
        unsafe { array.getBytesWithHandler(&copy) };
        drop(copy);
        done.into_inner().map_err(|why| format!("`{}`: {why}", self.label))
    }
}

/// The tensors of a function, if it has them and no others.
fn tensors(
    graph: &str,
    verb: &str,
    planned: &[plan::GraphTensor],
    found: &NSDictionary<NSString, MLFeatureDescription>,
) -> Result<Vec<GraphTensor>> {
    if found.len() != planned.len() {
        let why = format!("it {verb} {} tensors, but the plan names {}", found.len(), planned.len());
        return Err(refused(graph, why));
    }
    let all = planned.iter().map(|tensor| {
        let description_of_plan = || format!("`{}`, f16 {:?}", tensor.name, tensor.shape);
        let description = found.objectForKey(&NSString::from_str(&tensor.name));
        // SAFETY: properties of a description.
        let constraint = description.and_then(|d| unsafe { d.multiArrayConstraint() });
        let constraint =
            constraint.ok_or_else(|| refused(graph, format!("it {verb} no {}", description_of_plan())))?;
        // SAFETY: as above.
        let (shape, kind) = unsafe { (constraint.shape(), constraint.dataType()) };
        let exact = same(&shape, tensor.shape) && kind == MLMultiArrayDataType::Float16;
        let port_of = GraphTensor::new(tensor).filter(|_| exact);
        port_of.ok_or_else(|| {
            let shape: Vec<isize> = shape.iter().map(|n| n.as_isize()).collect();
            let why = format!(
                "it {verb} `{}` as {shape:?}, type {:#x}, not {}",
                tensor.name,
                kind.0,
                description_of_plan()
            );
            refused(graph, why)
        })
    });
    all.collect()
}

/// Whether a shape is that of four axes.
fn same(found: &NSArray<NSNumber>, shape: [u32; 4]) -> bool {
    found.len() == shape.len() && found.iter().zip(shape).all(|(n, want)| n.as_isize() == want as isize)
}

/// Objects under the names of tensors.
fn dictionary<T: Message + AsRef<AnyObject>>(
    tensors: &[GraphTensor],
    objects: &[Retained<T>],
) -> Retained<NSDictionary<NSString, AnyObject>> {
    let names: Vec<&NSString> = tensors.iter().map(|p| &*p.name).collect();
    let objects: Vec<&AnyObject> = objects.iter().map(|o| (**o).as_ref()).collect();
    NSDictionary::from_slices(&names, &objects)
}

pub(crate) fn url(folder: &Path, graph: &str) -> Result<Retained<NSURL>> {
    let none = || refused(graph, format!("`{}` is not a valid path for Foundation", folder.display()));
    NSURL::from_directory_path(folder).ok_or_else(none)
}

pub(crate) fn refused(graph: &str, why: String) -> Error {
    Error::graph(graph.to_owned(), why)
}

/// Text of an error, with its causes.
pub(crate) fn error_text(error: &NSError) -> String {
    let mut text = format!("{} ({} {})", error.localizedDescription(), error.domain(), error.code());
    let reasons = error.localizedFailureReason().map(|r| r.to_string());
    let causes =
        error.underlyingErrors().iter().map(|e| e.localizedDescription().to_string()).collect::<Vec<_>>();
    for more in reasons.into_iter().chain(causes).filter(|m| !m.is_empty()) {
        if !text.contains(&more) {
            text.push_str("; ");
            text.push_str(&more);
        }
    }
    text
}
