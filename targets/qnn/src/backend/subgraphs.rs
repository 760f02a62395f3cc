//! Static graphs other than experts: dense networks, shared experts, the head.
//!
//! | part | artifact below `artifacts/` | networks |
//! |---|---|---|
//! | attention of layer L | `layers.L.attn.qnn` | `chunk{T}`: see [`super::attention`] |
//! | dense layer L | `layers.L.ffn.qnn` | `rows{T}`: `x` → `y` |
//! | shared experts of layer L | `layers.L.shared.qnn` | the same |
//! | head | `head.qnn`, or `head.0.qnn`, … where one is over the limit | `rows{T}`: `x` → `logits0` |
//!
//! An artifact has a network for each number of rows of an entry point: all read the same codes.
#![expect(clippy::cast_possible_truncation, reason = "sizes of one layer, which the import bounds")]

use super::attention;
use super::emit::{Gated, SMALLER, limited, measured, shown};
use super::path_of;
use super::read::{network, wrong};
use super::rows::{RUN_ROWS, Sample, deviations};
use super::verify::{VerifyInputs, refuses};
use super::weights::{MatrixSlice, WeightFile, WeightStorage, rounded};
use crate::emit::{Attention, Ffn, Head, Projection};
use crate::exec::{Executor, Saturated, Shared};
use crate::net::{Network, NetworkError};
use crate::onnx;
use crate::quant::coded;
use moec_backend::distance;
use moec_backend::error::{Error, Result, io_error};
use moec_backend::experts::is_one_expert;
use moec_backend::find::{self, Dense, Grouped, Linear, Walk};
use moec_backend::{
    Distance, Emit, FunctionReport, StaticAttention, StaticSubgraph, SubgraphBoundary, SubgraphFunction,
    Trial,
};
use moec_device::DeviceUnit;
use moec_ir::eval::{Arg, Tensor, op};
use moec_ir::plan::{GraphDecl, GraphTensor};
use moec_ir::{Format, Module, Operand, Role, Scope, ValueId, WeightId};
use std::collections::{BTreeSet, HashMap};
use std::fs;
use std::ops::Range;

type Failed = Box<dyn std::error::Error>;

/// A part, found in the Graph.
#[derive(Clone, Debug)]
pub(super) struct HtpSubgraph {
    name: String,
    scope: Scope,
    boundaries: Vec<SubgraphBoundary>,
    kind: Kind,
}

#[derive(Clone, Debug, PartialEq)]
enum Kind {
    Attention(Box<Grouped>),
    Dense(Dense),
    Head(Linear),
}

/// One artifact of a part, with some of the part's results.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Artifact {
    /// `layers.0.ffn`, `head.1`
    name: String,
    /// Name of the result.
    output: &'static str,
    /// Channels of the part's result that it gives.
    channels: Range<usize>,
}

impl HtpSubgraph {
    /// The part of a scope.
    ///
    /// # Errors
    /// The reason, for people, why there is no network.
    pub(super) fn find(module: &Module, scope: &Scope) -> std::result::Result<Self, String> {
        let (mut part, mut name): (Option<Kind>, _) = (None, scope.clone());
        let mut boundaries = Vec::new();
        // Hot networks, and the CPU's neurons, have the others.
        for graph in module.entries.iter().filter(|g| !is_one_expert(g, scope)) {
            let mut walk = Walk::new(graph, scope);
            let mut angles = None;
            let (kind, x, y) = match scope.role() {
                Role::Attention => {
                    let (found, ends) = attention::find(module, &mut walk)?;
                    angles = ends.angles;
                    (Kind::Attention(Box::new(found)), ends.x, ends.y)
                }
                // A network between norms has none of the supported forms.
                Role::Network if scope.part != moec_ir::Part::SHARED => {
                    if walk.nodes().any(|n| n.op.expert_ffn().is_some()) {
                        name.part = moec_ir::Part::SHARED;
                    }
                    let (found, x, y) = find::dense(module, &mut walk)?;
                    (Kind::Dense(found), x, y)
                }
                Role::Head => {
                    let (found, x, y) = find::head(module, &mut walk)?;
                    (Kind::Head(found), x, y)
                }
                Role::Mixer => return Err("networks cannot hold recurrent states".into()),
                Role::Network | Role::Other => {
                    return Err("no network exists for this part of the model".into());
                }
            };
            let rows = match &kind {
                // One sequence at a time, since each has its own cache.
                Kind::Attention(_) if !graph.kind.is_prefill() => 1,
                _ => graph.ty(x).rows(),
            };
            boundaries.push(SubgraphBoundary {
                entry: graph.kind,
                nodes: walk.close(y)?,
                x,
                angles,
                y,
                rows,
            });
            if part.get_or_insert_with(|| kind.clone()) != &kind {
                return Err("entry points have it in different forms".into());
            }
        }
        let kind = part.ok_or("there is no entry point")?;
        Ok(Self { name: name.to_string(), scope: scope.clone(), boundaries, kind })
    }

    /// Description of it for the compiler.
    ///
    /// # Errors
    /// A part that no graph of the unit holds.
    pub(super) fn described(
        self,
        module: &Module,
        unit: &DeviceUnit,
    ) -> std::result::Result<StaticSubgraph, String> {
        let artifacts = self.artifacts(module, unit)?;
        let mut kept = None;
        if let Kind::Attention(found) = &self.kind {
            attention::runs_on(unit)?;
            kept = Some(StaticAttention { context: found.context, window: found.desc.window });
        }
        let hidden = self.hidden(module);
        let of = |boundary: &SubgraphBoundary, artifact: &Artifact| {
            let tensor = |name: &str, channels: usize| GraphTensor {
                name: name.to_owned(),
                shape: [boundary.rows as u32, channels as u32, 1, 1],
            };
            let graph = GraphDecl {
                package: path_of(&artifact.name),
                function: self.function(boundary.rows),
                inputs: vec![tensor("x", hidden)],
                outputs: vec![tensor(artifact.output, artifact.channels.len())],
                stateful: false,
            };
            let graph = match &self.kind {
                Kind::Attention(found) => attention::declared(graph, found, boundary.rows),
                Kind::Dense(_) | Kind::Head(_) => graph,
            };
            SubgraphFunction { entry: boundary.entry, graph }
        };
        let graphs = self
            .boundaries
            .iter()
            .flat_map(|boundary| artifacts.iter().map(move |a| of(boundary, a)))
            .collect();
        let matrices = self.matrices();
        Ok(StaticSubgraph {
            name: self.name,
            scope: self.scope,
            boundaries: self.boundaries,
            attention: kept,
            graphs,
            matrices,
            legalised: Vec::new(),
        })
    }

    fn matrices(&self) -> Vec<WeightId> {
        match &self.kind {
            Kind::Attention(found) => found.matrices(),
            Kind::Dense(dense) => dense.matrices(),
            Kind::Head(head) => vec![head.weight],
        }
    }

    /// The matrix that reads its rows.
    fn first(&self) -> Option<WeightId> {
        self.matrices().first().copied()
    }

    fn hidden(&self, module: &Module) -> usize {
        self.first().map_or(0, |id| module.weight(id).cols())
    }

    /// Its artifacts: one, or of the head as many as the unit's limit requests.
    fn artifacts(&self, module: &Module, unit: &DeviceUnit) -> std::result::Result<Vec<Artifact>, String> {
        let bytes = |id: &WeightId| {
            let weight = module.weight(*id);
            WeightStorage::of(weight.format).bytes(weight.shape.iter().map(|&n| n as u64).product())
        };
        let bytes: u64 = self.matrices().iter().map(bytes).sum();
        let limit = unit.graph_limit().unwrap_or(u64::MAX);
        match &self.kind {
            Kind::Attention(_) | Kind::Dense(_) if bytes > limit => {
                Err(format!("it has {bytes} bytes of weights; a graph holds {limit}"))
            }
            Kind::Attention(_) | Kind::Dense(_) => {
                let last = self.matrices().last().map_or(0, |id| module.weight(*id).rows());
                let channels = 0..last;
                Ok(vec![Artifact { name: self.name.clone(), output: "y", channels }])
            }
            Kind::Head(head) => {
                let rows = module.weight(head.weight).rows();
                // Codes do not include scales, biases and alignment.
                let reckoned = bytes.saturating_add(bytes / 8);
                let count = usize::try_from(reckoned.div_ceil(limit.max(1))).unwrap_or(usize::MAX);
                if count > rows {
                    return Err(format!("not one entry of the vocabulary fits {limit} bytes"));
                }
                let each = rows.div_ceil(count.max(1)).max(1);
                let of = |(i, start): (usize, usize)| {
                    let name = if count > 1 { format!("{}.{i}", self.name) } else { self.name.clone() };
                    Artifact { name, output: "logits0", channels: start..rows.min(start + each) }
                };
                Ok((0..rows).step_by(each).enumerate().map(of).collect())
            }
        }
    }

    /// Name of the network for this many rows.
    fn function(&self, rows: usize) -> String {
        match self.kind {
            Kind::Attention(_) => format!("chunk{rows}"),
            Kind::Dense(_) | Kind::Head(_) => format!("rows{rows}"),
        }
    }

    /// Numbers of rows of its networks.
    fn rows(&self) -> BTreeSet<usize> {
        self.boundaries.iter().map(|boundary| boundary.rows).collect()
    }

    /// Writes its artifacts. Gives the bytes of the weights.
    ///
    /// # Errors
    /// A graph over the limit; a weight that no code holds; a disk that is full.
    pub(super) fn write(&self, emit: &Emit<'_>) -> Result<u64> {
        let cannot = |e: &dyn std::fmt::Display| {
            let error = Error::limit(format!("`{}` cannot be a network", self.name)).because(e);
            error.hint("set `attention = \"cpu\"` under `[placement]`")
        };
        let (first, boundary) =
            self.first().zip(self.boundaries.first()).ok_or_else(|| cannot(&"it has no matrix"))?;
        let drawn = || deviations(emit.module, boundary.x.into(), first, emit.numbers);
        let sample = Sample::new(emit.numbers, emit.module, first, drawn)?;
        let mut written = 0;
        for artifact in self.artifacts(emit.module, emit.unit).map_err(|e| cannot(&e))? {
            let folder = emit.root.join(path_of(&artifact.name));
            fs::create_dir_all(&folder).map_err(|e| io_error("create", &folder, &e))?;
            let mut file = WeightFile::create(&folder)?;
            let made = self.made(emit, &artifact, &mut file)?;
            let bytes = file.finish()?;
            limited(emit.unit, &artifact.name, bytes, SMALLER)?;
            let ranges = match &made {
                BuiltSubgraph::Attention(made) => {
                    attention::measured(emit, made, boundary, &folder, &sample)?
                }
                BuiltSubgraph::Ffn(_) | BuiltSubgraph::Head(_) => {
                    let plain = made.graph("ranges", RUN_ROWS).map_err(|e| cannot(&e))?;
                    measured(plain, &folder, &sample).map_err(|e| cannot(&e))?
                }
            };
            for rows in self.rows() {
                let function = self.function(rows);
                let plain = made.graph(&function, rows).map_err(|e| cannot(&e))?;
                let codes = coded(&plain, &ranges).map_err(|e| cannot(&e))?;
                let bytes = onnx::write(&codes).map_err(|e| cannot(&e))?;
                let path = folder.join(format!("{function}.onnx"));
                fs::write(&path, bytes).map_err(|e| io_error("write", &path, &e))?;
            }
            shown(&folder, &sample, self.rows().last().copied().unwrap_or(1))?;
            written += bytes;
        }
        Ok(written)
    }

    /// Its matrices as codes, written.
    fn made(&self, emit: &Emit<'_>, artifact: &Artifact, file: &mut WeightFile) -> Result<BuiltSubgraph> {
        let module = emit.module;
        let read = |id: WeightId| {
            let weight = module.weight(id);
            MatrixSlice { weight, matrix: 0, rows: 0..weight.rows() }.read(emit.numbers)
        };
        match &self.kind {
            Kind::Attention(found) => {
                attention::written(emit, found, file).map(|made| BuiltSubgraph::Attention(Box::new(made)))
            }
            Kind::Dense(dense) => {
                let down = module.weight(dense.down);
                let inner = down.cols();
                let made = dense.gate_up.iter().map(|id| rounded(emit.numbers, module.weight(*id), 0));
                let made = made.collect::<Result<Vec<_>>>()?;
                let [gate, up] = match made.as_slice() {
                    [both] => [(both, 0..inner), (both, inner..2 * inner)],
                    [gate, up] => [(gate, 0..inner), (up, 0..inner)],
                    _ => return Err(Error::bug(format!("`{}` has no gate and up", self.name))),
                };
                let mut biases = Vec::new();
                for id in &dense.gate_up_bias {
                    biases.extend(read(*id)?);
                }
                let gated = Gated {
                    name: "dense".to_owned(),
                    hidden: down.rows(),
                    glu: dense.glu,
                    gate,
                    up,
                    down: &rounded(emit.numbers, down, 0)?,
                    gate_up_bias: (!biases.is_empty()).then_some(biases),
                    down_bias: dense.down_bias.map(read).transpose()?,
                };
                gated.written(file).map(BuiltSubgraph::Ffn)
            }
            Kind::Head(head) => {
                let weight = module.weight(head.weight);
                // Only one part of a split head is in memory at a time.
                let part = MatrixSlice { weight, matrix: 0, rows: artifact.channels.clone() };
                let channels = part.rounded(emit.numbers)?;
                let bias = head.bias.map(read).transpose()?;
                let bias = bias.and_then(|b| b.get(artifact.channels.clone()).map(<[f32]>::to_vec));
                let rows = (&channels, 0..artifact.channels.len());
                let part: Projection = file.projection("wv", rows, weight.cols(), bias)?;
                Ok(BuiltSubgraph::Head(Head { hidden: weight.cols(), parts: vec![part] }))
            }
        }
    }

    /// Evaluates all of its networks against the nodes that they replace.
    ///
    /// # Errors
    /// An artifact that is missing, malformed, or does not run.
    fn verify(&self, trial: &mut Trial<'_, '_>, given: &mut VerifyInputs) -> Result<Vec<FunctionReport>> {
        let described = self.clone().described(trial.module, trial.unit).map_err(Error::bug)?;
        let mut reports = Vec::new();
        let mut done = BTreeSet::new();
        let mut shared = Shared::default();
        for SubgraphFunction { entry, graph } in &described.graphs {
            let boundary = self.boundaries.iter().find(|boundary| boundary.entry == *entry);
            let boundary = boundary.ok_or_else(|| Error::bug("a graph of no entry point"))?;
            if !done.insert((graph.package.clone(), graph.function.clone())) {
                continue;
            }
            let found = match &self.kind {
                Kind::Attention(found) => {
                    attention::evaluate(trial, found, &self.boundaries, graph, &mut shared).map(
                        |(error, saturated, inputs)| {
                            given.insert((graph.package.clone(), graph.function.clone()), inputs);
                            (error, saturated)
                        },
                    )
                }
                Kind::Dense(_) | Kind::Head(_) => self.evaluate(trial, boundary, graph, &mut shared),
            };
            let (error, saturated) = found.map_err(|e| wrong(&graph.package, &e))?;
            // The limit is that of its coarsest matrix.
            let formats = self.matrices().into_iter().map(|id| trial.module.weight(id).format);
            let other = |format: Format| if trial.rounded { format.distance() } else { 0.0 };
            let bound = formats.map(|f| WeightStorage::of(f).bound().hypot(other(f))).fold(0.0, f64::max);
            let bound = match &self.kind {
                Kind::Dense(dense) => distance::joined(bound, dense.glu),
                Kind::Attention(_) | Kind::Head(_) => bound,
            };
            reports.push(FunctionReport {
                package: graph.package.clone(),
                function: graph.function.clone(),
                experts: 0,
                error,
                bound,
                findings: saturated.iter().map(ToString::to_string).collect(),
                refused: refuses(&saturated),
                checks: Vec::new(),
            });
        }
        Ok(reports)
    }

    fn evaluate(
        &self,
        trial: &mut Trial<'_, '_>,
        boundary: &SubgraphBoundary,
        graph: &GraphDecl,
        shared: &mut Shared,
    ) -> std::result::Result<(Distance, Vec<Saturated>), Failed> {
        let module = trial.module;
        let artifacts = self.artifacts(module, trial.unit)?;
        let artifact =
            artifacts.iter().find(|a| path_of(&a.name) == graph.package).ok_or("it is of no part")?;
        let package = trial.files.below(&graph.package);
        let hidden = self.hidden(module);
        let sample = super::verify::rows(&package, hidden)?;
        let x = super::rows::cycled(&sample, boundary.rows * hidden);
        let executor = Executor::sharing(network(trial.files, graph)?.into(), Some(&package), shared)?;
        let outcome = executor.run(&[&x])?;
        let got = outcome.outputs.into_iter().next().ok_or("it has no result")?;
        let want = self.reference(trial, boundary, x)?;
        let width = want.ty.cols();
        let own = want.as_f32().chunks_exact(width.max(1));
        let own: Vec<f32> = own.flat_map(|row| row[artifact.channels.clone()].iter().copied()).collect();
        let count = own.len();
        let error = Distance::of(&Tensor::f32([count], got), &Tensor::f32([count], own), count);
        Ok((error, outcome.saturated))
    }

    /// Results of the nodes that it replaces.
    fn reference(
        &self,
        trial: &mut Trial<'_, '_>,
        boundary: &SubgraphBoundary,
        x: Vec<f32>,
    ) -> std::result::Result<Tensor, Failed> {
        let graph = trial.module.entries.iter().find(|g| g.kind == boundary.entry).ok_or("no entry point")?;
        let mut values: HashMap<ValueId, Tensor> = HashMap::new();
        values.insert(boundary.x, Tensor::f32([boundary.rows, self.hidden(trial.module)], x));
        for id in &boundary.nodes {
            let node = graph.nodes.get(id.0 as usize).ok_or("a node that is not there")?;
            let mut weights = HashMap::new();
            for operand in &node.inputs {
                if let Operand::Weight(id) = *operand {
                    weights.insert(id, trial.evaluator.weight(id)?);
                }
            }
            let arg = |operand: &Operand| match operand {
                Operand::Weight(id) => weights.get(id).map(|w| Arg::Tensor(w)),
                Operand::Value(v) => values.get(v).map(Arg::Tensor),
                Operand::State(_) => None,
            };
            let args: Option<Vec<_>> = node.inputs.iter().map(arg).collect();
            let args =
                args.ok_or_else(|| format!("`{}` reads a value that does not exist", node.op.name()))?;
            let results = op(&node.op, args)?;
            values.extend(node.outputs.iter().copied().zip(results));
        }
        values.remove(&boundary.y).ok_or_else(|| "the part has no result".into())
    }
}

/// Parts that become networks.
enum BuiltSubgraph {
    Attention(Box<Attention>),
    Ffn(Ffn),
    Head(Head),
}

impl BuiltSubgraph {
    fn graph(&self, name: &str, rows: usize) -> std::result::Result<Network, NetworkError> {
        match self {
            Self::Attention(attention) => attention.graph(name, rows),
            Self::Ffn(ffn) => ffn.graph(name, rows, ffn.clusters.len()),
            Self::Head(head) => head.graph(name, rows),
        }
    }
}

/// Evaluates every network of a trial's parts. Also returns the inputs of networks that take more than rows.
///
/// # Errors
/// As [`HtpSubgraph::verify`].
pub(super) fn verify(trial: &mut Trial<'_, '_>) -> Result<(Vec<FunctionReport>, VerifyInputs)> {
    let (mut reports, mut given) = (Vec::new(), VerifyInputs::new());
    for part in trial.parts {
        (trial.next)(&part.name)?;
        let found = HtpSubgraph::find(trial.module, &part.scope).map_err(Error::bug)?;
        reports.extend(found.verify(trial, &mut given)?);
    }
    Ok((reports, given))
}

/// Writes the parts of a build; returns the bytes of their weights.
///
/// # Errors
/// As [`HtpSubgraph::write`].
pub(super) fn write(emit: &Emit<'_>) -> Result<u64> {
    let mut written = 0;
    for part in emit.parts {
        (emit.next)(&part.name)?;
        let found = HtpSubgraph::find(emit.module, &part.scope)
            .map_err(|why| Error::bug(format!("`{}` is not a network: {why}", part.name)))?;
        written += found.write(emit)?;
    }
    Ok(written)
}
