//! Hot neurons of experts by batch (PowerInfer-2, §4.1.2 and §4.1.3).
//!
//! The hot neurons of the experts of layer `L` lie at `artifacts/layers.L.hot.qnn`, a folder:
//!
//! | file | what |
//! |---|---|
//! | `expert{E}_batch{B}.onnx` | the hot neurons that expert `E` has when `B` sequences are decoded, on `B` rows: a part of its sum |
//! | `weights.bin` | codes of all hot neurons: a batch with more of them shares those of one with fewer |
//! | `neurons.bin` | which neurons are hot: u32 `[E, most]`, the hottest first |
//! | `rows.bin` | rows that wake them, f32 `[E, n, H]` |
//! | `context.bin` | where the vendor's library is installed: all networks, compiled |
//!
//! The neurons that are not hot are the processor's: whoever runs both adds their sums.

use super::emit::{Gated, limited, measured, read_by_experts};
use super::library::check::Checker;
use super::read::{network, wrong};
use super::rows::{AT_ONCE, Sample, cycled, deviations};
use super::verify::{executed, refuses, routed, rows as rows_of};
use super::weights::{Form, WeightFile, columns_of, rounded, rows_of as channels_of};
use super::{ROWS, path_of};
use crate::emit::Ffn;
use crate::exec::{Executor, Saturated, Shared};
use crate::net::NetworkError;
use crate::onnx;
use crate::quant::coded;
use moec_device::Unit;
use moec_family::error::{Error, Result, io_error};
use moec_family::{Distance, Emit, FunctionReport, HotBatch, HotLayer, LayerExperts, Trial};
use moec_ir::eval::{Arg, Tensor, op};
use moec_ir::plan::{GraphDecl, Port};
use moec_ir::{Glu, Module, Op};
use moec_runtime::regular;
use std::fs;
use std::path::Path;
use std::sync::Arc;

type Failed = Box<dyn std::error::Error>;

/// File that says which neurons are hot.
const NEURONS: &str = "neurons.bin";
/// Rows of each expert to verify its networks by.
const SHOWN: usize = 8;

/// Whether the experts of a layer can be networks of their hot neurons.
///
/// # Errors
/// Why not, for people.
pub(super) fn can(module: &Module, layer: u32) -> std::result::Result<(), String> {
    match LayerExperts::of(module, layer) {
        None => Err(format!("layer {layer} has no experts")),
        Some(LayerExperts { glu: Glu::FatRelu { .. }, .. }) => {
            Err("no operator of a network has the step of FATReLU".into())
        }
        Some(LayerExperts { biases: Some(_), .. }) => {
            Err("its experts have biases, which belong to no neuron".into())
        }
        Some(_) => Ok(()),
    }
}

/// Name of the network of an expert at a batch.
fn function(expert: usize, batch: u32) -> String {
    format!("expert{expert}_batch{batch}")
}

/// What a plan would say of that network.
fn declared(layer: &HotLayer, hidden: usize, expert: usize, batch: u32) -> GraphDecl {
    let port = |name: &str| Port { name: name.to_owned(), shape: [batch, hidden as u32, 1, 1] };
    GraphDecl {
        package: path_of(&layer.name()),
        function: function(expert, batch),
        inputs: vec![port("x")],
        outputs: vec![port("y")],
        stateful: false,
    }
}

/// Writes the hot neurons of a build. Gives the bytes of their codes.
///
/// # Errors
/// More codes than the unit holds; a weight that no code holds; a disk that is full.
pub(super) fn write(emit: &Emit<'_>) -> Result<u64> {
    let mut written = 0;
    for (layer, order) in emit.hot {
        (emit.next)(&layer.name())?;
        written += Making::new(emit, layer)?.write(order)?;
    }
    Ok(written)
}

/// The hot neurons of a layer on their way.
struct Making<'a> {
    emit: &'a Emit<'a>,
    layer: &'a HotLayer,
    experts: LayerExperts,
    hidden: usize,
    /// Where clusters end, ascending.
    cuts: Vec<usize>,
}

impl<'a> Making<'a> {
    fn new(emit: &'a Emit<'a>, layer: &'a HotLayer) -> Result<Self> {
        let experts = LayerExperts::of(emit.module, layer.layer);
        let experts = experts.ok_or_else(|| Error::bug(format!("`{}` has no experts", layer.name())))?;
        let hidden = emit.module.weight(experts.gate_up).cols();
        Ok(Self { emit, layer, experts, hidden, cuts: layer.cuts() })
    }

    fn cannot(&self, e: &dyn std::fmt::Display) -> Error {
        let error = Error::limit(format!("`{}` cannot be networks", self.layer.name())).because(e);
        error.hint("set `hot = \"cpu\"` under `[placement]`")
    }

    fn write(&self, order: &[Vec<u32>]) -> Result<u64> {
        let (emit, name) = (self.emit, self.layer.name());
        let folder = emit.root.join(path_of(&name));
        fs::create_dir_all(&folder).map_err(|e| io_error("create", &folder, &e))?;
        let mut file = WeightFile::create(&folder)?;
        let made = order.iter().enumerate().map(|(e, own)| self.expert(e, own, &mut file));
        let made: Vec<Ffn> = made.collect::<Result<_>>()?;
        let bytes = file.finish()?;
        limited(emit.unit, &name, bytes, "set `hot = \"cpu\"` under `[placement]`")?;
        let drawn = || {
            let x = read_by_experts(emit.module, self.layer.layer)?;
            deviations(emit.module, x, self.experts.gate_up, emit.numbers)
        };
        let sample = Sample::new(emit.numbers, emit.module, self.experts.gate_up, drawn)?;
        let mut shown = Vec::new();
        for (e, ffn) in made.iter().enumerate() {
            (emit.next)(&name)?;
            shown.extend(self.networks(e, ffn, &folder, &sample)?);
        }
        let put = |file: &str, bytes: Vec<u8>| {
            let path = folder.join(file);
            fs::write(&path, bytes).map_err(|e| io_error("write", &path, &e))
        };
        put(ROWS, shown.iter().flat_map(|x| x.to_le_bytes()).collect())?;
        put(NEURONS, order.iter().flatten().flat_map(|n| n.to_le_bytes()).collect())?;
        Ok(bytes)
    }

    /// One expert by clusters, its codes written: they are the processor's of the same neurons.
    fn expert(&self, e: usize, order: &[u32], file: &mut WeightFile) -> Result<Ffn> {
        let module = self.emit.module;
        let [gate_up, down] = [self.experts.gate_up, self.experts.down].map(|id| module.weight(id));
        let inner = down.cols();
        let both = rounded(self.emit.numbers, gate_up, e)?;
        let columns = rounded(self.emit.numbers, down, e)?;
        let (mut clusters, mut first) = (Vec::new(), 0);
        for (i, &end) in self.cuts.iter().enumerate() {
            let own: Vec<usize> =
                order.get(first..end).unwrap_or_default().iter().map(|&n| n as usize).collect();
            let up: Vec<usize> = own.iter().map(|n| n + inner).collect();
            let gated = Gated {
                name: format!("expert{e}.{i}"),
                hidden: self.hidden,
                glu: self.experts.glu,
                gate: (&channels_of(&both, self.hidden, &own), 0..own.len()),
                up: (&channels_of(&both, self.hidden, &up), 0..own.len()),
                down: &columns_of(&columns, inner, &own),
                gate_up_bias: None,
                down_bias: None,
            };
            clusters.extend(gated.written(file)?.clusters);
            first = end;
        }
        Ok(Ffn { hidden: self.hidden, glu: self.experts.glu, clusters })
    }

    /// The networks of one expert, written. Gives the rows that they are verified by: of those that measured ranges the ones of
    /// which its hot neurons make most.
    fn networks(&self, e: usize, ffn: &Ffn, folder: &Path, sample: &Sample) -> Result<Vec<f32>> {
        let plain = |name: &str, rows: usize, clusters: usize| {
            ffn.graph(name, rows, clusters).map_err(|e: NetworkError| self.cannot(&e))
        };
        // Tensors of all batches have the same names: how wide they are is measured once.
        let whole = plain("ranges", AT_ONCE, self.cuts.len())?;
        let shown = awake(&whole, folder, sample, self.hidden).map_err(|e| self.cannot(&e))?;
        let ranges = measured(whole, folder, sample).map_err(|e| self.cannot(&e))?;
        for HotBatch { batch, neurons } in &self.layer.batches {
            let clusters = self.cuts.partition_point(|&end| end <= *neurons as usize);
            let function = function(e, *batch);
            let network = plain(&function, *batch as usize, clusters)?;
            let codes = coded(&network, &ranges).map_err(|e| self.cannot(&e))?;
            let bytes = onnx::write(&codes).map_err(|e| self.cannot(&e))?;
            let path = folder.join(format!("{function}.onnx"));
            fs::write(&path, bytes).map_err(|e| io_error("write", &path, &e))?;
        }
        Ok(shown)
    }
}

/// The [`SHOWN`] rows of a sample of which a network makes most.
fn awake(
    network: &crate::net::Network,
    folder: &Path,
    sample: &Sample,
    hidden: usize,
) -> std::result::Result<Vec<f32>, crate::exec::ExecError> {
    let executor = Executor::new(Arc::new(network.clone()), Some(folder))?;
    let mut rows: Vec<(f32, Vec<f32>)> = Vec::new();
    for (x, _) in sample.runs() {
        let outcome = executor.run(&[&x])?;
        let sums = outcome.outputs.iter().flat_map(|y| y.chunks_exact(hidden));
        let most = |y: &[f32]| y.iter().fold(0.0_f32, |most, y| most.max(y.abs()));
        rows.extend(sums.map(most).zip(x.chunks_exact(hidden).map(<[f32]>::to_vec)));
        rows.sort_by(|a, b| b.0.total_cmp(&a.0));
        rows.truncate(SHOWN);
    }
    Ok(cycled(&rows.into_iter().flat_map(|(_, row)| row).collect::<Vec<_>>(), SHOWN * hidden))
}

/// Reads the networks of layers and checks that the unit holds each; executes nothing. Gives their number.
///
/// # Errors
/// A network that is missing, malformed or too large; hot neurons that are none of an expert's.
pub(super) fn read(folder: &Path, module: &Module, hot: &[HotLayer], unit: &Unit) -> Result<usize> {
    let mut count = 0;
    for layer in hot {
        let failed = |e: &dyn std::fmt::Display| wrong(&path_of(&layer.name()), e);
        let experts = LayerExperts::of(module, layer.layer).ok_or_else(|| failed(&"no layer of experts"))?;
        let down = module.weight(experts.down);
        neurons(folder, layer, down.lead(), down.cols()).map_err(|e| failed(&e))?;
        for e in 0..down.lead() {
            for HotBatch { batch, .. } in &layer.batches {
                let declared = declared(layer, down.rows(), e, *batch);
                let network = network(folder, &declared).map_err(|e| failed(&e))?;
                super::read::held(&network, unit).map_err(|e| failed(&e))?;
                count += 1;
            }
        }
    }
    Ok(count)
}

/// Which neurons of each expert are hot, read from a bundle.
fn neurons(folder: &Path, layer: &HotLayer, experts: usize, inner: usize) -> Result<Vec<Vec<usize>>, Failed> {
    let path = folder.join(path_of(&layer.name())).join(NEURONS);
    let bytes = regular::read(&path, regular::NETWORK).map_err(|e| format!("`{NEURONS}`: {e}"))?;
    let most = layer.cuts().last().copied().unwrap_or(0);
    let all: Vec<usize> = bytes.as_chunks::<4>().0.iter().map(|b| u32::from_le_bytes(*b) as usize).collect();
    if most == 0 || bytes.len() != experts * most * 4 {
        return Err(format!("`{NEURONS}` has not {most} neurons of each of {experts} experts").into());
    }
    let own = |order: &[usize]| {
        let mut seen = order.to_vec();
        seen.sort_unstable();
        seen.dedup();
        seen.len() == order.len() && seen.last().is_some_and(|&n| n < inner)
    };
    match all.chunks_exact(most).position(|order| !own(order)) {
        Some(e) => Err(format!("`{NEURONS}` names neurons that expert {e} has not, or some twice").into()),
        None => Ok(all.chunks_exact(most).map(<[usize]>::to_vec).collect()),
    }
}

/// Evaluates every network of hot neurons against the same neurons of the reference, and has others execute it.
///
/// # Errors
/// A network that is missing, malformed, or does not run.
pub(super) fn verify(
    trial: &mut Trial<'_, '_>,
    mut checker: Option<&mut Checker>,
) -> Result<Vec<FunctionReport>> {
    let mut reports = Vec::new();
    for layer in trial.hot {
        let name = path_of(&layer.name());
        (trial.next)(&name)?;
        let (mut own, rows) = Tried::new(trial, layer)
            .and_then(|tried| Ok((tried.reports(trial)?, tried.rows)))
            .map_err(|e| wrong(&name, &e))?;
        let of = |function: &str| {
            let at = own_expert(function).unwrap_or(0);
            rows.get(at).cloned().unwrap_or_default()
        };
        if let Some(checker) = &mut checker {
            executed(trial, checker, &mut own, &of)?;
        }
        reports.extend(own);
    }
    Ok(reports)
}

/// The expert of a network's name.
fn own_expert(function: &str) -> Option<usize> {
    function.strip_prefix("expert")?.split('_').next()?.parse().ok()
}

/// A layer that is being verified.
struct Tried<'a> {
    layer: &'a HotLayer,
    glu: Glu,
    /// `[E, 2 I, H]` and `[E, H, I]`
    weights: [std::rc::Rc<Tensor>; 2],
    order: Vec<Vec<usize>>,
    /// Rows of each expert, `[n, H]`.
    rows: Vec<Vec<f32>>,
    hidden: usize,
    bound: f64,
}

impl<'a> Tried<'a> {
    fn new(trial: &mut Trial<'_, '_>, layer: &'a HotLayer) -> Result<Self, Failed> {
        let module = trial.module;
        let experts =
            LayerExperts::of(module, layer.layer).ok_or("the Graph has no experts in this layer")?;
        let down = module.weight(experts.down);
        let (count, hidden, inner) = (down.lead(), down.rows(), down.cols());
        let order = neurons(trial.folder, layer, count, inner)?;
        let rows = rows_of(&trial.folder.join(path_of(&layer.name())), hidden)?;
        let each = rows.len() / count.max(1);
        if each == 0 || !rows.len().is_multiple_of(count * hidden) {
            return Err(format!("`{ROWS}` has not as many rows of every expert").into());
        }
        let weights = [trial.evaluator.weight(experts.gate_up)?, trial.evaluator.weight(experts.down)?];
        // Where the reference has the bundle's weights, what their format rounds comes on top.
        let other = if trial.rounded { moec_family::stored(down.format) } else { 0.0 };
        let bound = Form::of(down.format).bound().hypot(other);
        let rows = rows.chunks_exact(each).map(<[f32]>::to_vec).collect();
        Ok(Self { layer, glu: experts.glu, weights, order, rows, hidden, bound })
    }

    fn reports(&self, trial: &Trial<'_, '_>) -> Result<Vec<FunctionReport>, Failed> {
        let mut reports = Vec::new();
        let mut shared = Shared::default();
        for e in 0..self.order.len() {
            for &HotBatch { batch, neurons } in &self.layer.batches {
                let declared = declared(self.layer, self.hidden, e, batch);
                let (error, saturated) = self.evaluate(trial, &declared, (e, neurons), &mut shared)?;
                reports.push(FunctionReport {
                    package: declared.package,
                    function: declared.function,
                    experts: 1,
                    error,
                    bound: self.bound,
                    findings: saturated.iter().map(ToString::to_string).collect(),
                    refused: refuses(&saturated),
                    checks: Vec::new(),
                });
            }
        }
        Ok(reports)
    }

    /// Runs a network on the rows of its expert, and the reference on the same.
    fn evaluate(
        &self,
        trial: &Trial<'_, '_>,
        declared: &GraphDecl,
        (e, neurons): (usize, u32),
        shared: &mut Shared,
    ) -> Result<(Distance, Vec<Saturated>), Failed> {
        let package = trial.folder.join(&declared.package);
        let executor = Executor::sharing(network(trial.folder, declared)?.into(), Some(&package), shared)?;
        let rows = self.rows.get(e).map(Vec::as_slice).unwrap_or_default();
        let each = declared.inputs.first().map_or(0, |p| p.shape[0] as usize) * self.hidden;
        let (mut got, mut saturated) = (Vec::new(), Vec::new());
        for own in rows.chunks(each.max(1)) {
            let outcome = executor.run(&[&cycled(own, each)])?;
            let y = outcome.outputs.into_iter().next().ok_or("it gives nothing")?;
            got.extend(y.into_iter().take(own.len()));
            saturated.extend(outcome.saturated);
        }
        let want = self.reference(e, neurons as usize, rows)?;
        let count = got.len();
        Ok((Distance::of(&Tensor::f32([count], got), &Tensor::f32([count], want), count), saturated))
    }

    /// What the hottest neurons of an expert give, in f32.
    fn reference(&self, e: usize, neurons: usize, x: &[f32]) -> Result<Vec<f32>, Failed> {
        let (hidden, count) = (self.hidden, x.len() / self.hidden);
        let order = self.order.get(e).and_then(|o| o.get(..neurons)).ok_or("it has fewer hot neurons")?;
        let [gate_up, down] = self.weights.each_ref().map(|w| w.as_f32());
        let inner = down.len() / self.order.len() / hidden;
        let (gate_up, down) = (&gate_up[e * 2 * inner * hidden..], &down[e * hidden * inner..]);
        let row = |n: usize| gate_up[n * hidden..(n + 1) * hidden].iter().copied();
        let halves = [0, inner].into_iter().flat_map(|first| order.iter().map(move |n| first + n));
        let own_gate_up: Vec<f32> = halves.flat_map(row).collect();
        let own_down: Vec<f32> =
            (0..hidden).flat_map(|h| order.iter().map(move |n| down[h * inner + n])).collect();
        let inputs = [
            Tensor::f32([count, hidden], x.to_vec()),
            routed(&[0], &[count], 1),
            Tensor::f32([1, 2 * neurons, hidden], own_gate_up),
            Tensor::f32([1, hidden, neurons], own_down),
        ];
        let node = Op::ExpertFfn { glu: self.glu, bias: false, fixed: false };
        let y = op(&node, inputs.iter().map(Arg::Tensor).collect())?;
        Ok(y.first().ok_or("the evaluator gave nothing")?.as_f32().to_vec())
    }
}
