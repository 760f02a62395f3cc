//! Attention of a layer as networks: found, written, measured, and compared with the Graph's own nodes.
//!
//! An artifact `layers.L.attn.qnn` has a network `chunk{T}` for the chunk of a prompt, and `chunk1` for
//! decoding. Sequences of a batch have caches of their own, so each has a call of its own, whatever the
//! batch. A plan sees a graph with a state ([`moec_ir::plan::Subgraph`]); the host holds keys and values
//! ([`moec_qnn_unit::attention`]).
#![expect(clippy::cast_possible_truncation, reason = "sizes of one layer, which the import bounds")]

use super::read::network;
use super::rows::{HEADROOM, RUN_ROWS, Sample, cycled};
use super::sequences::{reals, shape, write_caches};
use super::weights::{MatrixSlice, WeightFile, rounded};
use crate::emit::{self, Projection, Rotation};
use crate::exec::{Executor, Saturated, Shared};
use crate::quant::Ranges;
use crate::ranges::RangeObserver;
use moec_backend::error::{Error, Result};
use moec_backend::find::{self, AttentionBoundary, Chain, Grouped, Linear, MatchResult, Walk};
use moec_backend::{Distance, Emit, SubgraphBoundary, Trial};
use moec_device::DeviceUnit;
use moec_ir::eval::{Arg, Evaluator, Tensor, op};
use moec_ir::plan::{GraphDecl, GraphTensor};
use moec_ir::{Graph, Module, Node, Op, Operand, StateId, ValueId, WeightId};
use moec_qnn_unit::attention::Cache;
use moec_runtime::bundle::BundleReader;
use moec_runtime::exec::chunk;
use moec_runtime::exec::graphs::f16;
use std::collections::{BTreeMap, HashMap};
use std::path::Path;
use std::rc::Rc;

type Failed = Box<dyn std::error::Error>;

/// The first architecture whose products have 16 bits in both factors.
const PRODUCTS: u32 = 73;

/// Finds the attention of a scope.
///
/// # Errors
/// The reason against it, for people.
pub(super) fn find(module: &Module, walk: &mut Walk<'_>) -> MatchResult<(Grouped, AttentionBoundary)> {
    let (desc, inputs, y) = find::attention(walk)?;
    if desc.v_from_k {
        return Err("it is latent attention, but networks need heads of keys and values".into());
    }
    let (found, ends) = find::grouped(module, walk, desc, inputs, y)?;
    if found.sinks.is_some() {
        return Err("its softmax has sinks, which networks do not support".into());
    }
    Ok((found, ends))
}

/// Whether the unit multiplies queries and keys.
///
/// # Errors
/// The reason against it, for people.
pub(super) fn runs_on(unit: &DeviceUnit) -> std::result::Result<(), String> {
    match unit.hexagon.as_ref().filter(|h| h.arch < PRODUCTS) {
        Some(h) => Err(format!(
            "keys and values have 16 bits, but Hexagon v{} multiplies activations by at most 8 (v{PRODUCTS} supports both)",
            h.arch
        )),
        None => Ok(()),
    }
}

/// Declaration in a plan of the network for this many rows: as `graph`, with a state.
pub(super) fn declared(mut graph: GraphDecl, found: &Grouped, rows: usize) -> GraphDecl {
    let tensor =
        |name: &str, shape: [usize; 4]| GraphTensor { name: name.to_owned(), shape: shape.map(|n| n as u32) };
    let angles = found.q.rope.map(|rope| tensor("angles", [rows, rope.channels, 1, 1]));
    graph.inputs.extend(angles);
    graph.inputs.push(tensor("mask", [1, 1, rows, found.context]));
    graph.inputs.push(tensor("write", [1, 1, found.context, rows]));
    graph.stateful = true;
    graph
}

/// Its matrices as codes, written.
pub(super) fn written(emit: &Emit<'_>, found: &Grouped, file: &mut WeightFile) -> Result<emit::Attention> {
    let (module, desc) = (emit.module, &found.desc);
    let vector =
        |id: WeightId| MatrixSlice { weight: module.weight(id), matrix: 0, rows: 0..1 }.read(emit.numbers);
    let mut projection = |name: &str, linear: Linear| -> Result<Projection> {
        let weight = module.weight(linear.weight);
        let bias = linear.bias.map(vector).transpose()?;
        let channels = rounded(emit.numbers, weight, 0)?;
        file.projection(name, (&channels, 0..weight.rows()), weight.cols(), bias)
    };
    let rotation = |chain: &Chain, heads: usize| -> Result<Rotation> {
        let norm = chain.norm.map(|rms| -> Result<_> {
            let width = if rms.groups == heads { desc.qk_dim } else { heads * desc.qk_dim };
            let gain = rms.weight.map_or_else(|| Ok(vec![1.0; width]), vector)?;
            Ok((gain, rms.eps))
        });
        let rope = chain.rope.map(|r| emit::Rope { offset: r.offset, channels: r.channels, style: r.style });
        Ok(Rotation { norm: norm.transpose()?, rope })
    };
    Ok(emit::Attention {
        hidden: module.weight(found.q.linear.weight).cols(),
        heads: desc.heads,
        kv_heads: desc.kv_heads,
        qk_dim: desc.qk_dim,
        v_dim: desc.v_dim,
        scale: desc.scale,
        context: found.context,
        q: projection("wq", found.q.linear)?,
        k: projection("wk", found.k.linear)?,
        v: projection("wv", found.v.linear)?,
        o: projection("wo", found.o)?,
        of_q: rotation(&found.q, desc.heads)?,
        of_k: rotation(&found.k, desc.kv_heads)?,
        clip: found.q.clip,
    })
}

/// The node that gives the angles of a boundary.
fn angles_of<'a>(module: &'a Module, boundary: &SubgraphBoundary) -> Option<&'a Node> {
    let graph = module.entries.iter().find(|g| g.kind == boundary.entry)?;
    graph.nodes.get(graph.def(boundary.angles?)?.0 as usize)
}

/// Ranges of its activations: rows are read in chunks, each after the keys and values of the one before it,
/// at positions all over the context.
pub(super) fn measured(
    emit: &Emit<'_>,
    made: &emit::Attention,
    boundary: &SubgraphBoundary,
    folder: &Path,
    sample: &Sample,
) -> Result<Ranges> {
    let cannot = |e: &dyn std::fmt::Display| Error::limit("attention cannot be a network").because(e);
    // The number of positions has no influence on ranges.
    let small = emit::Attention { context: RUN_ROWS, ..made.clone() };
    let network = small.graph("ranges", RUN_ROWS).map_err(|e| cannot(&e))?;
    let [hidden, seen] = emit::mask(&network);
    let executor =
        Executor::new(network.into(), Some(&BundleReader::unchecked(folder))).map_err(|e| cannot(&e))?;
    let context = made.context.max(1);
    let angles = match angles_of(emit.module, boundary) {
        Some(node) => Some(angles(emit, node, context)?),
        None => None,
    };
    let mut watch = RangeObserver::default();
    let mut cache = [made.qk_dim, made.v_dim].map(|dim| vec![0.0; made.kv_heads * RUN_ROWS * dim]);
    for (run, (x, held)) in sample.runs().into_iter().enumerate() {
        let before = if run == 0 { hidden } else { seen };
        let sees = |i: usize| {
            let (row, key) = (i / (2 * RUN_ROWS), i % (2 * RUN_ROWS));
            if key < RUN_ROWS {
                before
            } else if key - RUN_ROWS <= row {
                seen
            } else {
                hidden
            }
        };
        let mask: Vec<f32> = (0..RUN_ROWS * 2 * RUN_ROWS).map(sees).collect();
        let x = cycled(&x, RUN_ROWS * made.hidden);
        let rotated = angles.as_ref().map(|all| {
            let width = all.len() / context;
            let row = |t: usize| (run * RUN_ROWS + t) % context * width;
            let half = |from: usize| -> Vec<f32> {
                (0..RUN_ROWS).flat_map(|t| &all[row(t) + from..row(t) + from + width / 2]).copied().collect()
            };
            [half(0), half(width / 2)]
        });
        let mut inputs: Vec<&[f32]> = vec![&x, &cache[0], &cache[1], &mask];
        inputs.extend(rotated.iter().flatten().map(|x| &**x));
        let mut outcome = watch.run(&executor, &inputs, held).map_err(|e| cannot(&e))?;
        if let [_, keys, values] = outcome.outputs.as_mut_slice() {
            cache = [std::mem::take(keys), std::mem::take(values)];
        }
    }
    let most = angles.iter().flatten().fold(0.0_f32, |most, x| most.max(x.abs()));
    Ok(emit::fitted(watch.ranges(HEADROOM), most))
}

/// Angles `[context, R]` of all positions.
fn angles(emit: &Emit<'_>, node: &Node, context: usize) -> Result<Vec<f32>> {
    let mut args = vec![positions(&(0..context as u32).collect::<Vec<_>>())];
    for operand in &node.inputs {
        if let Operand::Weight(id) = *operand {
            let weight = emit.module.weight(id);
            let numbers = MatrixSlice { weight, matrix: 0, rows: 0..1 }.read(emit.numbers)?;
            args.push(Tensor::f32([numbers.len()], numbers));
        }
    }
    let given =
        op(&node.op, args.iter().map(Arg::Tensor).collect()).map_err(|e| Error::bug(e.to_string()))?;
    given.first().map(|t| t.as_f32().to_vec()).ok_or_else(|| Error::bug("the angles have no value"))
}

fn positions(at: &[u32]) -> Tensor {
    Tensor::i32([at.len()], at.iter().map(|&p| p as i32).collect())
}

/// Error of a network, saturated tensors, and the inputs of its longest call, one after the other.
type Evaluated = (Distance, Vec<Saturated>, Vec<f32>);

/// Runs a network on sequences, and the Graph's nodes on the same ones: a chunk with padding after it, the
/// next chunk, one row, and rows at the end of the context, where windows have moved on.
pub(super) fn evaluate(
    trial: &mut Trial<'_, '_>,
    found: &Grouped,
    boundaries: &[SubgraphBoundary],
    graph: &GraphDecl,
    shared: &mut Shared,
) -> std::result::Result<Evaluated, Failed> {
    let boundary = boundaries.iter().max_by_key(|boundary| boundary.rows).ok_or("there is no entry point")?;
    let package = trial.files.below(&graph.package);
    let executor = Executor::sharing(network(trial.files, graph)?.into(), Some(&package), shared)?;
    let shape = shape(graph, executor.network())?;
    let mask = emit::mask(executor.network());
    let hidden = graph.inputs.first().map_or(0, |p| p.shape[1] as usize);
    let rows = graph.inputs.first().map_or(0, |p| p.shape[0] as usize);
    let sample = super::verify::rows(&package, hidden)?;
    let mut from = sample.chunks_exact(hidden).cycle();
    let mut reference = Reference::new(trial.module, trial.evaluator, boundary)?;
    let mut cache: Cache<f32> = shape.cache_lengths().map(|count| vec![0.0; count]);
    let (mut got, mut want, mut saturated, mut last) = (Vec::new(), Vec::new(), BTreeMap::new(), Vec::new());
    for (start, n) in calls(rows, found.context) {
        let at: Vec<u32> = (start..start + n).map(|p| p as u32).collect();
        let x: Vec<f32> = from.by_ref().take(n).flatten().copied().collect();
        // The graph gets the values rounded to f16.
        let x: Vec<f32> = x.iter().map(|x| f16::from_f32(*x).to_f32()).collect();
        let angles = reference.angles(&at)?;
        let inputs = given(graph, found, &x, angles.as_ref(), &at)?;
        let inputs: Vec<&[f16]> = inputs.iter().map(|x| &**x).collect();
        let taken = shape.call_inputs(&inputs)?;
        let all = reals(&taken, &cache, mask);
        let outcome = executor.run(&all.iter().map(|x| &**x).collect::<Vec<_>>())?;
        if n == rows || last.is_empty() {
            last = all.concat();
        }
        for s in outcome.saturated {
            let seen: &mut Saturated =
                saturated.entry(s.tensor.clone()).or_insert(Saturated { count: 0, of: 0, ..s.clone() });
            (seen.count, seen.of) = (seen.count + s.count, seen.of + s.of);
        }
        let results = write_caches(&shape, &mut cache, outcome.outputs, &taken)?;
        let y = results.first().ok_or("it has no result")?;
        got.extend_from_slice(y.get(..n * hidden_of(graph)).ok_or("it has too few results")?);
        want.extend(reference.evaluate(x, angles, &at)?);
    }
    let count = want.len();
    let error = Distance::of(&Tensor::f32([got.len()], got), &Tensor::f32([count], want), count);
    Ok((error, saturated.into_values().collect(), last))
}

/// Channels that a graph gives.
fn hidden_of(graph: &GraphDecl) -> usize {
    graph.outputs.first().map_or(0, |p| p.shape[1] as usize)
}

/// Starts of calls of a network with this many rows, and their numbers of rows.
fn calls(rows: usize, context: usize) -> Vec<(usize, usize)> {
    let (mut all, mut next) = (Vec::new(), 0);
    for n in [(rows * 3 / 4).max(1), rows, 1] {
        let n = n.min(context - next);
        if n > 0 {
            all.push((next, n));
            next += n;
        }
    }
    let tail = rows.min(3).min(context - next);
    all.extend((tail > 0).then_some((context - tail, tail)));
    all
}

/// Inputs of a plan's graph for rows at positions.
fn given(
    graph: &GraphDecl,
    found: &Grouped,
    x: &[f32],
    angles: Option<&Tensor>,
    at: &[u32],
) -> std::result::Result<Vec<Vec<f16>>, Failed> {
    let one = |tensor: &GraphTensor| -> std::result::Result<Vec<f16>, Failed> {
        let mut values = vec![f16::ZERO; tensor.elements()];
        let width = tensor.shape[1] as usize;
        match &*tensor.name {
            "x" => chunk::pad(&mut values, width, x),
            "angles" => chunk::pad(&mut values, width, angles.map_or(&[], |t| t.as_f32())),
            "mask" => chunk::mask(&mut values, found.context, at, found.desc.window),
            _ => chunk::write(&mut values, found.context, at),
        }?;
        Ok(values)
    };
    graph.inputs.iter().map(one).collect()
}

/// The Graph's own nodes, with the caches of one sequence.
struct Reference<'a> {
    module: &'a Module,
    boundary: &'a SubgraphBoundary,
    nodes: Vec<&'a Node>,
    angles: Option<&'a Node>,
    weights: HashMap<WeightId, Rc<Tensor>>,
    caches: HashMap<StateId, Tensor>,
}

impl<'a> Reference<'a> {
    fn new(
        module: &'a Module,
        evaluator: &mut Evaluator<'_>,
        boundary: &'a SubgraphBoundary,
    ) -> std::result::Result<Self, Failed> {
        let graph = module.entries.iter().find(|g| g.kind == boundary.entry).ok_or("no entry point")?;
        let nodes: Vec<&Node> =
            boundary.nodes.iter().filter_map(|id| graph.nodes.get(id.0 as usize)).collect();
        let angles = angles_of(module, boundary);
        let mut weights = HashMap::new();
        for operand in nodes.iter().chain(&angles).flat_map(|n| &n.inputs) {
            if let Operand::Weight(id) = *operand {
                weights.insert(id, evaluator.weight(id)?);
            }
        }
        Ok(Self { module, boundary, nodes, angles, weights, caches: HashMap::new() })
    }

    /// Angles `[n, R]` of positions, for attention with a rotation.
    fn angles(&self, at: &[u32]) -> std::result::Result<Option<Tensor>, Failed> {
        let Some(node) = self.angles else { return Ok(None) };
        let pos = positions(at);
        let weights = node.inputs.iter().filter_map(|o| match o {
            Operand::Weight(id) => self.weights.get(id).map(Rc::as_ref),
            _ => None,
        });
        Ok(op(&node.op, [&pos].into_iter().chain(weights).map(Arg::Tensor).collect())?.pop())
    }

    fn evaluate(
        &mut self,
        x: Vec<f32>,
        angles: Option<Tensor>,
        at: &[u32],
    ) -> std::result::Result<Vec<f32>, Failed> {
        let n = at.len();
        let mut values: HashMap<ValueId, Tensor> = HashMap::from([
            (Graph::POS, positions(at)),
            (Graph::SLOT, Tensor::i32([n], vec![0; n])),
            (self.boundary.x, Tensor::f32([n, x.len() / n.max(1)], x)),
        ]);
        values.extend(self.boundary.angles.zip(angles));
        let mut cached: HashMap<ValueId, StateId> = HashMap::new();
        for node in &self.nodes {
            let mut written = None;
            if let (Op::CacheWrite, Some(Operand::State(id))) = (&node.op, node.inputs.first()) {
                let mut ty = self.module.state(*id).ty.clone();
                ty.shape[..1].fill(1);
                written = Some((*id, self.caches.remove(id).unwrap_or_else(|| Tensor::zeros(ty))));
            }
            let mut args = Vec::new();
            for operand in &node.inputs {
                let tensor = match operand {
                    Operand::State(_) => continue,
                    Operand::Weight(id) => self.weights.get(id).map(Rc::as_ref),
                    Operand::Value(v) => match cached.get(v) {
                        Some(state) => self.caches.get(state),
                        None => values.get(v),
                    },
                };
                let missing = || format!("`{}` reads a value that does not exist", node.op.name());
                args.push(Arg::Tensor(tensor.ok_or_else(missing)?));
            }
            if let Some((_, state)) = &mut written {
                args.insert(0, Arg::State(state));
            }
            let results = op(&node.op, args)?;
            if let Some((id, state)) = written {
                self.caches.insert(id, state);
                cached.extend(node.outputs.iter().map(|v| (*v, id)));
            }
            values.extend(node.outputs.iter().copied().zip(results));
        }
        let y = values.get(&self.boundary.y).ok_or("the part has no result")?;
        Ok(y.as_f32().to_vec())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn calibration_calls_cover_full_padded_and_last_rows() {
        assert_eq!(calls(16, 64), [(0, 12), (12, 16), (28, 1), (61, 3)]);
        assert_eq!(calls(1, 64), [(0, 1), (1, 1), (2, 1), (63, 1)]);
        assert_eq!(calls(16, 20), [(0, 12), (12, 8)]);
    }
}
