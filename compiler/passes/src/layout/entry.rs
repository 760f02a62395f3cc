//! An entry point, node by node: kernels, their operands, and the weights that they read.

use super::builtins::request_experts;
use super::entry_layout::{EntryLayout, ValueLocation, view, written_state};
use super::read::{exchanges, matrices, residuals, rotations, values};
use super::{CacheForm, int};
use crate::assign_units::UnitAssignment;
use crate::outline_graphs::{Statics, SubgraphCall};
use crate::{own_experts, size_expert_cache};
use moec_base::error::{Error, Result};
use moec_base::paths::{DENSE, EXPERTS};
use moec_cpu::gpu::Kernel;
use moec_cpu::{
    CacheView, CpuTarget, GpuTarget, InputView, KernelSpec, Launch, NodeView, Role, Selection, Work,
};
use moec_ir::graph::INPUTS;
use moec_ir::plan::{
    ALIGN, Arg, BufferColumns, Builtin, Candidates, Code, Entry, ExpertLayer, GpuKernel, Layout, RowSpace,
    Segment, StateKind, Step, StreamSet,
};
use moec_ir::{Format, Graph, Module, Node, Op, Operand, StateId, ValueId, WeightClass, WeightId};
use std::collections::{BTreeMap, HashMap, HashSet};

/// Layout so far, over all entry points.
pub(super) struct Builder<'a> {
    pub(super) module: &'a Module,
    pub(super) target: &'a CpuTarget,
    pub(super) statics: &'a Statics,
    /// Units other than the CPU that run nodes and experts with dynamic shapes.
    pub(super) assignment: &'a UnitAssignment,
    /// True if experts stay on disk.
    pub(super) paged: bool,
    /// Format of the KV cache.
    cache: Format,
    /// Channels of each state that are stored rotated together.
    pub(super) rotated: Vec<usize>,
    /// Tensors of the KV cache that are values, not keys.
    pub(super) values: HashSet<StateId>,
    /// Weights that linear layers on the CPU multiply by.
    matrices: HashSet<WeightId>,
    pub(super) kernels: Vec<KernelSpec>,
    kernel_ids: HashMap<String, u32>,
    pub(super) segments: Vec<Segment>,
    /// By weight, layout, and memory of another host, or 0.
    segment_ids: HashMap<(WeightId, Layout, u32), u32>,
    /// Experts of a host as weights, by the whole weight and the host's unit.
    owned: BTreeMap<(WeightId, u32), WeightId>,
    pub(super) segment_weights: Vec<WeightId>,
    /// Segments of gate and up, and of down, by memory of another host, or 0, and layer.
    pub(super) experts: BTreeMap<(u32, u32), [u32; 2]>,
    /// The same for units that launch kernels of their own.
    pub(super) brought: BTreeMap<(u32, u32), [u32; 2]>,
    /// Experts that NDP command streams compute.
    pub(super) streams: Vec<StreamSet>,
    /// GPU targets of the units that launch their own kernels, by unit.
    pub(super) threads: BTreeMap<u32, GpuTarget>,
    /// GPU kernels, in the order of [`Builder::launches`].
    pub(super) gpu_kernels: Vec<Kernel>,
    pub(super) launches: Vec<GpuKernel>,
    /// Weight files: of dense weights, of experts, and of each other host, by the host's memory.
    pub(super) files: Vec<(String, u32)>,
    /// Bytes of each so far.
    pub(super) ends: Vec<u64>,
    pub(super) scratch: u64,
    /// By memory other than the CPU's and segment: the matrices that are there; an empty list is the whole
    /// segment.
    pub(super) residents: BTreeMap<(u32, u32), Vec<u32>>,
    /// Memories of states that are not in the CPU's memory.
    pub(super) states: BTreeMap<u32, u32>,
}

/// A node whose steps are built.
pub(super) struct Placed<'a> {
    pub(super) node: &'a Node,
    /// Node that is computed, and the value that is added to it.
    producer: &'a Node,
    residual: Option<ValueId>,
    /// Index of the node.
    pub(super) at: usize,
    pub(super) rows: RowSpace,
}

impl<'a> Builder<'a> {
    pub(super) fn new(
        module: &'a Module,
        target: &'a CpuTarget,
        cache: CacheForm,
        statics: &'a Statics,
        assignment: &'a UnitAssignment,
        paged: bool,
    ) -> Self {
        let threads = super::gpu_targets(target, assignment);
        let mut files = vec![(DENSE.to_owned(), 0), (EXPERTS.to_owned(), 0)];
        for memory in assignment.memories_of_hosts() {
            let name = assignment.memories.get(memory as usize).map_or("", |m| &m.name);
            files.push((moec_base::paths::weights_of(name), memory));
        }
        Self {
            module,
            target,
            statics,
            assignment,
            paged,
            cache: cache.format,
            rotated: if cache.rotates { rotations(module) } else { vec![1; module.states.len()] },
            values: values(module),
            matrices: matrices(module, statics, |node| threads.contains_key(&assignment.of_node(node))),
            kernels: Vec::new(),
            kernel_ids: HashMap::new(),
            segments: Vec::new(),
            segment_ids: HashMap::new(),
            owned: own_experts::owned(module),
            segment_weights: Vec::new(),
            experts: BTreeMap::new(),
            brought: BTreeMap::new(),
            streams: Vec::new(),
            threads,
            gpu_kernels: Vec::new(),
            launches: Vec::new(),
            ends: vec![0; files.len()],
            files,
            scratch: 0,
            residents: BTreeMap::new(),
            states: BTreeMap::new(),
        }
    }
}

impl Builder<'_> {
    pub(super) fn entry(&mut self, graph: &Graph) -> Result<Entry> {
        let spaces = graph.row_spaces(self.module);
        let mut entry = EntryLayout {
            graph,
            locations: vec![None; graph.values.len()],
            buffers: Vec::new(),
            end: 0,
            forms: HashMap::new(),
            tables: HashMap::new(),
        };
        for v in 0..INPUTS {
            let ty = graph.ty(ValueId(v as u32));
            entry.locations[v] = Some(entry.buffer(format!("%{v}"), ty, 0)?);
        }
        let calls: Vec<&SubgraphCall> =
            self.statics.calls.iter().filter(|c| c.boundary.entry == graph.kind).collect();
        let inside: HashSet<usize> =
            calls.iter().flat_map(|c| &c.boundary.nodes).map(|n| n.0 as usize).collect();
        let exchanges = exchanges(graph, |node| self.assignment.is_elsewhere(node));
        let mut residuals = residuals(graph, &inside, &exchanges);
        // Nodes of two units are two steps.
        let unit = |at: usize| self.assignment.of_node(&graph.nodes[at]);
        residuals.retain(|&add, &mut (producer, _)| unit(add) == unit(producer));
        let mut steps = Vec::new();
        for (at, node) in graph.nodes.iter().enumerate() {
            if let Some(call) = calls.iter().find(|c| node.outputs.contains(&c.boundary.y)) {
                steps.push(self.part(&mut entry, at, call, &spaces)?);
                continue;
            }
            if inside.contains(&at)
                || residuals.values().any(|&(producer, _)| producer == at)
                || view(&mut entry, node)?
            {
                continue;
            }
            let (producer, residual) = match residuals.get(&at) {
                Some(&(producer, other)) => (&graph.nodes[producer], Some(other)),
                None => (node, None),
            };
            steps.extend(self.steps(&mut entry, at, node, producer, residual, &spaces)?);
        }
        let ValueLocation::Buffer { buffer: logits, .. } = entry.location(graph.output)? else {
            return Err(Error::bug("the logits are a state"));
        };
        let locations = entry
            .locations
            .iter()
            .zip(&graph.values)
            .map(|(location, ty)| match *location {
                Some(ValueLocation::Buffer { buffer, column, .. }) => {
                    let cols = if ty.shape.len() < 2 { 1 } else { ty.cols() };
                    Ok(Some(BufferColumns { buffer, column: int(column)?, cols: int(cols)? }))
                }
                _ => Ok(None),
            })
            .collect::<Result<_>>()?;
        let out_rows = int(graph.ty(Graph::ROWS).rows())?;
        Ok(Entry { kind: graph.kind, out_rows, buffers: entry.buffers, logits, locations, steps })
    }

    /// The steps of `node`, which computes `producer` and adds `residual` to it.
    fn steps(
        &mut self,
        entry: &mut EntryLayout<'_>,
        at: usize,
        node: &Node,
        producer: &Node,
        residual: Option<ValueId>,
        spaces: &[RowSpace],
    ) -> Result<Vec<Step>> {
        if let Op::RequestExperts { layer, .. } = node.op {
            let units = self.assignment.experts.of_layer(node.scope.layer).map(|(_, of)| of.units.as_slice());
            return Ok(request_experts(entry, at, node, layer, units, spaces)?.into_iter().collect());
        }
        if matches!(node.op, Op::LimitCapacity(_) | Op::ExpertFfn { fixed: true, .. }) {
            return self.outlined(entry, at, node, spaces).map(|step| vec![step]);
        }
        let (graph, assignment) = (entry.graph, self.assignment);
        let ld_of = |location: ValueLocation| match location {
            ValueLocation::Buffer { ld, .. } => ld,
            ValueLocation::State(_) => 0,
        };
        let inputs = producer
            .inputs
            .iter()
            .map(|&input| {
                Ok(match input {
                    Operand::Value(v) => match entry.location(v)? {
                        ValueLocation::State(s) => InputView::State(self.cached(StateId(s))),
                        location @ ValueLocation::Buffer { .. } => {
                            InputView::Value { ty: graph.ty(v), ld: ld_of(location) }
                        }
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
        let residual_ld = residual.map(|r| entry.location(r).map(ld_of)).transpose()?;
        let one_row_per_sequence = !graph.kind.is_prefill();
        let unit = assignment.of_node(node);
        let tied = !self.threads.contains_key(&unit)
            && producer.inputs.iter().any(|i| matches!(i, Operand::Weight(w) if self.matrices.contains(w)));
        let view = NodeView { op: &producer.op, inputs, outputs, residual_ld, one_row_per_sequence, tied };
        let units = match (&node.op, assignment.experts.of_layer(node.scope.layer)) {
            (Op::ExpertFfn { .. }, Some((_, of))) if assignment.of_host(node).is_none() => of.units.clone(),
            _ => vec![unit],
        };
        let mut each = Vec::with_capacity(units.len());
        for unit in units {
            each.push((unit, self.select(unit, &view, node)?));
        }
        // A result of several units is in the CPU's memory, unless only one unit reads it.
        let memory = match node.op {
            Op::ExpertFfn { .. } if assignment.of_host(node).is_none() => {
                assignment.whole(node.scope.layer).map_or(0, |unit| assignment.memory(unit))
            }
            _ => assignment.memory(unit),
        };
        for &v in &node.outputs {
            let location = match &producer.op {
                Op::CacheWrite => written_state(producer)?,
                _ => entry.buffer(format!("%{}", v.0), graph.ty(v), memory)?,
            };
            entry.locations[v.0 as usize] = Some(location);
        }
        let name = format!("%{}", node.outputs[0].0);
        let place = Placed { node, producer, residual, at, rows: spaces[node.outputs[0].0 as usize] };
        let mut steps = Vec::new();
        for (on, selection) in &each {
            if let Some(streams) = assignment.streams(*on).filter(|_| matches!(node.op, Op::ExpertFfn { .. }))
            {
                steps.push(self.streamed(entry, &place, selection, *on, streams)?);
                continue;
            }
            let name = if *on == unit { name.clone() } else { format!("{name}@{on}") };
            steps.extend(self.launches(entry, &place, selection, *on, &name)?);
        }
        if let (&Op::Dispatch { .. }, Some((index, of))) =
            (&node.op, assignment.experts.of_layer(node.scope.layer))
            && of.units.len() > 1
            && UnitAssignment::divides(graph, node.outputs[0])
        {
            divide(entry, &mut steps, node.outputs[0], index, of)?;
        }
        Ok(steps)
    }

    /// The steps of a node on one unit.
    fn launches(
        &mut self,
        entry: &mut EntryLayout<'_>,
        place: &Placed<'_>,
        selection: &Selection,
        unit: u32,
        name: &str,
    ) -> Result<Vec<Step>> {
        let &Placed { node, producer, residual, at, rows } = place;
        let memory = self.assignment.memory(unit);
        let (temps, done) = self.temps(entry, &producer.inputs, selection, name, memory)?;
        let layout = |i: usize| {
            selection
                .layouts
                .iter()
                .find(|(input, _)| *input == i)
                .map_or(Layout::Rows, |&(_, layout)| layout)
        };
        let mut steps = Vec::new();
        let launches = selection.launches.iter().enumerate().filter(|(i, _)| !done.contains(i));
        for (_, Launch { work, args }) in launches {
            let mut addresses = Vec::new();
            for role in args {
                let mut from = 0;
                let location = match *role {
                    Role::In(i) | Role::InAt(i, _) => match producer.inputs[i] {
                        Operand::Weight(w) => {
                            let w = self.owned.get(&(w, unit)).copied().unwrap_or(w);
                            let host = if self.assignment.is_host(unit) { memory } else { 0 };
                            let segment =
                                self.segment(w, layout(i), self.threads.contains_key(&unit), host)?;
                            addresses.push(
                                if size_expert_cache::is_expert(&producer.op, i, producer.inputs[i]) {
                                    let layer =
                                        node.scope.layer.ok_or_else(|| Error::bug("experts of no layer"))?;
                                    let own = self.threads.contains_key(&unit);
                                    let of = if own { &mut self.brought } else { &mut self.experts };
                                    let parts = match producer.op {
                                        // Whole neurons are one segment; predictors stay in memory.
                                        Op::NeuronFfn { gates_on_disk: true, .. } if i > 2 => 0..0,
                                        Op::NeuronFfn { gates_on_disk: true, .. } => 0..2,
                                        Op::ExpertFfn { .. } | Op::NeuronFfn { paged: Some(_), .. } => {
                                            i - 2..i - 1
                                        }
                                        _ => 0..0,
                                    };
                                    if !parts.is_empty() {
                                        of.entry((host, layer)).or_default()[parts].fill(segment);
                                    }
                                    match self.assignment.of_host(node) {
                                        Some(_) => self.make_all_resident(memory, segment),
                                        None => self.make_resident(layer, memory, segment)?,
                                    }
                                    Arg::Matrices(segment)
                                } else {
                                    if memory > 0 {
                                        self.residents.insert((memory, segment), Vec::new());
                                    }
                                    Arg::Segment(segment)
                                },
                            );
                            continue;
                        }
                        Operand::State(s) => ValueLocation::State(s.0),
                        // A unit finds its own experts in its own table.
                        Operand::Value(v) => match entry.tables.get(&(v, unit)) {
                            Some(&own) if matches!(node.op, Op::ExpertFfn { .. }) => own,
                            _ => entry.location(v)?,
                        },
                    },
                    Role::Out(i) | Role::OutAt(i, _) => entry.location(node.outputs[i])?,
                    Role::Temp(i) => temps[i],
                    Role::Residual => entry.location(residual.ok_or_else(|| Error::bug("no residual"))?)?,
                };
                if let Role::InAt(_, column) | Role::OutAt(_, column) = *role {
                    from = column;
                }
                addresses.push(match location {
                    ValueLocation::Buffer { buffer, column, .. } => {
                        Arg::Buffer(buffer, int((column + from) * 4)?)
                    }
                    ValueLocation::State(s) => {
                        if self.states.insert(s, memory).is_some_and(|before| before != memory) {
                            return Err(Error::bug("a state with two assignment"));
                        }
                        Arg::State(s)
                    }
                });
            }
            let (code, grid) = self.code(unit, work, place, entry.graph)?;
            steps.push(Step {
                unit,
                code,
                args: addresses,
                rows,
                grid,
                barrier: unit == 0,
                deps: Vec::new(),
                node: int(at)?,
            });
        }
        Ok(steps)
    }

    /// Makes all matrices of a segment resident in a memory other than the CPU's.
    fn make_all_resident(&mut self, memory: u32, segment: u32) {
        let matrices = self.segments.get(segment as usize).map_or(0, |s| s.extents().0);
        if memory > 0 {
            self.residents.insert((memory, segment), (0..matrices).collect());
        }
    }

    /// Makes matrices of a layer's experts resident in a memory other than the CPU's, if the experts are
    /// assigned there.
    pub(super) fn make_resident(&mut self, layer: u32, memory: u32, segment: u32) -> Result<()> {
        if memory == 0 {
            return Ok(());
        }
        let own = self.assignment.experts_of(layer, memory);
        if own.is_empty() {
            return Err(Error::bug("a unit without experts computes some"));
        }
        let all = self.residents.entry((memory, segment)).or_default();
        all.extend(own);
        all.sort_unstable();
        all.dedup();
        Ok(())
    }

    /// Locations of a selection's temporaries, and the launches whose results already exist: a value that
    /// several matrices read is converted to their compute type once.
    fn temps(
        &self,
        entry: &mut EntryLayout<'_>,
        inputs: &[Operand],
        selection: &Selection,
        name: &str,
        memory: u32,
    ) -> Result<(Vec<ValueLocation>, Vec<usize>)> {
        let mut done = Vec::new();
        let mut locations = Vec::new();
        for (i, ty) in selection.temps.iter().enumerate() {
            let form = selection.launches.iter().enumerate().find_map(|(at, launch)| {
                let Work::Kernel(spec) = &launch.work else { return None };
                if !spec.is_conversion() {
                    return None;
                }
                let &[Role::In(from), Role::Temp(to)] = launch.args.as_slice() else { return None };
                let &Operand::Value(v) = inputs.get(from).filter(|_| to == i)? else { return None };
                match entry.location(v).ok()? {
                    ValueLocation::Buffer { buffer, column, .. } => {
                        Some((at, (buffer, column, self.target.symbol(spec), memory)))
                    }
                    ValueLocation::State(_) => None,
                }
            });
            if let Some((at, &location)) =
                form.as_ref().and_then(|(at, key)| Some((*at, entry.forms.get(key)?)))
            {
                locations.push(location);
                done.push(at);
                continue;
            }
            let location = entry.buffer(format!("{name}.{i}"), ty, memory)?;
            locations.push(location);
            entry.forms.extend(form.map(|(_, key)| (key, location)));
        }
        Ok((locations, done))
    }

    fn cached(&self, s: StateId) -> CacheView<'_> {
        let values = self.values.contains(&s);
        let state = self.module.state(s);
        let ring = matches!(state.kind, StateKind::Ring { .. });
        let rotated = self.rotated.get(s.0 as usize).copied().unwrap_or(1);
        CacheView { shape: &state.ty.shape, ring, format: self.cache, rotated, values }
    }

    pub(super) fn kernel(&mut self, spec: &KernelSpec) -> Result<u32> {
        let symbol = self.target.symbol(spec);
        if let Some(&id) = self.kernel_ids.get(&symbol) {
            return Ok(id);
        }
        let id = int(self.kernels.len())?;
        self.kernels.push(spec.clone());
        self.kernel_ids.insert(symbol, id);
        Ok(id)
    }

    pub(super) fn segment(&mut self, id: WeightId, layout: Layout, threads: bool, host: u32) -> Result<u32> {
        if let Some(&segment) = self.segment_ids.get(&(id, layout, host)) {
            return Ok(segment);
        }
        let weight = self.module.weight(id);
        // The file of experts that stay on disk holds the format of the CPU's kernels.
        let experts = weight.class == WeightClass::Experts && !(threads && self.paged);
        let own = self.files.iter().position(|&(_, memory)| host > 0 && memory == host);
        let file = own.unwrap_or(usize::from(experts));
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
            pitch: bytes / weight.shape.iter().rev().nth(2).map_or(1, |&matrices| matrices as u64),
            shape,
            format: weight.format,
            layout,
        });
        self.segment_weights.push(id);
        self.segment_ids.insert((id, layout, host), index);
        Ok(index)
    }
}

/// Makes a `dispatch` write a table for each unit that has some of the experts.
fn divide(
    entry: &mut EntryLayout<'_>,
    steps: &mut [Step],
    table: ValueId,
    index: u32,
    of: &ExpertLayer,
) -> Result<()> {
    let [step] = steps else { return Err(Error::bug("a `dispatch` of several steps")) };
    let Code::Builtin(Builtin::Dispatch { candidates, .. }) = &mut step.code else {
        return Err(Error::bug("an invalid `dispatch`"));
    };
    *candidates = Some(Candidates { layer: index, units: int(of.units.len())? });
    for &unit in &of.units {
        let own = entry.buffer(format!("%{}@{unit}", table.0), entry.graph.ty(table), 0)?;
        if let ValueLocation::Buffer { buffer, .. } = own {
            step.args.push(Arg::Buffer(buffer, 0));
        }
        entry.tables.insert((table, unit), own);
    }
    Ok(())
}
