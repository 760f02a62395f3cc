//! Contexts and their graphs: composed, compiled, executed, saved, loaded.

use super::device::{Backend, Device, Refusal, custom};
use super::log::CallGuard;
use super::marshal::{OwnedNode, OwnedTensor, count, name};
use super::system::{BinaryInfo, GraphInfo, System, TensorInfo};
use crate::abi::{self, Config, Handle, HtpConfig, Tensor};
use crate::error::{Error, Result};
use crate::graph::{GraphSpec, Options, Quant, Role};
use std::ffi::c_void;
use std::ptr;
use std::rc::Rc;

/// A context: graphs of one chip that are saved and loaded as one, and may share their weights.
#[derive(Debug)]
pub struct Context {
    inner: Rc<ContextInner>,
}

/// A context and its graphs. Fields are dropped in their order.
#[derive(Debug)]
pub(crate) struct ContextInner {
    handle: Handle,
    device: Option<Rc<Device>>,
    pub(crate) backend: Rc<Backend>,
}

/// A compiled graph.
#[derive(Debug)]
pub struct Graph {
    context: Rc<ContextInner>,
    handle: Handle,
    info: GraphInfo,
}

impl Context {
    /// An empty context on a chip. With `share`, equal weights of its graphs are kept once.
    ///
    /// # Errors
    /// [`Error::Call`] if the library refuses.
    pub fn new(device: &Rc<Device>, share: bool) -> Result<Self> {
        let sharing = HtpConfig::new(abi::HTP_WEIGHT_SHARING, [u32::from(share), 0]);
        let config = custom(&sharing);
        let configs: &[&Config] = if share { &[&config] } else { &[] };
        Self::create(device.backend(), Some(device), configs)
    }

    /// An empty context of a backend without chips.
    pub(super) fn without_device(backend: &Rc<Backend>) -> Result<Self> {
        Self::create(backend, None, &[])
    }

    fn create(backend: &Rc<Backend>, device: Option<&Rc<Device>>, configs: &[&Config]) -> Result<Self> {
        let create =
            backend.table().context_create.ok_or_else(|| backend.missing_function("contextCreate"))?;
        let list = list(configs);
        // The backend for DLC takes no list, not even an empty one †.
        let list = if configs.is_empty() { ptr::null() } else { list.as_ptr() };
        let chip = device.map_or(ptr::null_mut(), |d| d.handle());
        let mut handle = ptr::null_mut();
        // SAFETY: backend and device live; the list ends in a null and lives until the call returns; `handle`
        // is written.
        let called = backend.call(|| unsafe { create(backend.handle(), chip, list, &raw mut handle) });
        called.map_err(|r| r.of("a context"))?;
        let held = ContextInner { backend: Rc::clone(backend), device: device.cloned(), handle };
        Ok(Self { inner: Rc::new(held) })
    }

    pub(super) fn inner(&self) -> &Rc<ContextInner> {
        &self.inner
    }

    /// Adds a graph and compiles it. One that the library refuses stays in the context, which can still
    /// execute but not be saved: begin another context to save.
    ///
    /// # Errors
    /// [`Error::Graph`] if it is not whole, [`Error::Node`] with the first node that the backend refuses,
    /// [`Error::Call`] for what it refuses otherwise.
    pub fn compose(&mut self, spec: &GraphSpec) -> Result<Graph> {
        // The library accepts any number without an error †.
        let Options { vtcm, level } = spec.options;
        let most = self.inner.device.as_ref().map_or(0, |device| device.soc().vtcm);
        if vtcm > most || !(1..=3).contains(&level) {
            let what = format!("its options are {vtcm} MiB of {most} and level {level} of 1 to 3");
            return Err(Error::Graph { graph: spec.name.clone(), what });
        }
        let options = [
            HtpConfig::new(abi::HTP_VTCM, [vtcm, 0]),
            HtpConfig::new(abi::HTP_OPTIMIZATION, [abi::HTP_FINALIZE_LEVEL, f32::from(level).to_bits()]),
        ];
        let configs = options.each_ref().map(custom);
        self.compose_with(spec, &[&configs[0], &configs[1]])
    }

    pub(super) fn compose_with(&mut self, spec: &GraphSpec, configs: &[&Config]) -> Result<Graph> {
        spec.verify()?;
        let backend = &self.inner.backend;
        let table = backend.table();
        let (Some(create), Some(tensor_create), Some(add)) =
            (table.graph_create, table.tensor_create, table.graph_add_node)
        else {
            return Err(backend.missing_function("graphCreate, tensorCreateGraphTensor or graphAddNode"));
        };
        let (graph_name, list) = (name(&spec.name)?, list(configs));
        let mut handle = ptr::null_mut();
        // SAFETY: the context lives; name and list end as they must and live until the call returns; `handle`
        // is written.
        let called = backend.call(|| unsafe {
            create(self.inner.handle, graph_name.as_ptr(), list.as_ptr(), &raw mut handle)
        });
        called.map_err(|r| r.of(format!("graph `{}`", spec.name)))?;
        // Without a prior check the backend accepts any node, and fails when the graph is compiled, or
        // computes something else †.
        let validate = table.backend_validate_op;
        let mut tensors = Vec::with_capacity(spec.tensors().len());
        for tensor in spec.tensors() {
            let mut held = OwnedTensor::of(tensor)?;
            // SAFETY: the graph lives, and all that the tensor points to is held; its id is written.
            let called = backend.call(|| unsafe { tensor_create(handle, &raw mut held.tensor) });
            called.map_err(|r| r.of(format!("tensor `{}` of graph `{}`", tensor.name, spec.name)))?;
            tensors.push(held);
        }
        for node in spec.nodes() {
            let held = OwnedNode::of(node, &tensors)?;
            let refused = |Refusal { reason, messages }| Error::Node {
                graph: spec.name.clone(),
                node: node.name.clone(),
                op: node.op.clone(),
                reason,
                messages,
            };
            if let Some(validate) = validate {
                // SAFETY: the backend lives, and all that the node points to is held.
                let called = backend.call(|| unsafe { validate(backend.handle(), held.config) });
                called.map_err(refused)?;
            }
            // SAFETY: the graph lives, and all that the node points to is held.
            backend.call(|| unsafe { add(handle, held.config) }).map_err(refused)?;
        }
        let of_role = |role| {
            let of = spec.tensors().iter().zip(&tensors).filter(move |(t, _)| t.role == role);
            of.map(|(t, held)| TensorInfo {
                id: held.tensor.v1.id,
                name: t.name.clone(),
                code: t.dtype.code(),
                dims: t.dims.clone(),
                quant: t.quant.clone(),
            })
            .collect()
        };
        let info = GraphInfo {
            name: spec.name.clone(),
            inputs: of_role(Role::Input),
            outputs: of_role(Role::Output),
        };
        let graph = Graph { context: Rc::clone(&self.inner), handle, info };
        graph.finalize()?;
        Ok(graph)
    }

    /// A graph that the library has created in this context, from a binary or a DLC.
    ///
    /// # Errors
    /// [`Error::Call`] if the library refuses, or has no graph of that name.
    pub fn retrieve(&self, info: GraphInfo) -> Result<Graph> {
        let backend = &self.inner.backend;
        let retrieve =
            backend.table().graph_retrieve.ok_or_else(|| backend.missing_function("graphRetrieve"))?;
        let graph_name = name(&info.name)?;
        let mut handle = ptr::null_mut();
        // SAFETY: the context lives, the name ends in a zero byte, `handle` is written.
        let called =
            backend.call(|| unsafe { retrieve(self.inner.handle, graph_name.as_ptr(), &raw mut handle) });
        called.map_err(|r| r.of(format!("graph `{}`", info.name)))?;
        Ok(Graph { context: Rc::clone(&self.inner), handle, info })
    }

    /// The compiled graphs as bytes, for the chip. The first context of a process gives the same bytes for
    /// the same graphs; later ones have other numbers in them ([`worker`](crate::worker)).
    ///
    /// # Errors
    /// [`Error::Call`] if the library refuses.
    pub fn binary(&self) -> Result<Vec<u8>> {
        let backend = &self.inner.backend;
        let table = backend.table();
        let (Some(size), Some(binary)) = (table.context_binary_size, table.context_binary) else {
            return Err(backend.missing_function("contextGetBinary"));
        };
        let mut len = 0;
        // SAFETY: the context lives, `len` is written.
        let called = backend.call(|| unsafe { size(self.inner.handle, &raw mut len) });
        called.map_err(|r| r.of("the size of a context binary"))?;
        let mut bytes = vec![0u8; usize::try_from(len).unwrap_or(0)];
        let mut written = 0;
        // SAFETY: the memory has `len` bytes, and `written` is written.
        let called = backend.call(|| unsafe {
            binary(self.inner.handle, bytes.as_mut_ptr().cast(), bytes.len() as u64, &raw mut written)
        });
        called.map_err(|r| r.of("a context binary"))?;
        bytes.truncate(usize::try_from(written).unwrap_or(0));
        Ok(bytes)
    }

    /// A context of the bytes that [`Context::binary`] gave, with its graphs in an order of the library's.
    ///
    /// # Errors
    /// [`Error::Binary`] if they are damaged, [`Error::Soc`] if they are for another chip, [`Error::Call`]
    /// for what the library refuses otherwise.
    pub fn from_binary(device: &Rc<Device>, system: &System, bytes: &[u8]) -> Result<(Self, Vec<Graph>)> {
        let info = system.binary_info(bytes)?;
        let context = Self::load(device, &info, bytes)?;
        let graphs = info.graphs.into_iter().map(|graph| context.retrieve(graph)).collect::<Result<_>>()?;
        Ok((context, graphs))
    }

    /// A context of the bytes that [`Context::binary`] gave, of which `info` is the description; its graphs
    /// are [retrieved](Context::retrieve) one by one.
    ///
    /// # Errors
    /// [`Error::Soc`] if they are for another chip, [`Error::Call`] for what the library refuses otherwise.
    pub fn load(device: &Rc<Device>, info: &BinaryInfo, bytes: &[u8]) -> Result<Self> {
        info.expect(device.soc())?;
        let backend = device.backend();
        let load = backend
            .table()
            .context_from_binary
            .ok_or_else(|| backend.missing_function("contextCreateFromBinary"))?;
        let mut handle = ptr::null_mut();
        // SAFETY: backend and device live, the bytes are there until the call returns, `handle` is written;
        // no profile.
        let called = backend.call(|| unsafe {
            load(
                backend.handle(),
                device.handle(),
                ptr::null(),
                bytes.as_ptr().cast(),
                bytes.len() as u64,
                &raw mut handle,
                ptr::null_mut(),
            )
        });
        called.map_err(|r| r.of("a context of a context binary"))?;
        let held = ContextInner { backend: Rc::clone(backend), device: Some(Rc::clone(device)), handle };
        Ok(Self { inner: Rc::new(held) })
    }
}

/// A list that ends in a null.
fn list(configs: &[&Config]) -> Vec<*const c_void> {
    configs.iter().map(|c| ptr::from_ref(*c).cast()).chain([ptr::null()]).collect()
}

impl ContextInner {
    pub(super) fn handle(&self) -> Handle {
        self.handle
    }
}

impl Drop for ContextInner {
    fn drop(&mut self) {
        if let (Some(free), false) = (self.backend.table().context_free, self.handle.is_null()) {
            let _calling = CallGuard::begin();
            // SAFETY: graphs keep the context alive, so no graph uses it now; device and backend are released
            // after it.
            unsafe { free(self.handle, ptr::null_mut()) };
        }
    }
}

impl Graph {
    /// Its name, inputs and outputs.
    pub fn info(&self) -> &GraphInfo {
        &self.info
    }

    pub(super) fn finalize(&self) -> Result<()> {
        let backend = &self.context.backend;
        let finalize =
            backend.table().graph_finalize.ok_or_else(|| backend.missing_function("graphFinalize"))?;
        // SAFETY: the graph's context lives; no profile, no signal.
        let called = backend.call(|| unsafe { finalize(self.handle, ptr::null_mut(), ptr::null_mut()) });
        called.map_err(|r| r.of(format!("to compile graph `{}`", self.info.name)))
    }

    /// Executes it: stored numbers in, stored numbers out, each tensor dense and in the order of
    /// [`GraphInfo`].
    ///
    /// # Errors
    /// As [`Graph::execute_in`].
    pub fn execute(&self, inputs: &[&[u8]]) -> Result<Vec<Vec<u8>>> {
        let mut inputs: Vec<Vec<u8>> = inputs.iter().map(|bytes| bytes.to_vec()).collect();
        let bytes = |info: &TensorInfo| Ok(vec![0; info.bytes()?]);
        let mut outputs = self.info.outputs.iter().map(bytes).collect::<Result<Vec<_>>>()?;
        self.execute_in(&mut inputs, &mut outputs)?;
        Ok(outputs)
    }

    /// Like [`Graph::execute`], in memory of the caller's, of which nothing is copied. The library is given
    /// inputs as memory that it could write to.
    ///
    /// # Errors
    /// [`Error::Inputs`] if there are not as many tensors, or of other lengths; [`Error::Call`] if the
    /// library refuses.
    pub fn execute_in(&self, inputs: &mut [Vec<u8>], outputs: &mut [Vec<u8>]) -> Result<()> {
        let from = self.client_tensors(&self.info.inputs, "inputs", abi::APP_WRITE, inputs)?;
        let to = self.client_tensors(&self.info.outputs, "outputs", abi::APP_READ, outputs)?;
        let backend = &self.context.backend;
        let execute =
            backend.table().graph_execute.ok_or_else(|| backend.missing_function("graphExecute"))?;
        let given: Vec<Tensor> = from.iter().map(|h| h.tensor).collect();
        let mut taken: Vec<Tensor> = to.iter().map(|h| h.tensor).collect();
        let count = |tensors: &[Tensor], what| count(tensors.len(), what, &self.info.name);
        let (inputs, outputs) = (count(&given, "inputs")?, count(&taken, "outputs")?);
        // SAFETY: the graph's context lives; every tensor has memory of its length, which nothing else uses;
        // no profile, no signal.
        let called = backend.call(|| unsafe {
            execute(
                self.handle,
                given.as_ptr(),
                inputs,
                taken.as_mut_ptr(),
                outputs,
                ptr::null_mut(),
                ptr::null_mut(),
            )
        });
        called.map_err(|r| r.of(format!("to execute graph `{}`", self.info.name)))
    }

    /// The tensors of a call over the caller's memory.
    fn client_tensors(
        &self,
        infos: &[TensorInfo],
        what: &str,
        kind: u32,
        memory: &mut [Vec<u8>],
    ) -> Result<Vec<OwnedTensor>> {
        let wrong = |what| Error::Inputs { graph: self.info.name.clone(), what };
        if memory.len() != infos.len() {
            return Err(wrong(format!("{} {what}, and takes {}", memory.len(), infos.len())));
        }
        let one = |(info, bytes): (&TensorInfo, &mut Vec<u8>)| {
            let len = info.bytes()?;
            if bytes.len() != len {
                return Err(wrong(format!("{} bytes for `{}`, which takes {len}", bytes.len(), info.name)));
            }
            // The graph has the quantisation; a call only identifies the tensor and its memory.
            let mut held =
                OwnedTensor::new(&info.name, kind, info.dtype()?, &info.dims, &Quant::None, Vec::new())?;
            held.tensor.v1.id = info.id;
            let len = count(len, "bytes", &info.name)?;
            held.tensor.v1.buffer = abi::ClientBuffer { data: bytes.as_mut_ptr().cast(), len };
            Ok(held)
        };
        infos.iter().zip(memory).map(one).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::find::Installation;
    use crate::graph::{DType, Node};
    use crate::soc::SOCS;

    /// [`Device::new`] must not fail silently: without a device a graph would still be compiled, but for none
    /// of the chips.
    #[test]
    fn graph_without_a_device_targets_another_chip() {
        let found = Installation::find(&moec_testing::cache().unwrap_or_default());
        let Some(installation) = moec_testing::QNN.ok_or_skip(found) else { return };
        let backend = Backend::htp(&installation).unwrap();
        let mut spec = GraphSpec::new("graph");
        let x = spec.input("x", DType::F16, &[2, 8], Quant::None).unwrap();
        let y = spec.output("y", DType::F16, &[2, 8], Quant::None).unwrap();
        spec.node(Node::new("Relu", &[x], &[y])).unwrap();
        let mut context = Context::without_device(&backend).unwrap();
        context.compose_with(&spec, &[]).unwrap();
        let info = System::open(&installation).unwrap().binary_info(&context.binary().unwrap()).unwrap();
        assert!(SOCS.iter().all(|soc| info.expect(*soc).is_err()), "it is for {:?}", info.soc_model);
    }
}
