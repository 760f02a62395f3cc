//! Unit that executes static graphs: copies rows to them and back (NPUMoE, §3.2 and §4.2).
//!
//! The CPU routes and decides which rows are within capacity ([`crate::exec::capacity_limit`]). For
//! [`Builtin::Experts`] the unit packs the rows of each group expert by expert, padded to their capacities.
//! It then runs the graph and unpacks the results. For [`Builtin::Subgraph`] it runs the graphs of a
//! subgraph. It has its own thread, so the CPU computes its experts while graphs run.

use crate::bundle::program::{Code, Program};
use crate::error::{Error, Result};
use crate::exec::capacity_limit::{SetCounters, lock};
use crate::exec::chunk;
use crate::exec::graphs::{Graphs, f16};
use crate::exec::overflow::OverflowCounters;
use crate::exec::unit::{ComputeUnit, Launch, PoolThread, StepFault, UnknownStep};
use crate::platform::memory::Addr;
use half::slice::HalfFloatSliceExt;
use moec_ir::op::DispatchLayout;
use moec_ir::plan::{self, Builtin, Entry, Subgraph};
use std::sync::{Arc, Mutex};

/// A unit that executes static graphs, on rows in the CPU's memory.
pub(crate) struct GraphUnit<'p> {
    program: &'p Program,
    graphs: Box<dyn Graphs>,
    /// By entry point, the graphs that its steps run, each once, in their order.
    entry_graphs: Vec<Vec<usize>>,
    counters: Arc<SetCounters>,
    work: Mutex<Work>,
}

/// Memory that is used again from call to call.
#[derive(Default)]
struct Work {
    x: Vec<f16>,
    y: Vec<f16>,
    positions: Vec<u32>,
    /// Inputs and outputs of a subgraph.
    tensors: Vec<Vec<f16>>,
}

impl<'p> GraphUnit<'p> {
    /// Executor for a program whose graphs are loaded.
    pub(crate) fn new(program: &'p Program, graphs: Box<dyn Graphs>, counters: Arc<SetCounters>) -> Self {
        let entry_graphs = program.entries.iter().map(|entry| graphs_of(program, entry)).collect();
        Self { program, graphs, entry_graphs, counters, work: Mutex::default() }
    }

    /// Runs a graph.
    fn run(&self, graph: u32, slot: usize, inputs: &[&[f16]], outputs: &mut [&mut [f16]]) -> Result<()> {
        self.graphs.run(graph as usize, slot, inputs, outputs)
    }

    /// Runs the graphs of a set. `x` is `[rows, hidden]`, `y` is `[rows · k, hidden]`, in the order of the
    /// table's slots.
    fn experts(
        &self,
        set: usize,
        layout: DispatchLayout,
        hidden: usize,
        (x, table): (&[f32], &[i32]),
        y: &mut [f32],
    ) -> Result<()> {
        let Work { x: packed, y: results, .. } = &mut *lock(&self.work);
        let mut counters = OverflowCounters::default();
        // Slots of an expert, empty if no row has chosen it. They are inside of the buffer even if the table
        // is wrong.
        let most = layout.rows * layout.k;
        let word = |i: usize, end: usize| usize::try_from(table[i]).unwrap_or(0).min(end);
        let active = word(0, layout.experts);
        let slots = |e: u32, capacity: usize| {
            let at = table[layout.expert()..][..active].iter().position(|&id| id == e as i32)?;
            let [first, end] = [0, 1].map(|i| word(layout.start() + at + i, most));
            Some(first..end.min(first + capacity))
        };
        let rows = x.len() / hidden.max(1);
        // Groups with the same experts are sizes of one graph, the largest last.
        for sizes in self.program.expert_sets[set].groups.chunk_by(|a, b| a.experts == b.experts) {
            let Some(largest) = sizes.last() else { continue };
            let members = || largest.experts.iter().enumerate();
            let kept = || members().filter_map(|(_, &e)| Some(slots(e, largest.capacity as usize)?.len()));
            let most = kept().max().unwrap_or(0);
            if most == 0 {
                continue;
            }
            let group = sizes.iter().find(|g| g.capacity as usize >= most).unwrap_or(largest);
            let capacity = group.capacity as usize;
            let places = || members().filter_map(|(i, &e)| Some((i * capacity, slots(e, capacity)?)));
            packed.clear();
            packed.resize(group.experts.len() * capacity * hidden, f16::ZERO);
            results.clear();
            results.resize(packed.len(), f16::ZERO);
            for (place, slots) in places() {
                for (row, slot) in (place..).zip(slots) {
                    let token = word(layout.token() + slot, rows.saturating_sub(1));
                    let row = &mut packed[row * hidden..][..hidden];
                    row.convert_from_f32_slice(&x[token * hidden..][..hidden]);
                    if row.iter().any(|h| !h.is_finite()) {
                        let why = "a row holds a number past 65504, which f16 does not hold".to_owned();
                        return Err(Error::graph(format!("experts of set {set}"), why));
                    }
                }
            }
            self.run(group.graph, 0, &[packed], &mut [results])?;
            for (place, slots) in places() {
                for (row, slot) in (place..).zip(slots) {
                    results[row * hidden..][..hidden].convert_to_f32_slice(&mut y[slot * hidden..][..hidden]);
                }
            }
            let rows = members().map(|(_, &e)| slots(e, capacity).map_or(0, |s| s.len() as u32));
            counters.executed(group.capacity, rows);
        }
        self.counters.add(set, &counters);
        Ok(())
    }
}

/// Graphs that the steps of an entry point run, each once, in their order.
fn graphs_of(program: &Program, entry: &Entry) -> Vec<usize> {
    let mut found = Vec::new();
    for step in &entry.steps {
        let graphs: Vec<u32> = match step.code {
            plan::Code::Builtin(Builtin::Experts { set, .. }) => {
                program.expert_sets[set as usize].groups.iter().map(|group| group.graph).collect()
            }
            plan::Code::Builtin(Builtin::Subgraph { subgraph: part }) => {
                program.subgraphs[part as usize].graphs.clone()
            }
            _ => continue,
        };
        for graph in graphs.into_iter().map(|g| g as usize) {
            if !found.contains(&graph) {
                found.push(graph);
            }
        }
    }
    found
}

/// Rows of a subgraph, and for attention also angles, positions and slots.
#[derive(Clone, Copy)]
struct SubgraphRows<'a> {
    x: &'a [f32],
    angles: &'a [f32],
    pos: &'a [i32],
    slots: &'a [i32],
}

impl GraphUnit<'_> {
    /// Runs the graphs of a subgraph. `y` is `[rows, outputs]`.
    fn part(&self, part: usize, rows: SubgraphRows<'_>, y: &mut [f32]) -> Result<()> {
        let part = &self.program.subgraphs[part];
        let (inputs, outputs) = (part.inputs as usize, part.outputs as usize);
        let n = y.len() / outputs.max(1);
        match part.attention {
            Some(attention) if attention.one_call_per_row => {
                let angles = attention.angles as usize;
                for t in 0..n {
                    let one = SubgraphRows {
                        x: &rows.x[t * inputs..][..inputs],
                        angles: &rows.angles[t * angles..][..angles],
                        pos: &rows.pos[t..=t],
                        slots: &rows.slots[t..=t],
                    };
                    self.call(part, one, &mut y[t * outputs..][..outputs])?;
                }
                Ok(())
            }
            _ => self.call(part, rows, y),
        }
    }

    /// Calls each graph of a subgraph once: all rows are of one sequence.
    fn call(&self, part: &Subgraph, rows: SubgraphRows<'_>, y: &mut [f32]) -> Result<()> {
        let Work { tensors, positions, .. } = &mut *lock(&self.work);
        positions.clear();
        positions.extend(rows.pos.iter().map(|&p| u32::try_from(p).unwrap_or(0)));
        let slot = rows.slots.first().map_or(0, |&s| usize::try_from(s).unwrap_or(0));
        let mut column = 0;
        // Attention has a graph for each position at which a chunk of a prompt begins, or one for any
        // position, or both.
        let start = positions.first().copied();
        let declared = &self.program.graphs;
        let at_place =
            part.graphs.iter().find(|&&g| start.is_some() && declared[g as usize].fixed_start() == start);
        for &g in &part.graphs {
            let graph = &declared[g as usize];
            if part.attention.is_some() && graph.fixed_start().is_some() != at_place.is_some() {
                continue;
            }
            if at_place.is_some_and(|place| *place != g) {
                continue;
            }
            let failed = |why: String| Error::graph(format!("{} {}", graph.package, graph.function), why);
            tensors.resize_with(graph.inputs.len() + graph.outputs.len(), Vec::new);
            let (given, taken) = tensors.split_at_mut(graph.inputs.len());
            for (tensor, values) in graph.inputs.iter().zip(&mut *given) {
                values.resize(tensor.elements(), f16::ZERO);
                let width = tensor.shape[1] as usize;
                let (context, window) =
                    part.attention.map_or((0, None), |a| (a.context as usize, a.window.map(|w| w as usize)));
                let filled = match &*tensor.name {
                    "x" => chunk::pad(values, width, rows.x),
                    "angles" => chunk::pad(values, width, rows.angles),
                    "mask" => chunk::mask(values, tensor.shape[3] as usize, positions, window),
                    "write" => chunk::write(values, context, positions),
                    name => return Err(failed(format!("it takes `{name}`, which no step gives"))),
                };
                filled.map_err(|e| failed(e.to_string()))?;
                if values.iter().any(|h| !h.is_finite()) {
                    return Err(failed(format!("`{}` holds a number that f16 does not", tensor.name)));
                }
            }
            for (tensor, values) in graph.outputs.iter().zip(&mut *taken) {
                values.resize(tensor.elements(), f16::ZERO);
            }
            let given: Vec<&[f16]> = given.iter().map(Vec::as_slice).collect();
            let mut results: Vec<&mut [f16]> = taken.iter_mut().map(Vec::as_mut_slice).collect();
            self.run(g, slot, &given, &mut results)?;
            for (tensor, values) in graph.outputs.iter().zip(&*taken) {
                let width = tensor.shape[1] as usize;
                for (y, values) in y.chunks_exact_mut(part.outputs as usize).zip(values.chunks_exact(width)) {
                    values.convert_to_f32_slice(&mut y[column..][..width]);
                }
                column += width;
            }
        }
        Ok(())
    }
}

impl ComputeUnit for GraphUnit<'_> {
    fn name(&self) -> &'static str {
        self.graphs.name()
    }

    fn executes(&self, builtin: Builtin) -> bool {
        matches!(builtin, Builtin::Experts { .. } | Builtin::Subgraph { .. })
    }

    fn prepare(&self, entry: usize) {
        if let Some(graphs) = self.entry_graphs.get(entry) {
            self.graphs.prepare(graphs);
        }
    }

    unsafe fn submit(&self, launch: &Launch<'_>, _thread: PoolThread) {
        let n = launch.n;
        match (launch.code, launch.args) {
            (Code::Builtin(Builtin::Experts { set, rows, k, hidden }), &[x, table, y]) => {
                let (set, hidden) = (set as usize, hidden as usize);
                let experts = self.program.expert_sets[set].capacities.len();
                let layout = DispatchLayout { rows: rows as usize, k: k as usize, experts };
                // SAFETY: the verifier has found `n` rows of each there, aligned, and the results apart from
                // all others. This is the only thread that runs it. The step that wrote the table has ended,
                // and it keeps to the layout.
                let (operands, y) = unsafe {
                    (
                        (
                            std::slice::from_raw_parts(x.of::<f32>(), n * hidden),
                            std::slice::from_raw_parts(table.of::<i32>(), layout.words()),
                        ),
                        std::slice::from_raw_parts_mut(y.of::<f32>(), layout.rows * layout.k * hidden),
                    )
                };
                if let Err(e) = self.experts(set, layout, hidden, operands, y) {
                    launch.fail(StepFault::Unit(e));
                }
            }
            (Code::Builtin(Builtin::Subgraph { subgraph: part }), &[x, ref more @ .., y]) => {
                let part = part as usize;
                let Subgraph { inputs, outputs, attention, .. } = self.program.subgraphs[part];
                let angles = attention.map_or(0, |a| a.angles as usize);
                // SAFETY: as above.
                let floats = |at: Addr, channels: usize| unsafe {
                    std::slice::from_raw_parts(at.of::<f32>(), n * channels)
                };
                // SAFETY: as above.
                let words = |at: Addr| unsafe { std::slice::from_raw_parts(at.of::<i32>(), n) };
                let x = floats(x, inputs as usize);
                let rows = match *more {
                    [at, pos, slots] => {
                        SubgraphRows { x, angles: floats(at, angles), pos: words(pos), slots: words(slots) }
                    }
                    [pos, slots] => SubgraphRows { x, angles: &[], pos: words(pos), slots: words(slots) },
                    _ => SubgraphRows { x, angles: &[], pos: &[], slots: &[] },
                };
                // SAFETY: as above.
                let y = unsafe { std::slice::from_raw_parts_mut(y.of::<f32>(), n * outputs as usize) };
                if let Err(e) = self.part(part, rows, y) {
                    launch.fail(StepFault::Unit(e));
                }
            }
            (Code::Builtin(builtin), _) => {
                launch.fail(StepFault::Unknown(UnknownStep {
                    unit: self.name(),
                    step: launch.step,
                    builtin,
                }));
            }
            (Code::Kernel(_), _) => {
                let why = "a kernel in a unit that runs graphs alone".to_owned();
                launch.fail(StepFault::Unit(Error::plan(why)));
            }
        }
    }
}
