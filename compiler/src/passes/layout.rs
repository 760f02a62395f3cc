//! Pass `layout`: Graph to Plan.
//!
//! The target chooses kernels and weight layouts node by node; slices become views, additions of a
//! residual go into the epilogue of what produced the other operand. Every buffer gets a place of its
//! own and every step a barrier, so the plan already runs; the passes behind only make it tight.

use super::memory::aligned;
use super::offload::{PartCut, Statics, layer};
use super::page;
use super::schedule::Writes;
use crate::bundle::{DENSE, EXPERTS};
use crate::error::{Error, Result};
use moec_cpu::{CacheView, CpuTarget, InputView, KernelSpec, Launch, NodeView, Role, Selection, Work};
use moec_ir::graph::INPUTS;
use moec_ir::op::DispatchLayout;
use moec_ir::plan::{
    ALIGN, Arg, Buffer, Builtin, Code, Entry, ExpertRow, ExpertTable, FETCHED, FileRef, KernelRef, Layout,
    ModelInfo, PLAN_VERSION, Paging, Place, Placement, Plan, RowSpace, Segment, StateBuf, Step,
};
use moec_ir::{Format, Graph, Module, Node, Op, Operand, StateId, Type, ValueId, WeightClass, WeightId};
use std::collections::{BTreeMap, HashMap, HashSet};

/// The plan with what later passes and the writer need beside it.
#[derive(Debug)]
pub struct Draft {
    /// Plan.
    pub plan: Plan,
    /// Kernels, in the order of [`Plan::kernels`].
    pub kernels: Vec<KernelSpec>,
    /// Weight that each segment packs.
    pub segment_weights: Vec<WeightId>,
    /// What each step writes.
    pub writes: Writes,
}

/// Lays out `module` for `target`, the KV cache in the format `cache`. `artifacts` are further files that the runtime reads;
/// `statics` says which experts static graphs compute.
///
/// # Errors
/// An operator that the target has no kernel for, or sizes past the plan's 32-bit fields.
pub fn layout(
    module: &Module,
    model: ModelInfo,
    target: &CpuTarget,
    cache: Format,
    artifacts: &[&str],
    statics: &Statics,
) -> Result<Draft> {
    let files = [DENSE, EXPERTS].iter().chain(artifacts);
    let mut builder = Builder {
        module,
        target,
        statics,
        cache,
        values: values(module),
        kernels: Vec::new(),
        kernel_ids: HashMap::new(),
        segments: Vec::new(),
        segment_ids: HashMap::new(),
        segment_weights: Vec::new(),
        experts: BTreeMap::new(),
        ends: [0; 2],
        scratch: 0,
    };
    let mut entries = Vec::new();
    let mut writes = Vec::new();
    for graph in &module.entries {
        let (entry, w) = builder.entry(graph)?;
        entries.push(entry);
        writes.push(w);
    }
    let paging = builder.page()?;
    let states = module
        .states
        .iter()
        .enumerate()
        .map(|(i, s)| {
            let shape = match s.ty.shape.as_slice() {
                &[a, b, c, d] => [int(a)?, int(b)?, int(c)?, int(d)?],
                _ => return Err(Error::bug(format!("state `{}` has no four axes", s.name))),
            };
            let order = target.cache_order(builder.values.contains(&StateId(i as u32)));
            Ok(StateBuf { name: s.name.clone(), shape, format: cache, order })
        })
        .collect::<Result<_>>()?;
    let plan = Plan {
        version: PLAN_VERSION,
        model,
        target: target.info(),
        arena_bytes: entries
            .iter()
            .flat_map(|e: &Entry| &e.buffers)
            .map(|b| b.offset + aligned(b.bytes))
            .max()
            .unwrap_or(0),
        scratch_bytes: builder.scratch,
        // Sizes and hashes are known when the files are written; weight files have their sizes now.
        files: files
            .enumerate()
            .map(|(i, path)| FileRef {
                path: (*path).to_owned(),
                bytes: builder.ends.get(i).copied().unwrap_or(0),
                sha256: [0; 32],
            })
            .collect(),
        segments: builder.segments,
        states,
        kernels: builder.kernels.iter().map(|k| KernelRef { symbol: target.symbol(k) }).collect(),
        graphs: statics.graphs.clone(),
        sets: statics.sets.clone(),
        parts: statics.parts.clone(),
        entries,
        placement: Placement::dynamic(expert_tables(module)?),
        paging,
    };
    Ok(Draft { plan, kernels: builder.kernels, segment_weights: builder.segment_weights, writes })
}

/// One table per MoE layer: on a CPU every expert has its own group and no capacity.
fn expert_tables(module: &Module) -> Result<Vec<ExpertTable>> {
    let Some(graph) = module.entries.first() else { return Ok(Vec::new()) };
    let mut tables = Vec::new();
    for node in &graph.nodes {
        if let Op::Router(desc) = &node.op {
            let layer = node.scope.split('.').nth(1).and_then(|n| n.parse().ok());
            let experts = (0..desc.experts)
                .map(|e| Ok(ExpertRow { group: int(e)?, ..ExpertRow::default() }))
                .collect::<Result<_>>()?;
            tables.push(ExpertTable {
                layer: layer.unwrap_or(int(tables.len())?),
                k: int(desc.k)?,
                tiers: Vec::new(),
                expected: None,
                groups: Vec::new(),
                experts,
            });
        }
    }
    Ok(tables)
}

fn int(x: usize) -> Result<u32> {
    u32::try_from(x).map_err(|_| Error::limit(format!("{x} is past what a plan can hold")))
}

/// Where a value is.
#[derive(Clone, Copy)]
enum Home {
    Buffer { buffer: u32, column: usize, ld: usize },
    State(u32),
}

/// A function of the runtime, and the values that it reads and gives.
struct Call<'a> {
    code: Builtin,
    unit: u32,
    inputs: &'a [ValueId],
    outputs: &'a [ValueId],
}

impl Call<'_> {
    /// Its step: it gets values by their first columns.
    fn step(&self, frame: &mut Frame<'_>, at: usize, spaces: &[RowSpace]) -> Result<(Step, Vec<usize>)> {
        for &v in self.outputs {
            let home = frame.buffer(format!("%{}", v.0), frame.graph.ty(v))?;
            frame.homes[v.0 as usize] = Some(home);
        }
        let mut args = Vec::new();
        for &v in self.inputs.iter().chain(self.outputs) {
            let ty = frame.graph.ty(v);
            match frame.home(v)? {
                Home::Buffer { buffer, column: 0, ld } if ty.shape.len() < 2 || ld == ty.cols() => {
                    args.push(Arg::Buffer(buffer, 0));
                }
                _ => {
                    return Err(Error::bug(format!(
                        "%{} is a view, which {:?} does not take",
                        v.0, self.code
                    )));
                }
            }
        }
        let step = Step {
            unit: self.unit,
            code: Code::Builtin(self.code),
            args,
            rows: spaces[self.outputs[0].0 as usize],
            grid: moec_ir::plan::Grid::One,
            barrier: true,
            deps: Vec::new(),
            node: int(at)?,
        };
        Ok((step, (self.inputs.len()..self.inputs.len() + self.outputs.len()).collect()))
    }
}

struct Builder<'a> {
    module: &'a Module,
    target: &'a CpuTarget,
    statics: &'a Statics,
    /// Format of the KV cache.
    cache: Format,
    /// Its tensors that are values, not keys.
    values: HashSet<StateId>,
    kernels: Vec<KernelSpec>,
    kernel_ids: HashMap<String, u32>,
    segments: Vec<Segment>,
    segment_ids: HashMap<(WeightId, Layout), u32>,
    segment_weights: Vec<WeightId>,
    /// Segments of gate and up, and of down, by layer.
    experts: BTreeMap<u32, [u32; 2]>,
    ends: [u64; 2],
    scratch: u64,
}

/// One entry being laid out.
struct Frame<'g> {
    graph: &'g Graph,
    homes: Vec<Option<Home>>,
    buffers: Vec<Buffer>,
    end: u64,
    /// Rows brought into another form, by where they lie and the kernel that does it.
    forms: HashMap<(u32, usize, String), Home>,
}

impl Frame<'_> {
    fn buffer(&mut self, name: String, ty: &Type) -> Result<Home> {
        let (rows, ld) = match ty.shape.as_slice() {
            &[n] => (n, 1),
            shape => (shape[..shape.len() - 1].iter().product(), ty.cols()),
        };
        let bytes = ty.bytes() as u64;
        let buffer = int(self.buffers.len())?;
        self.buffers.push(Buffer {
            name,
            offset: self.end,
            bytes,
            dtype: ty.dtype,
            rows: int(rows)?,
            stride: int(ld)?,
        });
        self.end += aligned(bytes);
        Ok(Home::Buffer { buffer, column: 0, ld })
    }

    fn home(&self, v: ValueId) -> Result<Home> {
        self.homes[v.0 as usize].ok_or_else(|| Error::bug(format!("%{} has no place", v.0)))
    }
}

impl Builder<'_> {
    /// Lays out experts that stay on flash; `None` where all weights are mapped.
    fn page(&mut self) -> Result<Option<Paging>> {
        let Some(graph) = self.module.entries.first() else { return Ok(None) };
        if !graph.nodes.iter().any(|n| matches!(n.op, Op::Fetch { .. })) {
            return Ok(None);
        }
        let routers = page::routers(graph);
        let in_file = self.segments.iter().filter(|s| s.file == 1).count();
        if routers.len() != self.experts.len() || in_file != 2 * routers.len() {
            return Err(Error::bug("experts on flash that no layer reads"));
        }
        let layers: Vec<page::Layer> = (routers.into_iter().zip(self.experts.values()))
            .map(|((experts, k, score), &[gate_up, down])| page::Layer { experts, k, gate_up, down, score })
            .collect();
        let (layers, bytes) = page::lay_out(&mut self.segments, &layers)?;
        self.ends[1] = bytes;
        let frame = page::frame_bytes(&self.segments, &layers);
        Ok(Some(page::unlimited(layers, frame)))
    }

    fn entry(&mut self, graph: &Graph) -> Result<(Entry, Vec<Vec<usize>>)> {
        let spaces = graph.row_spaces(self.module);
        let mut frame = Frame {
            graph,
            homes: vec![None; graph.values.len()],
            buffers: Vec::new(),
            end: 0,
            forms: HashMap::new(),
        };
        for v in 0..INPUTS {
            let ty = graph.ty(ValueId(v as u32));
            frame.homes[v] = Some(frame.buffer(format!("%{v}"), ty)?);
        }
        let cuts: Vec<&PartCut> = self.statics.cuts.iter().filter(|c| c.cut.entry == graph.kind).collect();
        let inside: HashSet<usize> = cuts.iter().flat_map(|c| &c.cut.nodes).map(|n| n.0 as usize).collect();
        let residuals = residuals(graph, &inside);
        let mut steps = Vec::new();
        let mut writes = Vec::new();
        for (at, node) in graph.nodes.iter().enumerate() {
            if let Some(cut) = cuts.iter().find(|c| node.outputs.contains(&c.cut.y)) {
                let (step, w) = self.part(&mut frame, at, cut, &spaces)?;
                steps.push(step);
                writes.push(w);
                continue;
            }
            if inside.contains(&at)
                || residuals.values().any(|&(producer, _)| producer == at)
                || view(&mut frame, node)?
            {
                continue;
            }
            let (producer, residual) = match residuals.get(&at) {
                Some(&(producer, other)) => (&graph.nodes[producer], Some(other)),
                None => (node, None),
            };
            for (step, w) in self.steps(&mut frame, at, node, producer, residual, &spaces)? {
                steps.push(step);
                writes.push(w);
            }
        }
        let Home::Buffer { buffer: logits, .. } = frame.home(graph.output)? else {
            return Err(Error::bug("the logits are a state"));
        };
        let places = frame
            .homes
            .iter()
            .zip(&graph.values)
            .map(|(home, ty)| match *home {
                Some(Home::Buffer { buffer, column, .. }) => {
                    let cols = if ty.shape.len() < 2 { 1 } else { ty.cols() };
                    Ok(Some(Place { buffer, column: int(column)?, cols: int(cols)? }))
                }
                _ => Ok(None),
            })
            .collect::<Result<_>>()?;
        let out_rows = int(graph.ty(Graph::ROWS).rows())?;
        let entry = Entry { kind: graph.kind, out_rows, buffers: frame.buffers, logits, places, steps };
        Ok((entry, writes))
    }

    /// The steps of `node`, which computes `producer` and adds `residual` to it.
    fn steps(
        &mut self,
        frame: &mut Frame<'_>,
        at: usize,
        node: &Node,
        producer: &Node,
        residual: Option<ValueId>,
        spaces: &[RowSpace],
    ) -> Result<Vec<(Step, Vec<usize>)>> {
        if let Op::Fetch { layer, .. } = node.op {
            return Ok(vec![fetched(frame, at, node, layer, spaces)?]);
        }
        if matches!(node.op, Op::Admit(_) | Op::ExpertFfn { fixed: true, .. }) {
            return self.offloaded(frame, at, node, spaces).map(|step| vec![step]);
        }
        let graph = frame.graph;
        let ld_of = |home: Home| match home {
            Home::Buffer { ld, .. } => ld,
            Home::State(_) => 0,
        };
        let inputs = producer
            .inputs
            .iter()
            .map(|&input| {
                Ok(match input {
                    Operand::Value(v) => match frame.home(v)? {
                        Home::State(s) => InputView::State(self.cached(StateId(s))),
                        home @ Home::Buffer { .. } => InputView::Value { ty: graph.ty(v), ld: ld_of(home) },
                    },
                    Operand::Weight(w) => {
                        let w = self.module.weight(w);
                        InputView::Weight { shape: &w.shape, format: w.format }
                    }
                    Operand::State(s) => InputView::State(self.cached(s)),
                })
            })
            .collect::<Result<Vec<_>>>()?;
        let outputs = node.outputs.iter().map(|&v| graph.ty(v)).collect();
        let residual_ld = residual.map(|r| frame.home(r).map(ld_of)).transpose()?;
        let apart = !graph.kind.is_prefill();
        let view = NodeView { op: &producer.op, inputs, outputs, residual_ld, apart };
        let selection = self.target.select(&view).map_err(|e| {
            Error::limit(format!(
                "target `{}` cannot run `{}` in `{}`",
                self.target.name(),
                node.op.name(),
                node.scope
            ))
            .because(e)
        })?;

        for &v in &node.outputs {
            let home = match &producer.op {
                Op::CacheWrite => written_state(producer)?,
                _ => frame.buffer(format!("%{}", v.0), graph.ty(v))?,
            };
            frame.homes[v.0 as usize] = Some(home);
        }
        let name = format!("%{}", node.outputs[0].0);
        let (temps, done) = self.temps(frame, &producer.inputs, &selection, &name)?;
        let rows = spaces[node.outputs[0].0 as usize];
        let layout = |i: usize| {
            selection
                .layouts
                .iter()
                .find(|(input, _)| *input == i)
                .map_or(Layout::Rows, |&(_, layout)| layout)
        };
        let mut steps = Vec::new();
        let launches = selection.launches.iter().enumerate().filter(|(i, _)| !done.contains(i));
        for (_, Launch { work, args, writes }) in launches {
            let mut addresses = Vec::new();
            for role in args {
                let mut from = 0;
                let home = match *role {
                    Role::In(i) | Role::InAt(i, _) => match producer.inputs[i] {
                        Operand::Weight(w) => {
                            let segment = self.segment(w, layout(i))?;
                            addresses.push(if page::is_expert(&producer.op, i, producer.inputs[i]) {
                                let layer = layer(node).ok_or_else(|| Error::bug("experts of no layer"))?;
                                self.experts.entry(layer).or_default()[i - 2] = segment;
                                Arg::Matrices(segment)
                            } else {
                                Arg::Segment(segment)
                            });
                            continue;
                        }
                        Operand::State(s) => Home::State(s.0),
                        Operand::Value(v) => frame.home(v)?,
                    },
                    Role::Out(i) | Role::OutAt(i, _) => frame.home(node.outputs[i])?,
                    Role::Temp(i) => temps[i],
                    Role::Residual => frame.home(residual.ok_or_else(|| Error::bug("no residual"))?)?,
                };
                if let Role::InAt(_, column) | Role::OutAt(_, column) = *role {
                    from = column;
                }
                addresses.push(match home {
                    Home::Buffer { buffer, column, .. } => Arg::Buffer(buffer, int((column + from) * 4)?),
                    Home::State(s) => Arg::State(s),
                });
            }
            let (code, grid) = match work {
                Work::Kernel(spec) => {
                    self.scratch = self.scratch.max(aligned(self.target.scratch_bytes(spec) as u64));
                    (Code::Kernel(self.kernel(spec)?), self.target.grid(spec))
                }
                Work::Builtin(b) => (Code::Builtin(*b), moec_ir::plan::Grid::One),
            };
            let step = Step {
                unit: 0,
                code,
                args: addresses,
                rows,
                grid,
                barrier: true,
                deps: Vec::new(),
                node: int(at)?,
            };
            steps.push((step, writes.clone()));
        }
        Ok(steps)
    }

    /// The step of a node that a unit beside the processor takes part in. It gets values by their first columns.
    fn offloaded(
        &self,
        frame: &mut Frame<'_>,
        at: usize,
        node: &Node,
        spaces: &[RowSpace],
    ) -> Result<(Step, Vec<usize>)> {
        let graph = frame.graph;
        let set = layer(node).and_then(|layer| self.statics.set(layer));
        let set = set.ok_or_else(|| Error::bug(format!("no set of experts for `{}`", node.scope)))?;
        let value = |i: usize| match node.inputs.get(i) {
            Some(&Operand::Value(v)) => Ok(v),
            _ => Err(Error::bug(format!("`{}` without operand {i}", node.op.name()))),
        };
        let (code, inputs, unit) = if let Op::Admit(_) = node.op {
            let (ids, added) = (value(0)?, value(1)?);
            let (k, channels) = (int(graph.ty(ids).cols())?, int(graph.ty(added).cols())?);
            (Builtin::Admit { set: int(set)?, k, channels }, vec![ids, added], 0)
        } else {
            let (x, table) = (value(0)?, value(1)?);
            let (rows, slots) = (graph.ty(x).rows(), graph.ty(node.outputs[0]).rows());
            let (k, hidden) = (int(slots / rows.max(1))?, int(graph.ty(x).cols())?);
            let code = Builtin::Experts { set: int(set)?, rows: int(rows)?, k, hidden };
            (code, vec![x, table], self.statics.unit)
        };
        let call = Call { code, unit, inputs: &inputs, outputs: &node.outputs };
        call.step(frame, at, spaces)
    }

    /// The step of a part that static graphs compute.
    fn part(
        &self,
        frame: &mut Frame<'_>,
        at: usize,
        cut: &PartCut,
        spaces: &[RowSpace],
    ) -> Result<(Step, Vec<usize>)> {
        let attends = self.statics.parts.get(cut.part as usize).is_some_and(|p| p.attention.is_some());
        let mut inputs = vec![cut.cut.x];
        inputs.extend(cut.cut.angles.filter(|_| attends));
        inputs.extend(attends.then_some([Graph::POS, Graph::SLOT]).into_iter().flatten());
        let code = Builtin::Part { part: cut.part };
        Call { code, unit: self.statics.unit, inputs: &inputs, outputs: &[cut.cut.y] }.step(frame, at, spaces)
    }

    /// Homes of a selection's temporaries, and the launches whose results are already there: a value that
    /// several matrices read is brought into their form once.
    fn temps(
        &self,
        frame: &mut Frame<'_>,
        inputs: &[Operand],
        selection: &Selection,
        name: &str,
    ) -> Result<(Vec<Home>, Vec<usize>)> {
        let mut done = Vec::new();
        let mut homes = Vec::new();
        for (i, ty) in selection.temps.iter().enumerate() {
            let form = selection.launches.iter().enumerate().find_map(|(at, launch)| {
                let Work::Kernel(spec @ KernelSpec::Quantise { .. }) = &launch.work else { return None };
                let &[Role::In(from), Role::Temp(to)] = launch.args.as_slice() else { return None };
                let &Operand::Value(v) = inputs.get(from).filter(|_| to == i)? else { return None };
                match frame.home(v).ok()? {
                    Home::Buffer { buffer, column, .. } => {
                        Some((at, (buffer, column, self.target.symbol(spec))))
                    }
                    Home::State(_) => None,
                }
            });
            if let Some((at, &home)) = form.as_ref().and_then(|(at, key)| Some((*at, frame.forms.get(key)?)))
            {
                homes.push(home);
                done.push(at);
                continue;
            }
            let home = frame.buffer(format!("{name}.{i}"), ty)?;
            homes.push(home);
            frame.forms.extend(form.map(|(_, key)| (key, home)));
        }
        Ok((homes, done))
    }

    fn cached(&self, s: StateId) -> CacheView<'_> {
        let values = self.values.contains(&s);
        CacheView { shape: &self.module.state(s).ty.shape, format: self.cache, values }
    }

    fn kernel(&mut self, spec: &KernelSpec) -> Result<u32> {
        let symbol = self.target.symbol(spec);
        if let Some(&id) = self.kernel_ids.get(&symbol) {
            return Ok(id);
        }
        let id = int(self.kernels.len())?;
        self.kernels.push(spec.clone());
        self.kernel_ids.insert(symbol, id);
        Ok(id)
    }

    fn segment(&mut self, id: WeightId, layout: Layout) -> Result<u32> {
        if let Some(&segment) = self.segment_ids.get(&(id, layout)) {
            return Ok(segment);
        }
        let weight = self.module.weight(id);
        let file = usize::from(weight.class == WeightClass::Experts);
        let offset = self.ends[file].next_multiple_of(ALIGN);
        let bytes = moec_cpu::packed_bytes(layout, weight.format, &weight.shape)
            .ok_or_else(|| Error::limit(format!("weight `{}` is past what a plan can hold", weight.name)))?;
        self.ends[file] = offset + bytes;
        let index = int(self.segments.len())?;
        let shape = weight.shape.iter().map(|&d| int(d)).collect::<Result<_>>()?;
        self.segments.push(Segment {
            name: weight.name.clone(),
            file: file as u32,
            offset,
            bytes,
            pitch: bytes / weight.shape.iter().rev().nth(2).map_or(1, |&lead| lead as u64),
            shape,
            format: weight.format,
            layout,
        });
        self.segment_weights.push(id);
        self.segment_ids.insert((id, layout), index);
        Ok(index)
    }
}

/// The step of a `fetch`: the table stays where it is.
fn fetched(
    frame: &mut Frame<'_>,
    at: usize,
    node: &Node,
    layer: usize,
    spaces: &[RowSpace],
) -> Result<(Step, Vec<usize>)> {
    let value = |operand: &Operand| match operand {
        Operand::Value(v) => Ok(*v),
        _ => Err(Error::bug("a `fetch` of something that is no value")),
    };
    let table = node.inputs.first().ok_or_else(|| Error::bug("a `fetch` of nothing"))?;
    let home = frame.home(value(table)?)?;
    frame.homes[node.outputs[0].0 as usize] = Some(home);
    let (mut args, mut strides, mut rows) = (Vec::new(), [0; FETCHED], 0);
    let scores = node.inputs.iter().skip(1).zip(&mut strides);
    for (operand, stride) in scores {
        let v = value(operand)?;
        let Home::Buffer { buffer, column, ld } = frame.home(v)? else {
            return Err(Error::bug("scores that are a state"));
        };
        rows = frame.graph.ty(v).rows();
        *stride = int(ld)?;
        args.push(Arg::Buffer(buffer, int(column * 4)?));
    }
    let Home::Buffer { buffer, .. } = home else { return Err(Error::bug("a table that is a state")) };
    // The table's words tell for how many experts per token it is laid out.
    let words: usize = frame.graph.ty(value(table)?).shape.iter().product();
    let own = node.inputs.get(1).ok_or_else(|| Error::bug("a `fetch` without scores"))?;
    let bare = DispatchLayout { rows: 0, k: 0, experts: frame.graph.ty(value(own)?).cols() };
    let k = words.saturating_sub(bare.words()) / (2 * rows.max(1));
    args.push(Arg::Buffer(buffer, 0));
    let writes = vec![args.len() - 1];
    let step = Step {
        unit: 0,
        code: Code::Builtin(Builtin::Fetch { layer: int(layer)?, rows: int(rows)?, k: int(k)?, strides }),
        args,
        rows: spaces[node.outputs[0].0 as usize],
        grid: moec_ir::plan::Grid::One,
        barrier: true,
        deps: Vec::new(),
        node: int(at)?,
    };
    Ok((step, writes))
}

/// Tensors of the KV cache that attention reads as values.
fn values(module: &Module) -> HashSet<StateId> {
    let mut found = HashSet::new();
    for graph in &module.entries {
        for node in &graph.nodes {
            let Op::Attention(desc) = &node.op else { continue };
            let mut operand = node.inputs.get(2).copied().filter(|_| !desc.v_from_k);
            while let Some(Operand::Value(v)) = operand {
                operand = graph.def(v).and_then(|n| graph.nodes[n.0 as usize].inputs.first().copied());
            }
            if let Some(Operand::State(s)) = operand {
                found.insert(s);
            }
        }
    }
    found
}

/// Home of what a cache write gives.
fn written_state(node: &Node) -> Result<Home> {
    match node.inputs.first() {
        Some(Operand::State(s)) => Ok(Home::State(s.0)),
        _ => Err(Error::bug("a cache write without its state")),
    }
}

/// Additions that go into the epilogue of one operand's producer: add node → (producer, other operand). What is `inside` of
/// a part has no epilogue.
fn residuals(graph: &Graph, inside: &HashSet<usize>) -> HashMap<usize, (usize, ValueId)> {
    let mut readers: HashMap<ValueId, usize> = HashMap::new();
    let mut definition: HashMap<ValueId, usize> = HashMap::new();
    for (at, node) in graph.nodes.iter().enumerate() {
        for input in &node.inputs {
            if let Operand::Value(v) = input {
                *readers.entry(*v).or_default() += 1;
            }
        }
        definition.extend(node.outputs.iter().map(|&v| (v, at)));
    }
    let fuses = |v: ValueId| {
        let at = *definition.get(&v)?;
        let op = &graph.nodes[at].op;
        let able = matches!(op, Op::Linear { .. } | Op::Combine { .. }) && !inside.contains(&at);
        (able && readers.get(&v) == Some(&1) && v != graph.output).then_some(at)
    };
    let mut found = HashMap::new();
    for (at, node) in graph.nodes.iter().enumerate() {
        if let (Op::Add, &[Operand::Value(a), Operand::Value(b)]) = (&node.op, node.inputs.as_slice())
            && !inside.contains(&at)
        {
            // The later producer keeps its inputs alive for less long.
            let options = [(fuses(a), b), (fuses(b), a)];
            let best = options.into_iter().filter_map(|(p, other)| Some((p?, other))).max_by_key(|(p, _)| *p);
            if let Some((producer, other)) = best.filter(|_| a != b) {
                found.insert(at, (producer, other));
            }
        }
    }
    found
}

/// Slices of whole rows are views of their source. Gives true where nothing is left to do.
fn view(frame: &mut Frame<'_>, node: &Node) -> Result<bool> {
    let (&Op::Slice { heads: 1, start, .. }, &[Operand::Value(source)]) = (&node.op, node.inputs.as_slice())
    else {
        return Ok(false);
    };
    if let Home::Buffer { buffer, column, ld } = frame.home(source)? {
        frame.homes[node.outputs[0].0 as usize] = Some(Home::Buffer { buffer, column: column + start, ld });
        return Ok(true);
    }
    Ok(false)
}
