//! Hot neurons of experts by batch (PowerInfer-2, §4.1.2 and §4.1.3).
//!
//! The hot neurons of the experts of layer `L` are in `artifacts/layers.L.hot.qnn`, a folder:
//!
//! | file | what |
//! |---|---|
//! | `expert{E}_batch{B}.onnx` | the hot neurons that expert `E` has when `B` sequences are decoded, on `B` rows: a part of its sum |
//! | `weights.bin` | codes of all hot neurons: a batch with more of them shares those of one with fewer |
//! | `neurons.bin` | which neurons are hot: u32 `[E, most]`, the hottest first |
//! | `rows.bin` | rows that activate them, f32 `[E, n, H]` |
//! | `context.bin` | where the vendor's library is installed: all networks, compiled |
//!
//! The neurons that are not hot are the CPU's; the plan runs both and adds their sums.
//!
//! A context holds its weights as long as it is loaded. So where experts stay on disk, the neurons that a
//! larger batch adds are a cluster with an artifact of its own, `layers.L.hot1.qnn` and so on, without
//! `neurons.bin`. The plan adds the sums of the artifacts, and a run loads and frees these (§4.2).
#![expect(clippy::cast_possible_truncation, reason = "sizes of one layer, which the import bounds")]

use super::emit::{Gated, limited, measured, read_by_experts};
use super::read::wrong;
use super::rows::{RUN_ROWS, Sample, cycled, deviations};
use super::weights::{WeightFile, columns_of, rounded, rows_of as channels_of};
use super::{ROWS, path_of};
use crate::emit::Ffn;
use crate::exec::Executor;
use crate::net::NetworkError;
use crate::onnx;
use crate::quant::coded;
use moec_backend::error::{Error, Result, io_error};
use moec_backend::{Emit, HotArtifact, HotBatch, HotLayer, LayerExperts};
use moec_ir::plan::{GraphDecl, GraphTensor};
use moec_ir::{Axis, EntryKind, Glu, Module, Op, Operand, Predictor, WeightExpr, WeightId};
use moec_runtime::bundle::BundleReader;
use moec_runtime::platform::regular;
use std::fs;
use std::path::Path;
use std::sync::Arc;

pub(super) type Failed = Box<dyn std::error::Error>;

/// File with the lists of hot neurons.
const NEURONS: &str = "neurons.bin";
/// Rows of each expert to verify its networks by.
const SHOWN: usize = 8;

/// Whether the experts of a layer can be networks of their hot neurons.
///
/// # Errors
/// The reason against it, for people.
pub(super) fn can(module: &Module, layer: u32) -> std::result::Result<(), String> {
    match LayerExperts::of(module, layer) {
        None => Err(format!("layer {layer} has no experts")),
        Some(LayerExperts { glu: Glu::Ungated(_), .. }) => {
            Err("its experts have no gate to decide which neurons are active".into())
        }
        Some(LayerExperts { biases: Some(_), .. }) => {
            Err("its experts have biases, which are not part of a neuron".into())
        }
        Some(_) => Ok(()),
    }
}

/// Name of the network of an expert at a batch.
fn function(expert: usize, batch: u32) -> String {
    format!("expert{expert}_batch{batch}")
}

/// Declaration of that network in a plan.
pub(super) fn declared(layer: &str, hidden: usize, expert: usize, batch: u32) -> GraphDecl {
    let tensor = |name: &str| GraphTensor { name: name.to_owned(), shape: [batch, hidden as u32, 1, 1] };
    GraphDecl {
        package: path_of(layer),
        function: function(expert, batch),
        inputs: vec![tensor("x")],
        outputs: vec![tensor("y")],
        stateful: false,
    }
}

/// The hot neurons that a Graph has in nodes of their own.
fn found(module: &Module, layer: u32) -> HotLayer {
    let batches = module.entries.iter().filter_map(|graph| {
        let EntryKind::Decode(batch) = graph.kind else { return None };
        let mut own = graph.nodes.iter().filter(|n| n.scope.layer == Some(layer));
        let hot = own.find(|n| matches!(n.op, Op::ExpertFfn { fixed: true, .. }))?;
        let Some(&Operand::Weight(down)) = hot.inputs.get(3) else { return None };
        Some(HotBatch { batch, neurons: module.weight(down).cols() as u32 })
    });
    HotLayer { layer, batches: batches.collect() }
}

/// Declarations in a plan of the networks of a layer at a batch, artifact by artifact, expert by expert.
pub(super) fn graphs(module: &Module, layer: u32, batch: u32) -> Vec<Vec<GraphDecl>> {
    let Some(experts) = LayerExperts::of(module, layer) else { return Vec::new() };
    let (hot, down) = (found(module, layer), module.weight(experts.down));
    let clusters = hot.clusters_of(batch);
    let artifacts = hot.artifacts(module).into_iter().filter(|a| a.clusters.start < clusters);
    let each = |a: HotArtifact| {
        (0..down.matrices()).map(|e| declared(&a.name, down.rows(), e, batch)).collect::<Vec<_>>()
    };
    artifacts.map(each).collect()
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

/// The hot neurons of a layer while its networks are written.
struct Making<'a> {
    emit: &'a Emit<'a>,
    layer: &'a HotLayer,
    experts: LayerExperts,
    hidden: usize,
    /// Ends of clusters, ascending.
    cuts: Vec<usize>,
}

impl<'a> Making<'a> {
    fn new(emit: &'a Emit<'a>, layer: &'a HotLayer) -> Result<Self> {
        let experts = LayerExperts::of(emit.module, layer.layer);
        let experts = experts.ok_or_else(|| Error::bug(format!("`{}` has no experts", layer.name())))?;
        let hidden = emit.module.weight(experts.gate_up).cols();
        Ok(Self { emit, layer, experts, hidden, cuts: layer.cluster_ends() })
    }

    fn cannot(&self, e: &dyn std::fmt::Display) -> Error {
        let error = Error::limit(format!("`{}` cannot be networks", self.layer.name())).because(e);
        error.hint("set `hot = \"cpu\"` under `[placement]`")
    }

    fn write(&self, order: &[Vec<u32>]) -> Result<u64> {
        let emit = self.emit;
        let drawn = || {
            let x = read_by_experts(emit.module, self.layer.layer)?;
            deviations(emit.module, x, self.experts.gate_up, emit.numbers)
        };
        let sample = Sample::new(emit.numbers, emit.module, self.experts.gate_up, drawn)?;
        let artifacts = self.layer.artifacts(emit.module);
        let bytes = artifacts.iter().map(|artifact| self.artifact(artifact, order, &sample));
        let bytes = bytes.sum::<Result<u64>>()?;
        let most = self.cuts.last().copied().unwrap_or(0);
        let lists = order.iter().flat_map(|own| own.iter().take(most)).flat_map(|n| n.to_le_bytes());
        self.put(&self.layer.name(), NEURONS, lists.collect())?;
        Ok(bytes)
    }

    /// Writes an artifact. Gives the bytes of its codes.
    fn artifact(&self, artifact: &HotArtifact, order: &[Vec<u32>], sample: &Sample) -> Result<u64> {
        let (emit, name) = (self.emit, &artifact.name);
        let folder = emit.root.join(path_of(name));
        fs::create_dir_all(&folder).map_err(|e| io_error("create", &folder, &e))?;
        let mut file = WeightFile::create(&folder)?;
        let made = order.iter().enumerate().map(|(e, own)| self.expert(e, own, artifact, &mut file));
        let made: Vec<Ffn> = made.collect::<Result<_>>()?;
        let bytes = file.finish()?;
        limited(emit.unit, name, bytes, "set `hot = \"cpu\"` under `[placement]`")?;
        let mut shown = Vec::new();
        for (e, ffn) in made.iter().enumerate() {
            (emit.next)(name)?;
            shown.extend(self.networks(e, ffn, artifact, &folder, sample)?);
        }
        self.put(name, ROWS, shown.iter().flat_map(|x| x.to_le_bytes()).collect())?;
        Ok(bytes)
    }

    fn put(&self, artifact: &str, file: &str, bytes: Vec<u8>) -> Result<()> {
        let path = self.emit.root.join(path_of(artifact)).join(file);
        fs::write(&path, bytes).map_err(|e| io_error("write", &path, &e))
    }

    /// An artifact's network of one expert by clusters, with its codes written to the file: they are the
    /// CPU's codes of these neurons.
    fn expert(&self, e: usize, order: &[u32], artifact: &HotArtifact, file: &mut WeightFile) -> Result<Ffn> {
        let module = self.emit.module;
        let [gate_up, down] = [self.experts.gate_up, self.experts.down].map(|id| module.weight(id));
        let inner = down.cols();
        let both = rounded(self.emit.numbers, gate_up, e)?;
        let columns = rounded(self.emit.numbers, down, e)?;
        let mut clusters = Vec::new();
        let mut first =
            artifact.clusters.start.checked_sub(1).and_then(|i| self.cuts.get(i)).map_or(0, |&end| end);
        for i in artifact.clusters.clone() {
            let end = self.cuts.get(i).copied().unwrap_or(first);
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

    /// Writes the networks of one expert. Returns the rows by which they are verified: of the rows that
    /// measured ranges, those to which the expert's hot neurons contribute most.
    fn networks(
        &self,
        e: usize,
        ffn: &Ffn,
        artifact: &HotArtifact,
        folder: &Path,
        sample: &Sample,
    ) -> Result<Vec<f32>> {
        let plain = |name: &str, rows: usize, clusters: usize| {
            ffn.graph(name, rows, clusters).map_err(|e: NetworkError| self.cannot(&e))
        };
        // Tensors of all batches have the same names: how wide they are is measured once.
        let whole = plain("ranges", RUN_ROWS, ffn.clusters.len())?;
        let shown = strongest_rows(&whole, folder, sample, self.hidden).map_err(|e| self.cannot(&e))?;
        let ranges = measured(whole, folder, sample).map_err(|e| self.cannot(&e))?;
        for HotBatch { batch, .. } in &self.layer.batches {
            let clusters = self.layer.clusters_of(*batch).saturating_sub(artifact.clusters.start);
            if clusters == 0 {
                continue;
            }
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
fn strongest_rows(
    network: &crate::net::Network,
    folder: &Path,
    sample: &Sample,
    hidden: usize,
) -> std::result::Result<Vec<f32>, crate::exec::ExecError> {
    let executor = Executor::new(Arc::new(network.clone()), Some(&BundleReader::unchecked(folder)))?;
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

/// Reads which neurons of layers are hot, and checks that the Graph leaves these to the networks, and all
/// others to the CPU. Executes nothing.
///
/// # Errors
/// A file that is missing or malformed; hot neurons outside of the expert, or that the CPU has, too.
pub(super) fn read(bundle: &BundleReader, module: &Module, hot: &[HotLayer]) -> Result<()> {
    for layer in hot {
        let failed = |e: &dyn std::fmt::Display| wrong(&path_of(&layer.name()), e);
        let experts = LayerExperts::of(module, layer.layer).ok_or_else(|| failed(&"no layer of experts"))?;
        let down = module.weight(experts.down);
        let inner = down.cols();
        let order = neurons(bundle, layer, down.matrices(), inner).map_err(|e| failed(&e))?;
        for &HotBatch { batch, neurons } in layer.batches.iter().filter(|b| (b.neurons as usize) < inner) {
            let cold = cold(module, layer.layer, batch);
            let alike = cold.is_some_and(|cold| cold.complements(module, &order, neurons as usize, inner));
            if !alike {
                return Err(failed(&format!(
                    "Graph and `{NEURONS}` differ in the CPU's neurons for batch {batch}"
                )));
            }
        }
    }
    Ok(())
}

/// Node of the cold neurons of a layer at a batch; `None` where all are hot.
pub(super) fn cold(module: &Module, layer: u32, batch: u32) -> Option<Cold> {
    let graph = module.entries.iter().find(|g| g.kind == EntryKind::Decode(batch))?;
    let mut own = graph.nodes.iter().filter(|n| n.scope.layer == Some(layer));
    let node = own.find(|n| matches!(n.op, Op::NeuronFfn { .. }))?;
    let weights = node.inputs.iter().filter_map(|input| match input {
        Operand::Weight(id) => Some(*id),
        Operand::Value(_) | Operand::State(_) => None,
    });
    let (mut op, mut weights) = (node.op.clone(), weights.collect::<Vec<_>>());
    if let Op::NeuronFfn { predict, .. } = &mut op {
        let own = weights.len().saturating_sub(predict.take().map_or(0, Predictor::weights));
        weights.truncate(own);
    }
    Some(Cold { op, weights })
}

/// Cold neurons that the CPU computes.
pub(super) struct Cold {
    /// `neuron_ffn`, without a predictor: hot and cold neurons together are those of whole experts, whatever
    /// a predictor misses.
    pub(super) op: Op,
    /// Neurons in memory, the hot ones left out; or gates, and up and down, of all neurons, where they stay
    /// on disk, in one weight or two.
    pub(super) weights: Vec<WeightId>,
}

impl Cold {
    /// Whether these are the neurons of each expert after the `hot` first of an order, which `hottest`
    /// begins.
    fn complements(&self, module: &Module, hottest: &[Vec<usize>], hot: usize, inner: usize) -> bool {
        let Op::NeuronFfn { hot: passed_over, .. } = self.op else { return false };
        self.weights.iter().all(|&id| {
            let weight = &module.weight(id).expr;
            match (weight, passed_over) {
                (WeightExpr::Slice { axis: Axis::Rows, start, step: 1, len, of }, None) => {
                    (*start, *len) == (hot, inner - hot) && begins(of, hottest, hot, inner)
                }
                (whole, Some(first)) => first == hot && begins(whole, hottest, hot, inner),
                _ => false,
            }
        })
    }
}

/// Whether the order of a weight's neurons begins with the `hot` first of each expert.
fn begins(weight: &WeightExpr, hottest: &[Vec<usize>], hot: usize, inner: usize) -> bool {
    let same = |own: &[u32], hottest: &[usize]| own.iter().map(|&n| n as usize).eq(hottest.iter().copied());
    match weight {
        WeightExpr::Arrange { order, .. } => order
            .chunks_exact(inner)
            .zip(hottest)
            .all(|(own, first)| own.get(..hot).zip(first.get(..hot)).is_some_and(|(a, b)| same(a, b))),
        _ => hottest.iter().all(|first| first.get(..hot).is_some_and(|f| f.iter().copied().eq(0..hot))),
    }
}

/// Hot neurons of each expert, read from a bundle.
pub(super) fn neurons(
    bundle: &BundleReader,
    layer: &HotLayer,
    experts: usize,
    inner: usize,
) -> Result<Vec<Vec<usize>>, Failed> {
    let bytes = bundle.below(&path_of(&layer.name())).read(NEURONS, regular::NETWORK)?;
    let most = layer.cluster_ends().last().copied().unwrap_or(0);
    let all: Vec<usize> = bytes.as_chunks::<4>().0.iter().map(|b| u32::from_le_bytes(*b) as usize).collect();
    if most == 0 || bytes.len() != experts * most * 4 {
        return Err(format!("`{NEURONS}` has fewer than {most} neurons of one of {experts} experts").into());
    }
    let own = |order: &[usize]| {
        let mut seen = order.to_vec();
        seen.sort_unstable();
        seen.dedup();
        seen.len() == order.len() && seen.last().is_some_and(|&n| n < inner)
    };
    match all.chunks_exact(most).position(|order| !own(order)) {
        Some(e) => {
            Err(format!("`{NEURONS}` names neurons of expert {e} that do not exist, or duplicates").into())
        }
        None => Ok(all.chunks_exact(most).map(<[usize]>::to_vec).collect()),
    }
}
