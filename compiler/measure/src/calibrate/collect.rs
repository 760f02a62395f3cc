//! Observes a traced run, step by step, and adds up the contents of a profile.
//!
//! The plan says which step reads which weight. The Graph says which value that weight is multiplied by, and
//! the plan gives that value's location. All of this is resolved once, into [`Tap`]s. The inputs of experts
//! are read right before the step that reads the expert's weight.

use super::gates::{self, GateSample};
use super::neurons::{Network, Neurons};
use super::piece::{PieceRecord, Sum};
use super::products::Products;
use super::record::Recorder;
use super::roles::{begins_network, experts_wide, gate_of, is_silu_gate, joins_stream, value};
use super::rows::{StridedRows, Table, number, word};
use moec_base::error::{Error, Result};
use moec_ir::op::DispatchLayout;
use moec_ir::plan::{Arg, BufferColumns, Entry, RowSpace};
use moec_ir::{DType, Graph, Module, Node, Op, Operand, ValueId, Weight, WeightClass, WeightId};
use moec_profile::correlations::{WIDEST, block_for};
use moec_profile::samples;
use moec_profile::{Chunk, Routes, Routing, Saliency};
use moec_runtime::{Moment, StepView};
use std::collections::BTreeMap;

/// An observation before or after a step.
#[derive(Clone, Copy, Debug)]
enum Tap {
    /// The input of a matrix, or of one matrix per head, before the step.
    Input { x: StridedRows, space: RowSpace, sum: usize },
    /// The input of experts, gathered by the table, before the step.
    Routed { x: StridedRows, table: Table, sum: usize },
    /// The input of experts in the order of the table, before the step.
    Slots { x: StridedRows, table: Table, sum: usize },
    /// An input whose products are summed, matrix by matrix, before the step.
    Dense { x: StridedRows, space: RowSpace, products: usize },
    /// The same for experts with inputs in the order of the table.
    PerSlot { x: StridedRows, table: Table, products: usize },
    /// The input of experts whose gates are measured, before the step.
    Gated { x: StridedRows, table: Table, sample: usize },
    /// The input of a dense network whose gates are measured, before the step.
    DenseGated { x: StridedRows, sample: usize },
    /// Activations that the neurons of experts pass to their down matrices, in the order of the table, before
    /// the step.
    ExpertActivations { x: StridedRows, table: Table, network: usize },
    /// Activations that the neurons of a network for all tokens pass to its down matrix, before the step.
    NetworkActivations { x: StridedRows, network: usize },
    /// Choices, weights and logits of a router, after the step.
    Router { ids: StridedRows, weights: StridedRows, logits: StridedRows, layer: usize },
    /// The residual stream before an attention's addition, before the step.
    Residual { x: StridedRows },
    /// The residual stream after that addition, after the step. The difference is the attention's output.
    Attended { x: StridedRows, layer: usize },
}

/// Observer of the runs of one entry point.
pub(super) struct Collector<'a> {
    entry: &'a Entry,
    before: Vec<Vec<Tap>>,
    after: Vec<Vec<Tap>>,
    /// Sums of the current piece of the texts.
    pub(super) piece: PieceRecord,
    /// Sums of products of values that several weights read.
    known: BTreeMap<(ValueId, usize), usize>,
    /// Loads of the current chunk, by layer.
    loads: Vec<Vec<u16>>,
    /// The residual stream before the next addition.
    residual: Vec<u8>,
    pub(super) recorder: Recorder,
    pub(super) neurons: Neurons,
    /// Sums of one chunk, so that small numbers are added to small ones first.
    part: Vec<f32>,
}

impl<'a> Collector<'a> {
    /// Creates the observer for entry point `index` of `module`, with the plan `entry`. `segments` is the
    /// weight that each segment of the plan packs.
    ///
    /// # Errors
    /// Only bugs of moec: a weight that no step reads, or a value without a location.
    pub(super) fn new(
        module: &'a Module,
        entry: &'a Entry,
        index: usize,
        segments: &[WeightId],
    ) -> Result<Self> {
        let graph = module.entries.get(index).ok_or_else(|| Error::bug("a plan without its graph"))?;
        let steps = entry.steps.len();
        let mut collector = Self {
            entry,
            before: vec![Vec::new(); steps],
            after: vec![Vec::new(); steps],
            piece: PieceRecord::new(entry.kind.rows() as u32),
            known: BTreeMap::new(),
            loads: Vec::new(),
            residual: Vec::new(),
            recorder: Recorder::default(),
            neurons: Neurons::default(),
            part: Vec::new(),
        };
        let spaces = graph.row_spaces(module);
        let experts = experts_wide(module, graph);
        for node in &graph.nodes {
            if let Op::Router(desc) = &node.op {
                collector.router(graph, node, desc)?;
            }
            if let Some(layer) = node.scope.layer
                && joins_stream(graph, node)
            {
                collector.attended(graph, node, layer)?;
            }
            for (operand, input) in node.inputs.iter().enumerate() {
                let Operand::Weight(id) = *input else { continue };
                let weight = module.weight(id);
                if weight.class == WeightClass::Exact || matches!(node.op, Op::Embed) {
                    continue;
                }
                let step = collector.reader(graph, node, id, segments)?;
                let sum = collector.piece.sums.len();
                let tap = match node.op {
                    Op::Linear { .. } | Op::LinearGlu { .. } | Op::HeadLinear { .. } => {
                        let x = value(node, 0)?;
                        let space = spaces[x.0 as usize];
                        Tap::Input { x: collector.read_by(step, collector.rows(x)?)?, space, sum }
                    }
                    Op::ExpertFfn { .. } => {
                        let x = value(node, 0)?;
                        let table = collector.table(graph, node)?;
                        if operand == 2 {
                            Tap::Routed { x: collector.read_by(step, collector.rows(x)?)?, table, sum }
                        } else {
                            let Some(&Operand::Weight(gate_up)) = node.inputs.get(2) else {
                                return Err(Error::bug("experts without matrices"));
                            };
                            let writer = collector.reader(graph, node, gate_up, segments)?;
                            let h = collector.hidden(writer, node, weight.cols())?;
                            Tap::Slots { x: collector.read_by(step, h)?, table, sum }
                        }
                    }
                    _ => return Err(Error::bug(format!("`{}` reads `{}`", node.op.name(), weight.name))),
                };
                collector.before[step].push(tap);
                if let (Op::ExpertFfn { glu, bias: false, .. }, Tap::Routed { x, table, .. }, Some(layer)) =
                    (&node.op, tap, node.scope.layer)
                    && gates::measured(*glu)
                {
                    collector.before[step].push(Tap::Gated { x, table, sample: collector.piece.gates.len() });
                    collector.piece.gates.push(GateSample::new(layer, id, weight.rows() / 2));
                }
                if let (Tap::Input { x, .. }, Some(layer)) = (tap, node.scope.layer)
                    && is_silu_gate(graph, node)
                {
                    collector.before[step].push(Tap::DenseGated { x, sample: collector.piece.gates.len() });
                    collector.piece.gates.push(GateSample::new(layer, id, weight.rows()));
                }
                if let Some(tap) = collector.neurons(graph, node, weight, tap) {
                    collector.before[step].push(tap);
                }
                let name = &weight.name;
                // If two nodes read a weight, the correlations are those of its first input.
                let known = collector.piece.products.iter().any(|p| p.readers.contains(name));
                match tap {
                    _ if known => {}
                    Tap::Slots { x, table, .. } => {
                        let block = block_for(weight.cols(), experts);
                        let products = Products::new(name.clone(), weight.matrices(), weight.cols(), block);
                        collector.before[step].push(Tap::PerSlot {
                            x,
                            table,
                            products: collector.piece.products.len(),
                        });
                        collector.piece.products.push(products);
                    }
                    // The experts of a layer together read all rows that the layer reads.
                    Tap::Input { x, .. } | Tap::Routed { x, .. } => {
                        let v = value(node, 0)?;
                        let matrices = if matches!(tap, Tap::Routed { .. }) { 1 } else { weight.matrices() };
                        if let Some(&known) = collector.known.get(&(v, matrices)) {
                            collector.piece.products[known].readers.push(name.clone());
                        } else {
                            let products = collector.piece.products.len();
                            collector.known.insert((v, matrices), products);
                            let new = Products::new(name.clone(), matrices, weight.cols(), WIDEST);
                            let sampled = matrices == 1 && begins_network(graph, node);
                            collector.piece.products.push(if sampled { new.with_sample() } else { new });
                            let space = spaces[v.0 as usize];
                            collector.before[step].push(Tap::Dense { x, space, products });
                        }
                    }
                    _ => {}
                }
                let (matrices, cols) = (weight.matrices(), weight.cols());
                let name = weight.name.clone();
                collector.piece.sums.push(Sum {
                    name,
                    cols,
                    tokens: vec![0; matrices],
                    squares: vec![0.0; matrices * cols],
                });
            }
        }
        collector.piece.most =
            samples::most(collector.piece.products.iter().filter_map(Products::sample_cols));
        Ok(collector)
    }

    fn router(&mut self, graph: &Graph, node: &Node, desc: &moec_ir::op::RouterDesc) -> Result<()> {
        if desc.zero.is_some() {
            return Err(Error::limit("models with zero-computation experts cannot be calibrated")
                .hint("build it without a `profile`; static graphs and a memory budget, which require one, do not support such a model"));
        }
        let at = graph.nodes.iter().position(|n| std::ptr::eq(n, node));
        let last = self.entry.steps.iter().rposition(|s| Some(s.node as usize) == at);
        let last = last.ok_or_else(|| Error::bug("a router without step"))?;
        let (&[ids, weights], layer) = (node.outputs.as_slice(), self.piece.layers.len()) else {
            return Err(Error::bug("a router without choices"));
        };
        let logits = self.rows(value(node, 0)?)?;
        let tap = Tap::Router { ids: self.rows(ids)?, weights: self.rows(weights)?, logits, layer };
        self.after[last].push(tap);
        let number = node.scope.layer.unwrap_or(layer as u32);
        let routing = Routing::new(number, desc.k as u32, desc.experts);
        self.recorder.layer(&routing, desc.score);
        self.piece.layers.push(routing);
        self.loads.push(vec![0; desc.experts]);
        Ok(())
    }

    /// Observes the addition of the output of attention, or of another mixer, to the residual stream. The
    /// output itself may not be in memory, since the addition can be in the epilogue of the matrix that
    /// computes it.
    fn attended(&mut self, graph: &Graph, node: &Node, layer: u32) -> Result<()> {
        let at = graph.nodes.iter().position(|n| std::ptr::eq(n, node));
        let own = |s: &moec_ir::plan::Step| Some(s.node as usize) == at;
        let first = self.entry.steps.iter().position(own);
        let last = self.entry.steps.iter().rposition(own);
        let (first, last) = first.zip(last).ok_or_else(|| Error::bug("an addition without step"))?;
        let &[out] = node.outputs.as_slice() else { return Err(Error::bug("an addition of no result")) };
        let (before, after) = (self.rows(value(node, 0)?)?, self.rows(out)?);
        let index = self.piece.saliency.len();
        self.before[first].push(Tap::Residual { x: before });
        self.after[last].push(Tap::Attended { x: after, layer: index });
        self.piece.saliency.push(Saliency::new(layer));
        Ok(())
    }

    /// Observes the neurons of a gated network, before its down matrix.
    fn neurons(&mut self, graph: &Graph, node: &Node, down: &Weight, tap: Tap) -> Option<Tap> {
        let layer = node.scope.layer?;
        let (glu, k) = match (&node.op, tap) {
            (Op::ExpertFfn { glu, .. }, Tap::Slots { table, .. }) => (*glu, Some(table.layout.k)),
            (Op::Linear { .. }, Tap::Input { space: RowSpace::Tokens, .. }) => (gate_of(graph, node)?, None),
            _ => return None,
        };
        let (experts, width, exact) = (down.matrices(), u32::try_from(down.cols()).ok()?, glu.skips());
        let name = (layer, down.name.clone());
        let network = self.neurons.network(Network { name, experts, width, k, exact });
        Some(match tap {
            Tap::Slots { x, table, .. } => Tap::ExpertActivations { x, table, network },
            Tap::Input { x, .. } => Tap::NetworkActivations { x, network },
            _ => return None,
        })
    }

    /// Begins a text.
    pub(super) fn begin(&mut self) {
        self.piece.trace.begin();
        self.neurons.begin();
    }

    /// Ends a chunk of `tokens` tokens.
    pub(super) fn end_chunk(&mut self, tokens: usize) {
        let loads = self.loads.iter_mut().flat_map(|l| l.iter_mut().map(std::mem::take)).collect();
        self.piece.trace.push(Chunk { tokens: tokens as u32, loads });
        self.recorder.end_chunk(tokens, Routes::most(&self.piece.layers));
    }

    /// Index of the step that reads a weight for a node. The step may belong to an addition whose epilogue
    /// contains the node.
    fn reader(&self, graph: &Graph, node: &Node, weight: WeightId, segments: &[WeightId]) -> Result<usize> {
        let reads = |arg: &Arg| match arg {
            Arg::Segment(s) | Arg::Matrices(s) => segments.get(*s as usize) == Some(&weight),
            Arg::Buffer(..) | Arg::State(_) => false,
        };
        let of_node = |at: u32| {
            let own = &graph.nodes[at as usize];
            let takes = |v: &ValueId| own.inputs.contains(&Operand::Value(*v));
            std::ptr::eq(own, node) || matches!(own.op, Op::Add) && node.outputs.iter().any(takes)
        };
        let found = self.entry.steps.iter().position(|s| s.args.iter().any(reads) && of_node(s.node));
        found.ok_or_else(|| Error::bug(format!("no step of `{}` reads its weight", node.scope)))
    }

    /// Location of a value.
    fn rows(&self, v: ValueId) -> Result<StridedRows> {
        let missing = || Error::bug(format!("%{} has no place", v.0));
        let BufferColumns { buffer, column, cols } =
            self.entry.locations.get(v.0 as usize).copied().flatten().ok_or_else(missing)?;
        let stride = self.entry.buffers.get(buffer as usize).ok_or_else(missing)?.stride as usize;
        Ok(StridedRows { buffer, column: column as usize, cols: cols as usize, stride })
    }

    fn table(&self, graph: &Graph, node: &Node) -> Result<Table> {
        let v = value(node, 1)?;
        let def = graph.def(v).and_then(|id| graph.nodes.get(id.0 as usize));
        let Some(Node { op: Op::Dispatch { experts, .. }, inputs, .. }) = def else {
            return Err(Error::bug("experts without a dispatch table"));
        };
        let Some(&Operand::Value(ids)) = inputs.first() else {
            return Err(Error::bug("a dispatch of nothing"));
        };
        let k = graph.ty(ids).cols();
        let layout = DispatchLayout { rows: graph.kind.rows(), k, experts: *experts };
        Ok(Table { rows: self.rows(v)?, layout })
    }

    /// Returns the rows of `x` that step `step` reads: the rows themselves, or a copy. Rows with strides of
    /// whole pages are copied first, perhaps for another matrix and long before. After the copy the value is
    /// dead, and its memory may be reused.
    fn read_by(&self, step: usize, x: StridedRows) -> Result<StridedRows> {
        let missing = || Error::bug(format!("step {step} does not read the rows of its matrix"));
        let (before, at) = self.entry.steps.split_at_checked(step).ok_or_else(missing)?;
        let args = at.first().map(|s| s.args.as_slice()).ok_or_else(missing)?;
        if args.iter().any(|arg| matches!(arg, Arg::Buffer(b, _) if *b == x.buffer)) {
            return Ok(x);
        }
        let from = u32::try_from(x.column * 4).ok();
        let from = from.map(|column| Arg::Buffer(x.buffer, column)).ok_or_else(missing)?;
        let copy = args.iter().find_map(|arg| {
            let &Arg::Buffer(buffer, 0) = arg else { return None };
            let stride = self.entry.buffers.get(buffer as usize)?.stride as usize;
            // Activations are in f32 here, so a copy has the same numbers.
            let copies = before.iter().any(|s| s.args.as_slice() == [from, *arg]);
            copies.then_some(StridedRows { buffer, column: 0, cols: x.cols, stride })
        });
        copy.ok_or_else(missing)
    }

    /// Returns the results of the gate and up projections of experts in step `step`: a buffer of the node's
    /// own with `cols` columns.
    fn hidden(&self, step: usize, node: &Node, cols: usize) -> Result<StridedRows> {
        let own = |name: &str| node.outputs.iter().any(|v| name.starts_with(&format!("%{}.", v.0)));
        let found = self.entry.steps[step].args.iter().find_map(|arg| {
            let &Arg::Buffer(buffer, 0) = arg else { return None };
            let b = self.entry.buffers.get(buffer as usize)?;
            let fits = own(&b.name) && b.dtype == DType::F32 && b.stride as usize == cols;
            fits.then_some(StridedRows { buffer, column: 0, cols, stride: cols })
        });
        found.ok_or_else(|| Error::bug("the hidden channels of experts have no buffer of their own"))
    }

    /// Whether each step has taps, by index.
    pub(super) fn stops(&self) -> Vec<bool> {
        self.before.iter().zip(&self.after).map(|(a, b)| !a.is_empty() || !b.is_empty()).collect()
    }

    /// Applies the taps of a step; called before and after each step with taps.
    pub(super) fn observe(&mut self, moment: Moment, view: &StepView<'_>) {
        let taps = match moment {
            Moment::Before => &self.before,
            Moment::After => &self.after,
        };
        for tap in taps.get(view.index()).cloned().unwrap_or_default() {
            self.piece.whole &= self.record_tap(tap, view).is_some();
        }
    }

    fn record_tap(&mut self, tap: Tap, view: &StepView<'_>) -> Option<()> {
        if self.neurons.is_gauging()
            && !matches!(tap, Tap::ExpertActivations { .. } | Tap::NetworkActivations { .. })
        {
            return Some(());
        }
        match tap {
            Tap::Input { x, space, sum } => {
                let n = match space {
                    RowSpace::Tokens => view.n(),
                    RowSpace::Outputs => view.m(),
                };
                let x = x.view(view)?;
                let sum = &mut self.piece.sums[sum];
                self.part.clear();
                self.part.resize(sum.squares.len(), 0.0);
                for i in 0..n {
                    add_squares(&mut self.part, x.row(i)?);
                }
                sum.squares.iter_mut().zip(&self.part).for_each(|(s, p)| *s += p);
                sum.tokens.iter_mut().for_each(|t| *t += n as u64);
            }
            Tap::Routed { x, table, sum } => {
                let (x, contents) = (x.view(view)?, table.view(view)?);
                contents.each(|expert, slots| {
                    let rows = slots.map(|slot| x.row(contents.word(table.layout.token() + slot)?));
                    self.piece.sums[sum].add(expert, rows, &mut self.part)
                })?;
            }
            Tap::Gated { x, table, sample } => {
                let (x, contents) = (x.view(view)?, table.view(view)?);
                let sample = &mut self.piece.gates[sample];
                contents.each(|expert, mut slots| {
                    slots.try_for_each(|slot| {
                        let row = x.row(contents.word(table.layout.token() + slot)?)?;
                        sample.add(expert, row.chunks_exact(4).map(number));
                        Some(())
                    })
                })?;
            }
            Tap::DenseGated { x, sample } => {
                let x = x.view(view)?;
                for i in 0..view.n() {
                    self.piece.gates[sample].add(0, x.row(i)?.chunks_exact(4).map(number));
                }
            }
            Tap::Slots { x, table, sum } => {
                let (x, contents) = (x.view(view)?, table.view(view)?);
                contents.each(|expert, slots| {
                    self.piece.sums[sum].add(expert, slots.map(|slot| x.row(slot)), &mut self.part)
                })?;
            }
            Tap::Dense { x, space, products } => {
                let n = match space {
                    RowSpace::Tokens => view.n(),
                    RowSpace::Outputs => view.m(),
                };
                let x = x.view(view)?;
                let products = &mut self.piece.products[products];
                for matrix in 0..products.matrices() {
                    let own = products.channels(matrix);
                    products.add(matrix, (0..n).map(|i| x.row(i)?.get(own.start * 4..own.end * 4)))?;
                }
                products.keep(self.piece.most);
            }
            Tap::PerSlot { x, table, products } => {
                let (x, contents) = (x.view(view)?, table.view(view)?);
                let products = &mut self.piece.products[products];
                contents.each(|expert, slots| products.add(expert, slots.map(|slot| x.row(slot))))?;
            }
            Tap::ExpertActivations { x, table, network } => {
                let (x, contents) = (x.view(view)?, table.view(view)?);
                self.neurons.chunk(network, view.n());
                contents.each(|expert, mut slots| {
                    slots.try_for_each(|slot| {
                        let token = contents.word(table.layout.token() + slot)?;
                        self.neurons.row(network, (expert, token), x.row(slot)?.chunks_exact(4).map(number))
                    })
                })?;
                self.neurons.end_chunk(network)?;
            }
            Tap::NetworkActivations { x, network } => {
                let x = x.view(view)?;
                self.neurons.chunk(network, view.n());
                for i in 0..view.n() {
                    self.neurons.row(network, (0, i), x.row(i)?.chunks_exact(4).map(number))?;
                }
                self.neurons.end_chunk(network)?;
            }
            Tap::Router { ids, weights, logits, layer } => {
                let (ids, weights, logits) = (ids.view(view)?, weights.view(view)?, logits.view(view)?);
                for i in 0..view.n() {
                    let chosen = ids.row(i)?.chunks_exact(4).map(|b| usize::try_from(word(b)).unwrap_or(0));
                    let logits = logits.row(i)?.chunks_exact(4).map(number);
                    self.recorder.token(layer, chosen, logits);
                }
                let (layer, loads) = (&mut self.piece.layers[layer], &mut self.loads[layer]);
                let mut chosen: Vec<usize> = Vec::new();
                for i in 0..view.n() {
                    let ids = ids.row(i)?.chunks_exact(4).map(word);
                    let weights = weights.row(i)?.chunks_exact(4).map(number);
                    chosen.clear();
                    for (id, weight) in ids.zip(weights) {
                        let expert = usize::try_from(id).ok()?;
                        *layer.chosen.get_mut(expert)? += 1;
                        layer.weight[expert] += f64::from(weight);
                        loads[expert] = loads[expert].saturating_add(1);
                        for &other in &chosen {
                            let pair = layer.pair(expert, other)?;
                            layer.together[pair] += 1;
                        }
                        chosen.push(expert);
                    }
                }
                layer.tokens += view.n() as u64;
            }
            Tap::Residual { x } => {
                let x = x.view(view)?;
                self.residual.clear();
                for i in 0..view.n() {
                    self.residual.extend_from_slice(x.row(i)?);
                }
            }
            Tap::Attended { x, layer } => {
                let (rows, width) = (x.view(view)?, x.cols * 4);
                for i in 0..view.n() {
                    let before = self.residual.get(i * width..(i + 1) * width)?.chunks_exact(4).map(number);
                    let after = rows.row(i)?.chunks_exact(4).map(number);
                    let square: f64 = before.zip(after).map(|(a, b)| f64::from(b - a).powi(2)).sum();
                    self.piece.saliency[layer].add(square.sqrt());
                }
            }
        }
        Some(())
    }

    /// Routing of the layers with routers.
    pub(super) fn layers(&self) -> &[Routing] {
        &self.piece.layers
    }

    /// Takes the sums of a piece out; those of the next piece begin at zero.
    pub(super) fn take(&mut self) -> PieceRecord {
        PieceRecord { routes: self.recorder.take(), neurons: self.neurons.take(), ..self.piece.take() }
    }
}

impl Sum {
    /// Adds the rows that one of the matrices read.
    fn add<'v>(
        &mut self,
        matrix: usize,
        rows: impl Iterator<Item = Option<&'v [u8]>>,
        part: &mut Vec<f32>,
    ) -> Option<()> {
        part.clear();
        part.resize(self.cols, 0.0);
        for row in rows {
            add_squares(part, row?);
            *self.tokens.get_mut(matrix)? += 1;
        }
        let sums = self.squares.get_mut(matrix * self.cols..(matrix + 1) * self.cols)?;
        sums.iter_mut().zip(&*part).for_each(|(s, p)| *s += p);
        Some(())
    }
}

fn add_squares(sums: &mut [f32], row: &[u8]) {
    for (sum, x) in sums.iter_mut().zip(row.chunks_exact(4).map(number)) {
        *sum += x * x;
    }
}
