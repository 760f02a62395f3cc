//! Unit that executes static graphs: copies rows to them and back (NPUMoE, §3.2 and §4.2).
//!
//! The CPU routes and decides which rows are within capacity ([`crate::exec::capacity_limit`]). For
//! [`Builtin::Experts`] the unit packs the rows of each group expert by expert, padded to their capacities.
//! It then runs the graphs, as many at a time as the unit has queues ([`crate::exec::graph_queues`]), and
//! unpacks the results. For [`Builtin::Subgraph`] it runs the graphs of a subgraph. It has its own thread, so
//! the CPU computes its experts while graphs run.

use crate::bundle::program::{Code, Program};
use crate::error::{Error, Result};
use crate::exec::capacity_limit::{SetCounters, lock};
use crate::exec::chunk;
use crate::exec::graph_queues::{GraphQueues, LaunchBuffers, Launches};
use crate::exec::graphs::{Graphs, LoadCounts, f16};
use crate::exec::overflow::OverflowCounters;
use crate::exec::unit::{ComputeUnit, Launch, PoolThread, StepFault, UnknownStep};
use crate::platform::memory::Addr;
use half::slice::HalfFloatSliceExt;
use moec_ir::op::DispatchLayout;
use moec_ir::plan::{Builtin, GraphGroup, Subgraph};
use std::ops::Range;
use std::sync::{Arc, Mutex};

/// A unit that executes static graphs, on rows in the CPU's memory.
pub(crate) struct GraphUnit<'p> {
    program: &'p Program,
    queues: GraphQueues,
    /// By entry point, the graphs that its steps run, each once, in their order.
    entry_graphs: Vec<Vec<usize>>,
    counters: Arc<SetCounters>,
    work: Mutex<Work>,
}

/// Memory that is used again from call to call.
#[derive(Default)]
struct Work {
    positions: Vec<u32>,
    /// Inputs and outputs of a subgraph.
    tensors: Vec<Vec<f16>>,
}

impl<'p> GraphUnit<'p> {
    /// Executor for a program whose graphs are loaded, with that many queues.
    ///
    /// # Errors
    /// As [`GraphQueues::new`].
    pub(crate) fn new(
        program: &'p Program,
        graphs: Box<dyn Graphs>,
        counters: Arc<SetCounters>,
        queues: u32,
    ) -> Result<Self> {
        let graphs_of = |entry| program.graphs_of(entry).into_iter().map(|graph| graph as usize).collect();
        let entry_graphs = program.entries.iter().map(graphs_of).collect();
        // No step has more launches than its set has graphs.
        let launches = program.expert_sets.iter().map(|set| graphs_of_set(&set.groups).count());
        let queues = (queues as usize).min(launches.max().unwrap_or(1));
        let queues = GraphQueues::new(graphs, queues)?;
        Ok(Self { program, queues, entry_graphs, counters, work: Mutex::default() })
    }

    /// Runs the graphs of a set. `x` is `[rows, hidden]`, `y` is `[rows · k, hidden]`, in the order of the
    /// table's slots. Results of clusters of hot neurons are added in `y`, in f32.
    fn experts(
        &self,
        set: usize,
        layout: DispatchLayout,
        hidden: usize,
        (x, table): (&[f32], &[i32]),
        y: &mut [f32],
    ) -> Result<()> {
        let mut rows = ExpertRows { layout, hidden, x, table, y, set, launches: Vec::new(), adds: false };
        let mut counters = OverflowCounters::default();
        // Clusters of hot neurons come one after the other, since their results are added in order.
        for (i, groups) in self.program.expert_sets[set].addends().enumerate() {
            rows.adds = i > 0;
            rows.launches.clear();
            for sizes in graphs_of_set(groups) {
                rows.launches.extend(rows.launch(sizes));
            }
            self.queues.run(&mut rows)?;
            for group in rows.launches.iter().filter(|_| i == 0) {
                counters.executed(group.capacity, rows.kept(group));
            }
        }
        self.counters.add(set, &counters);
        Ok(())
    }
}

/// The graphs of a set, each with its sizes: groups with the same experts, the largest last.
fn graphs_of_set(groups: &[GraphGroup]) -> impl Iterator<Item = &[GraphGroup]> {
    groups.chunk_by(|a, b| a.experts == b.experts)
}

/// Rows of a step's experts, and the graphs that take them.
struct ExpertRows<'a> {
    layout: DispatchLayout,
    hidden: usize,
    /// `[rows, hidden]`
    x: &'a [f32],
    table: &'a [i32],
    /// `[rows · k, hidden]`, in the order of the table's slots.
    y: &'a mut [f32],
    /// Index of the set.
    set: usize,
    launches: Vec<&'a GraphGroup>,
    /// Whether results are added to `y`.
    adds: bool,
}

impl<'a> ExpertRows<'a> {
    /// A number of the table, inside of the buffer even if the table is wrong.
    fn word(&self, i: usize, end: usize) -> usize {
        usize::try_from(self.table[i]).unwrap_or(0).min(end)
    }

    /// Slots of an expert within a capacity; `None` if no row has chosen it.
    fn slots(&self, e: u32, capacity: usize) -> Option<Range<usize>> {
        let (layout, most) = (self.layout, self.layout.rows * self.layout.k);
        let active = self.word(0, layout.experts);
        let at = self.table[layout.expert()..][..active].iter().position(|&id| id == e as i32)?;
        let [first, end] = [0, 1].map(|i| self.word(layout.start() + at + i, most));
        Some(first..end.min(first + capacity))
    }

    /// The size of a graph that holds its rows; `None` if it has no rows.
    fn launch(&self, sizes: &'a [GraphGroup]) -> Option<&'a GraphGroup> {
        let largest = sizes.last()?;
        let most = self.kept(largest).max().filter(|&rows| rows > 0)?;
        Some(sizes.iter().find(|g| g.capacity >= most).unwrap_or(largest))
    }

    /// Rows of each expert of a group.
    fn kept(&self, group: &GraphGroup) -> impl Iterator<Item = u32> {
        let capacity = group.capacity as usize;
        group.experts.iter().map(move |&e| self.slots(e, capacity).map_or(0, |s| s.len() as u32))
    }

    /// For each expert of a group with rows: its first row in the graph, and its slots.
    fn places(&self, group: &GraphGroup) -> impl Iterator<Item = (usize, Range<usize>)> {
        let capacity = group.capacity as usize;
        let experts = group.experts.iter().enumerate();
        experts.filter_map(move |(i, &e)| Some((i * capacity, self.slots(e, capacity)?)))
    }
}

impl Launches for ExpertRows<'_> {
    fn count(&self) -> usize {
        self.launches.len()
    }

    fn fill(&mut self, launch: usize, LaunchBuffers { x: packed, y }: &mut LaunchBuffers) -> Result<u32> {
        let (group, hidden) = (self.launches[launch], self.hidden);
        let rows = self.x.len() / hidden.max(1);
        packed.clear();
        packed.resize(group.experts.len() * group.capacity as usize * hidden, f16::ZERO);
        y.clear();
        y.resize(packed.len(), f16::ZERO);
        for (place, slots) in self.places(group) {
            for (row, slot) in (place..).zip(slots) {
                let token = self.word(self.layout.token() + slot, rows.saturating_sub(1));
                let row = &mut packed[row * hidden..][..hidden];
                row.convert_from_f32_slice(&self.x[token * hidden..][..hidden]);
                if row.iter().any(|h| !h.is_finite()) {
                    let why = "a row holds a number past 65504, which f16 does not hold".to_owned();
                    return Err(Error::graph(format!("experts of set {}", self.set), why));
                }
            }
        }
        Ok(group.graph)
    }

    fn take(&mut self, launch: usize, buffers: &LaunchBuffers) {
        let (group, hidden) = (self.launches[launch], self.hidden);
        let places: Vec<_> = self.places(group).collect();
        for (place, slots) in places {
            for (row, slot) in (place..).zip(slots) {
                let (from, to) =
                    (&buffers.y[row * hidden..][..hidden], &mut self.y[slot * hidden..][..hidden]);
                if self.adds {
                    to.iter_mut().zip(from).for_each(|(sum, y)| *sum += y.to_f32());
                } else {
                    from.convert_to_f32_slice(to);
                }
            }
        }
    }
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
            self.queues.graphs().run(g as usize, slot, &given, &mut results)?;
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
        self.queues.graphs().name()
    }

    fn executes(&self, builtin: Builtin) -> bool {
        matches!(builtin, Builtin::Experts { .. } | Builtin::Subgraph { .. })
    }

    fn prepare(&self, entry: usize, memory: Option<u64>) {
        if let Some(graphs) = self.entry_graphs.get(entry) {
            self.queues.graphs().prepare(graphs, memory);
        }
    }

    fn loads(&self) -> LoadCounts {
        self.queues.graphs().loads()
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
