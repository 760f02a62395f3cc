//! Executes the functions of a package in fp16, from nothing but what the package holds.
//!
//! # Arithmetic
//!
//! Every value between two operations is fp16 (or fp32, where the package declares fp32), rounded to nearest,
//! ties to even. Inside an operation numbers are f32 and rounded once, at its end: products and sums of
//! `conv`, `linear`, `matmul` and reductions, and the steps of `softmax`, `layer_norm`, `gelu` and `silu`.
//! Sums run in the order of the inner dimension, without fused multiply-adds.
//!
//! Apple documents little of the Neural Engine's arithmetic. Others have measured it (*The Apple Neural
//! Engine: Architecture, Programming, and Performance*, arXiv 2606.22283, chapter "Numerics"). They find fp16
//! inputs, weights and results around an accumulator as wide as fp32, as implemented here. The engine differs
//! in its tables for activations (half a unit in the last place) and in the order of its sums. Its
//! exponentials and composite operators may overflow inside where these do not (apple/coremltools, issues
//! 2690 and 2729). So the evaluator shows what a package computes up to rounding, not the engine's bits.
//!
//! A grouped feed-forward network evaluated here differs from f64 arithmetic on the same fp16 weights by 4e-4
//! to 6e-4 in relative root mean square; for 8 experts of 2048 × 1024 and 64 rows each it is 4.9e-4
//! (`tests/coreml/exactness.rs`). About all of it is the rounding of values between operations.
//!
//! A result that is not finite in its type is an error that names the operation. So an overflow is found
//! where it arises, and not as a NaN in the output.
#![expect(
    clippy::cast_possible_truncation,
    reason = "an evaluator: numbers are rounded, places were checked"
)]

mod call;
mod error;
mod gemm;
mod ops;
mod table;
mod tensor;

pub use error::{ExecError, Fault};
pub use tensor::{Data, Tensor};

use crate::package::{Function, Op, Package, TensorType, ValueId};
use call::Call;
use std::collections::BTreeMap;
use std::num::NonZero;
use std::sync::Arc;
use std::thread::available_parallelism;
use table::{OpFn, Results};

/// Most elements of a tensor that is computed: 512 MiB in f32. Weights may be larger.
pub const MAX_COMPUTED: usize = 1 << 27;

/// Names of the operators that can be executed, `const` excepted, in order.
pub fn operators() -> Vec<&'static str> {
    table::names()
}

/// States, kept by the caller between calls. Functions of a package that have a state of the same name and
/// type share it.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct States(BTreeMap<String, Arc<Tensor>>);

impl States {
    /// The state of that name, if a function has used it or it was set.
    pub fn get(&self, name: &str) -> Option<&Tensor> {
        self.0.get(name).map(Arc::as_ref)
    }

    /// Sets a state.
    pub fn set(&mut self, name: &str, value: Tensor) {
        self.0.insert(name.to_owned(), Arc::new(value));
    }
}

/// A function, loaded: operators are known, and compressed weights are dense.
pub struct Executor {
    package: Arc<Package>,
    name: String,
    function: Arc<Function>,
    /// Values that are known already, by number: the results of `constexpr` operations.
    loaded: Vec<Option<Arc<Tensor>>>,
    /// The last operation that reads each value.
    last_use: Vec<usize>,
    threads: usize,
}

impl Executor {
    /// Loads a function, or the default one.
    ///
    /// # Errors
    /// [`ExecError`] if there is no function of that name, or an operation in it cannot be executed.
    pub fn new(package: &Arc<Package>, name: Option<&str>) -> Result<Self, ExecError> {
        let name = name.unwrap_or(&package.program.default_function).to_owned();
        let Some(function) = package.program.functions.get(&name) else {
            return Err(ExecError::NoFunction {
                name,
                known: package.program.functions.keys().cloned().collect(),
            });
        };
        let mut last_use = vec![0; function.values.len()];
        for (i, op) in function.ops.iter().enumerate() {
            op.args.values().flatten().chain(&op.results).for_each(|id| last_use[id.0] = i);
        }
        function.outputs.iter().for_each(|id| last_use[id.0] = usize::MAX);
        let mut executor = Self {
            package: Arc::clone(package),
            name,
            function: Arc::clone(function),
            loaded: vec![None; function.values.len()],
            last_use,
            threads: available_parallelism().map_or(1, NonZero::get),
        };
        executor.load()?;
        Ok(executor)
    }

    /// Sets the maximum number of threads. Results do not depend on it.
    pub fn threads(mut self, threads: NonZero<usize>) -> Self {
        self.threads = threads.get();
        self
    }

    /// The function that is executed.
    pub fn function(&self) -> &Function {
        &self.function
    }

    fn failed(&self, op: &Op, fault: Fault) -> ExecError {
        ExecError::Op { function: self.name.clone(), op: op.label(), fault }
    }

    /// Checks every operation, and computes those of constants alone.
    fn load(&mut self) -> Result<(), ExecError> {
        let function = Arc::clone(&self.function);
        for op in &function.ops {
            let check = || {
                let row = table::find(&op.kind).ok_or(Fault::UnknownOp)?;
                let strange = op.args.keys().find(|p| !row.parameters.contains(&p.as_str()));
                match strange {
                    Some(parameter) => Err(Fault::UnknownParameter(parameter.clone())),
                    None => Ok(row),
                }
            };
            let row = check().map_err(|fault| self.failed(op, fault))?;
            if let OpFn::Load(run) = row.run {
                let results = self.results(op, run(&self.call(op, &self.loaded)));
                let results = results.map_err(|fault| self.failed(op, fault))?;
                op.results.iter().zip(results).for_each(|(id, r)| self.loaded[id.0] = Some(r));
                op.results.iter().for_each(|id| self.last_use[id.0] = usize::MAX);
            }
        }
        Ok(())
    }

    fn call<'b>(&'b self, op: &'b Op, values: &'b [Option<Arc<Tensor>>]) -> Call<'b> {
        let Self { package, function, threads, .. } = self;
        Call { function, op, weights: &package.weights, values, threads: *threads }
    }

    /// Results, if they are what the package declares.
    fn results(&self, op: &Op, results: Results) -> Results {
        let results = results?;
        if results.len() != op.results.len() {
            return Err(Fault::Results { computed: results.len(), declared: op.results.len() });
        }
        for (result, &id) in results.iter().zip(&op.results) {
            let declared = self.ty(id);
            if result.ty() != declared {
                return Err(Fault::Declared { computed: result.ty(), declared });
            }
        }
        Ok(results)
    }

    fn ty(&self, id: ValueId) -> TensorType {
        self.function.values[id.0].ty.clone()
    }

    fn given(&self, what: &'static str, name: &str, message: impl Into<String>) -> ExecError {
        ExecError::Given { function: self.name.clone(), what, name: name.into(), message: message.into() }
    }

    /// Runs the function. States that it has and `states` lacks start as zeros, as in Core ML; after an error
    /// `states` is as before.
    ///
    /// # Errors
    /// [`ExecError`] for inputs and states that do not fit, and for operations that cannot be computed or
    /// overflow.
    pub fn run(
        &self,
        inputs: &BTreeMap<String, Tensor>,
        states: &mut States,
    ) -> Result<BTreeMap<String, Tensor>, ExecError> {
        let mut values = self.loaded.clone();
        self.take_inputs(inputs, &mut values)?;
        let mut kept = self.take_states(states)?;
        for (i, op) in self.function.ops.iter().enumerate() {
            let failed = |fault| self.failed(op, fault);
            let row = table::find(&op.kind).ok_or(Fault::UnknownOp).map_err(failed)?;
            let results = match row.run {
                OpFn::Plain(run) => run(&self.call(op, &values)),
                OpFn::Stateful(run) => run(&self.call(op, &values), &mut kept),
                OpFn::Load(_) => continue,
            };
            let results = self.results(op, results).map_err(failed)?;
            op.results.iter().zip(results).for_each(|(id, r)| values[id.0] = Some(r));
            let used = op.args.values().flatten().chain(&op.results);
            used.filter(|id| self.last_use[id.0] == i).for_each(|id| values[id.0] = None);
        }
        let mut outputs = BTreeMap::new();
        for &id in &self.function.outputs {
            let name = &self.function.values[id.0].name;
            let value = values[id.0].as_deref().cloned();
            let value = value.ok_or_else(|| self.given("output", name, "it is a constant or a state"))?;
            outputs.insert(name.clone(), value);
        }
        *states = kept;
        Ok(outputs)
    }

    fn take_inputs(
        &self,
        inputs: &BTreeMap<String, Tensor>,
        values: &mut [Option<Arc<Tensor>>],
    ) -> Result<(), ExecError> {
        let function = &self.function;
        for &id in &function.inputs {
            let value = &function.values[id.0];
            let fail = |message: String| self.given("input", &value.name, message);
            let given = inputs.get(&value.name).ok_or_else(|| fail("it is missing".into()))?;
            if given.ty() != value.ty {
                return Err(fail(format!("{} in place of {}", given.ty(), value.ty)));
            }
            if let Some(i) = given.to_f32().iter().position(|x| !x.is_finite()) {
                return Err(fail(format!("element {i} is not finite")));
            }
            values[id.0] = Some(Arc::new(given.clone()));
        }
        let known = |name: &String| function.inputs.iter().any(|id| function.values[id.0].name == *name);
        match inputs.keys().find(|name| !known(name)) {
            Some(name) => Err(self.given("input", name, "the function has no such input")),
            None => Ok(()),
        }
    }

    fn take_states(&self, states: &States) -> Result<States, ExecError> {
        let mut kept = states.clone();
        for &id in &self.function.states {
            let value = &self.function.values[id.0];
            let fail = |message: String| self.given("state", &value.name, message);
            match kept.0.get(&value.name) {
                Some(state) if state.ty() != value.ty => {
                    return Err(fail(format!("{} in place of {}", state.ty(), value.ty)));
                }
                Some(_) => {}
                None => {
                    let small =
                        tensor::checked_elements(&value.ty.shape).and_then(|_| Tensor::zeros(&value.ty));
                    let zeros = small.ok_or_else(|| fail(format!("{} cannot be a state here", value.ty)))?;
                    kept.0.insert(value.name.clone(), Arc::new(zeros));
                }
            }
        }
        Ok(kept)
    }
}
