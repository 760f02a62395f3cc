//! Artifacts of a bundle, executed by programs other than moec: the library's emulator of the chip, from the
//! networks and from the DLC, and onnxruntime. All results are compared with the same weights with
//! activations in f32.
#![expect(clippy::cast_possible_truncation, reason = "sizes of one layer, which the import bounds")]

use super::onnxruntime::{Onnxruntime, PYTHON};
use super::{CONTEXT, CONTEXT_BYTES, DLC, Library, Unavailable, graph_io, networks};
use crate::backend::rows::cycled;
use crate::compose::compose;
use crate::exec::{Executor, share_of, spread};
use crate::net::{Network, TensorId};
use crate::quant::reals;
use moec_backend::{Check, FunctionReport, Trial};
use moec_qnn_sys::worker::Worker;
use moec_qnn_sys::{BinaryInfo, GraphSpec, INSTALL, TensorInfo, TensorSpec};
use moec_runtime::bundle::BundleReader;
use moec_runtime::platform::regular::Limit;
use std::collections::BTreeSet;

type Failed = Box<dyn std::error::Error>;

/// Largest difference from f32 that passes, as a share of the spread of the results.
const BOUND: f64 = 0.02;
/// Most bytes of a context binary that is read.
const BINARY: Limit = Limit { what: "a context binary", bytes: CONTEXT_BYTES };

/// Name of the executor in reports.
const EMULATOR: &str = "QNN's emulator";
const EMULATOR_OF_DLC: &str = "QNN's emulator, from the DLC";
const ONNXRUNTIME: &str = "onnxruntime";

/// Executor of artifacts, if it is installed.
#[derive(Debug)]
pub(in crate::backend) struct Checker {
    library: Option<Library>,
    onnxruntime: Option<Onnxruntime>,
}

/// A network with numbers for its inputs, and the expected results.
struct Case {
    network: Network,
    spec: GraphSpec,
    inputs: Vec<Vec<f32>>,
    /// Result by result.
    want: Vec<Vec<f32>>,
    /// Spread of each result over all rows of the artifact: rows of a small batch may be nearly constant.
    spreads: Vec<f64>,
}

impl Checker {
    /// Finds both; the trial reports missing ones.
    pub(in crate::backend) fn open(trial: &mut Trial<'_, '_>) -> Self {
        let missing = |missing: Unavailable| {
            missing.line("not executed on QNN's emulator, and no context binary checked")
        };
        let library = Library::open(trial.tools, trial.unit).map_err(missing);
        let missing = |why: String| {
            format!("not executed by onnxruntime: {why} ({INSTALL}, or `{PYTHON}` names a Python)")
        };
        let onnxruntime = Onnxruntime::start(trial.tools.cache).map_err(missing);
        trial.unverified.extend(library.as_ref().err().cloned());
        trial.unverified.extend(onnxruntime.as_ref().err().cloned());
        Self { library: library.ok(), onnxruntime: onnxruntime.ok() }
    }

    /// Executes the networks of one artifact, each on the `rows` with its name (f32, one row after the other;
    /// for a network with several inputs all of them, one after the other). Adds to their reports. Returns
    /// what the artifact lacks.
    ///
    /// # Errors
    /// An artifact that cannot be read or executed; a context binary for another chip, or with other graphs.
    pub(in crate::backend) fn check(
        &mut self,
        files: &BundleReader,
        rows: &dyn Fn(&str) -> Vec<f32>,
        reports: &mut [FunctionReport],
    ) -> Result<Option<String>, Failed> {
        if self.library.is_none() && self.onnxruntime.is_none() {
            return Ok(None);
        }
        let mut cases = Vec::new();
        for network in networks(files)? {
            if let Some(report) = reports.iter().position(|r| r.function == network.name) {
                let rows = rows(&network.name);
                cases.push((case(network, files, &rows)?, report));
            }
        }
        if let Some(onnxruntime) = &mut self.onnxruntime {
            for (case, report) in &cases {
                // That process opens it by its path.
                let model = files.path(&format!("{}.onnx", case.network.name))?;
                let got = case.split(&onnxruntime.run(&model, &case.inputs.concat())?);
                reports[*report].checks.push(case.compared(ONNXRUNTIME, &got));
            }
        }
        match &self.library {
            Some(library) => emulate(library, files, &cases, reports),
            None => Ok(None),
        }
    }
}

/// Numbers for a network, and its results with its weights in f32.
fn case(network: Network, files: &BundleReader, rows: &[f32]) -> Result<Case, Failed> {
    let counts = network.inputs.iter().map(|id| network.tensor(*id).elements() as usize);
    let mut rest = rows.iter().copied().cycle();
    let inputs: Vec<Vec<f32>> = counts.map(|count| rest.by_ref().take(count).collect()).collect();
    let given: usize = inputs.iter().map(Vec::len).sum();
    if inputs.len() > 1 && given != rows.len() {
        return Err(format!("`{}` takes {given} numbers, not {}", network.name, rows.len()).into());
    }
    let real = reals(&network, Some(files))?;
    real.verify()?;
    let slices: Vec<&[f32]> = inputs.iter().map(|x| &**x).collect();
    let executor = Executor::new(real.into(), Some(files))?;
    let want = executor.run(&slices)?.outputs;
    let mut all = want.clone();
    if let [first] = inputs.as_slice() {
        for chunk in rows.chunks(first.len().max(1)).skip(1) {
            let more = executor.run(&[&cycled(chunk, first.len())])?.outputs;
            all.iter_mut().zip(more).for_each(|(all, more)| all.extend(more));
        }
    }
    let spreads = all.iter().map(|values| spread(values)).collect();
    let spec = compose(&network, Some(files))?;
    Ok(Case { network, spec, inputs, want, spreads })
}

impl Case {
    /// Results, one after the other.
    fn split(&self, all: &[f32]) -> Vec<Vec<f32>> {
        let mut rest = all.iter().copied();
        self.want.iter().map(|want| rest.by_ref().take(want.len()).collect()).collect()
    }

    /// The worst result is the error of the network.
    fn compared(&self, by: &str, got: &[Vec<f32>]) -> Check {
        let none = Vec::new();
        let references = self.want.iter().zip(&self.spreads).enumerate();
        let each = references.map(|(i, (want, &spread))| share_of(spread, got.get(i).unwrap_or(&none), want));
        // NaN stays.
        let worst = each.fold(0.0_f64, |most, off| if off.is_nan() || off > most { off } else { most });
        Check { by: by.to_owned(), share_of_spread: worst, bound: BOUND }
    }

    fn names(&self, ids: &[TensorId]) -> Vec<String> {
        ids.iter().map(|id| self.network.tensor(*id).name.clone()).collect()
    }

    fn execute(&self, worker: &mut Worker, graph: usize, by: &str) -> Result<Check, Failed> {
        let inputs: Vec<&[f32]> = self.inputs.iter().map(|x| &**x).collect();
        // The library returns the graphs of a DLC in its own order.
        let info = worker.graphs().get(graph).ok_or("it is not a graph of the library")?;
        let names = |all: &[TensorInfo]| all.iter().map(|t| t.name.clone()).collect::<Vec<_>>();
        let (takes, gives) = (names(&info.inputs), names(&info.outputs));
        let given =
            ordered(graph_io::encode(&self.network, &inputs)?, &self.names(&self.network.inputs), &takes)?;
        let results = ordered(worker.execute(graph, given)?, &gives, &self.names(&self.network.outputs))?;
        Ok(self.compared(by, &graph_io::decode(&self.network, &results)?))
    }
}

/// Items with these names, in the order of others. A single item matches any name, since a DLC does not keep
/// all names.
fn ordered(mut all: Vec<Vec<u8>>, names: &[String], order: &[String]) -> Result<Vec<Vec<u8>>, Failed> {
    if names.len() == 1 && order.len() == 1 {
        return Ok(all);
    }
    let one = |name: &String| -> Result<Vec<u8>, Failed> {
        let at = names.iter().position(|known| known == name);
        let found = at.and_then(|at| all.get_mut(at)).ok_or_else(|| format!("it has no `{name}`"))?;
        Ok(std::mem::take(found))
    };
    if names.len() == order.len() {
        order.iter().map(one).collect()
    } else {
        Err("it has other ports".into())
    }
}

/// Executes networks and DLC of an artifact on the emulator, and reads its context binary.
fn emulate(
    library: &Library,
    files: &BundleReader,
    cases: &[(Case, usize)],
    reports: &mut [FunctionReport],
) -> Result<Option<String>, Failed> {
    // The emulator does not load shared weights again, so the executed networks are composed without sharing.
    let mut worker = library.worker(false)?;
    for (case, report) in cases {
        let graph = worker.compose(&case.spec)?;
        reports[*report].checks.push(case.execute(&mut worker, graph, EMULATOR)?);
    }
    let Some(bytes) = files.read_if_any(CONTEXT, BINARY)? else {
        return Ok(Some(format!("it has no `{CONTEXT}`: QNN was not installed at build time")));
    };
    let shown = |e: &dyn std::fmt::Display| format!("`{CONTEXT}`: {e}");
    let info = worker.binary_info(bytes).map_err(|e| shown(&e))?;
    fits(library, &info, cases).map_err(|e| shown(&e))?;
    for (case, report) in cases {
        let path = files.path(&format!("{}.{DLC}", case.network.name))?;
        if path.exists() {
            // The library opens it by its path.
            let mut worker = library.worker(false)?;
            let graphs = worker.compose_dlc(&path)?;
            if worker.graphs().iter().map(|g| &g.name).ne([&case.network.name]) {
                return Err(format!(
                    "`{}` has more or other graphs than `{}`",
                    path.display(),
                    case.network.name
                )
                .into());
            }
            reports[*report].checks.push(case.execute(&mut worker, graphs.start, EMULATOR_OF_DLC)?);
        }
    }
    Ok(None)
}

/// Whether a context binary is for the chip, and has the networks' graphs with their inputs and outputs.
fn fits(library: &Library, info: &BinaryInfo, cases: &[(Case, usize)]) -> Result<(), Failed> {
    info.expect(library.soc)?;
    let names: BTreeSet<&str> = cases.iter().map(|(case, _)| &*case.spec.name).collect();
    let found: BTreeSet<&str> = info.graphs.iter().map(|graph| &*graph.name).collect();
    if names != found {
        return Err(format!("it has the graphs {found:?}, but the networks are {names:?}").into());
    }
    for (case, _) in cases {
        let Some(graph) = info.graph(&case.spec.name) else { continue };
        for (found, expected) in [
            (&graph.inputs, case.spec.inputs().collect::<Vec<_>>()),
            (&graph.outputs, case.spec.outputs().collect()),
        ] {
            if found.len() != expected.len() || !found.iter().zip(expected).all(|(f, w)| same(f, w)) {
                return Err(format!("`{}` has other inputs or outputs than its network", graph.name).into());
            }
        }
    }
    Ok(())
}

fn same(found: &TensorInfo, expected: &TensorSpec) -> bool {
    found.name == expected.name
        && found.dims == expected.dims
        && found.quant == expected.quant
        && found.dtype().is_ok_and(|dtype| dtype == expected.dtype)
}
