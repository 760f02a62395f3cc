//! The Neural Engine, emulated: packages of a bundle, read back from disk and executed in f16.

use crate::exec::{Data, Executor, States, Tensor};
use crate::package::Package;
use moec_ir::plan::{GraphDecl, GraphTensor};
use moec_runtime::bundle::BundleReader;
use moec_runtime::error::{Error, Result};
use moec_runtime::exec::graphs::{Graphs, f16};
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};

/// A function, with the names of its inputs and outputs.
struct Loaded {
    name: String,
    executor: Executor,
    inputs: Vec<(String, Vec<usize>)>,
    outputs: Vec<String>,
    /// Index of its package's states, if it has any.
    states: Option<usize>,
}

/// Executes packages on this machine.
#[derive(Default)]
pub struct Emulated {
    graphs: Vec<Loaded>,
    /// States by package and slot.
    states: Vec<Vec<Mutex<States>>>,
}

impl Graphs for Emulated {
    fn name(&self) -> &'static str {
        "emulated"
    }

    fn load(&mut self, bundle: &BundleReader, graphs: &[GraphDecl], slots: usize) -> Result<()> {
        let mut packages: BTreeMap<&str, (Arc<Package>, Option<usize>)> = BTreeMap::new();
        let mut states = Vec::new();
        for g in graphs {
            let name = format!("{} {}", g.package, g.function);
            let failed = |why: String| Error::graph(name.clone(), why);
            if !packages.contains_key(&*g.package) {
                let package = Package::open(&bundle.below(&g.package)).map_err(|e| failed(e.to_string()))?;
                let state = g.stateful.then(|| {
                    states.push((0..slots).map(|_| Mutex::default()).collect());
                    states.len() - 1
                });
                packages.insert(&g.package, (Arc::new(package), state));
            }
            let (package, state) = &packages[&*g.package];
            let executor = Executor::new(package, Some(&g.function)).map_err(|e| failed(e.to_string()))?;
            let shape = |p: &GraphTensor| p.shape.iter().map(|&n| n as usize).collect::<Vec<_>>();
            let function = executor.function();
            let tensors = [(&function.inputs, &g.inputs, "input"), (&function.outputs, &g.outputs, "output")];
            for (found, declared, what) in tensors {
                for tensor in declared {
                    let value = found.iter().map(|id| &function.values[id.0]).find(|v| v.name == tensor.name);
                    if value.is_none_or(|v| v.ty.shape != shape(tensor)) {
                        return Err(failed(format!(
                            "it has no {what} `{}` of {:?}",
                            tensor.name, tensor.shape
                        )));
                    }
                }
            }
            let (inputs, outputs, states) = (
                g.inputs.iter().map(|p| (p.name.clone(), shape(p))).collect(),
                g.outputs.iter().map(|p| p.name.clone()).collect(),
                *state,
            );
            self.graphs.push(Loaded { name, executor, inputs, outputs, states });
        }
        self.states = states;
        Ok(())
    }

    fn run(&self, graph: usize, slot: usize, inputs: &[&[f16]], outputs: &mut [&mut [f16]]) -> Result<()> {
        let missing = || Error::plan(format!("there is no graph {graph}"));
        let loaded = self.graphs.get(graph).ok_or_else(missing)?;
        let failed = |why: String| Error::graph(loaded.name.clone(), why);
        let mut given = BTreeMap::new();
        for ((name, shape), values) in loaded.inputs.iter().zip(inputs) {
            let tensor = Tensor::new(shape, Data::F16(values.to_vec()));
            let tensor = tensor.ok_or_else(|| failed(format!("`{name}` has another size")))?;
            given.insert(name.clone(), tensor);
        }
        let none = Mutex::default();
        let states = loaded.states.and_then(|i| self.states.get(i)?.get(slot)).unwrap_or(&none);
        let mut states = states.lock().unwrap_or_else(PoisonError::into_inner);
        let results = loaded.executor.run(&given, &mut states).map_err(|e| failed(e.to_string()))?;
        for (name, out) in loaded.outputs.iter().zip(outputs) {
            match results.get(name).map(Tensor::data) {
                Some(Data::F16(values)) if values.len() == out.len() => out.copy_from_slice(values),
                _ => return Err(failed(format!("`{name}` has another shape or type"))),
            }
        }
        Ok(())
    }
}
