//! Neurons on flash: a step that computes what is in memory while the rest is read (PowerInfer-2, §4.2 to §4.4).
//!
//! What is kept, read and computed next is decided in [`crate::neurons`]: a cache for each of the two parts of a bundle, and a
//! pipeline over the clusters of a step. The store carries that out: lanes come to [`NeuronStore::work`] and take what is ready,
//! flash reads beside them, and whoever finds nothing to do hears what has come. Arithmetic is that of a [`Compute`].
//!
//! Who computes when depends on the disk; results need not: a cluster's rows are given in order, and whoever sums over clusters
//! does it at the end, in their order.

use crate::error::{Error, Result};
use crate::flash::{BLOCK, Class, Event, Extent, ExtentTable, FileEntry, Flash, Loaded, Priority};
use crate::neurons::{Counts, Event as Told, Found, Next, Order, Part, Pipeline, Regions, Segmented, Shape};
use crate::neurons::{Stage, Task};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// How long a lane waits for news before it looks whether another lane has made something ready.
const NEWS: Duration = Duration::from_micros(200);
const GATE: usize = 0;
const REST: usize = 1;

/// Which cluster is computed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Work {
    /// The lane that computes it.
    pub lane: usize,
    /// Place of the matrix in [`NeuronStore::begin`].
    pub place: usize,
    /// The matrix.
    pub matrix: u32,
    /// Cluster of the matrix.
    pub cluster: u32,
}

/// A neuron with the bytes of its parts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Row<'a> {
    /// The neuron.
    pub neuron: u32,
    /// Its first part.
    pub gate: &'a [u8],
    /// Its second part; empty where a neuron is one read, and before it is read.
    pub rest: &'a [u8],
}

/// The arithmetic of a step. Clusters are computed side by side, each by one lane at a time.
pub trait Compute: Sync {
    /// Pred: takes neurons that cannot be active out of `neurons`, which holds those of the cluster in order.
    fn predict(&self, work: Work, neurons: &mut Vec<u32>) {
        let _ = (work, neurons);
    }

    /// GC: gates of rows. Puts the neurons that are active into `active`, in order.
    fn gate(&self, work: Work, rows: &[Row<'_>], active: &mut Vec<u32>);

    /// UDC: up and down of active rows.
    fn rest(&self, work: Work, rows: &[Row<'_>]);
}

/// Memory for each part, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Memory {
    /// For first parts.
    pub gates: u64,
    /// For second parts.
    pub rests: u64,
}

/// The extents of a file that holds bundles, one behind the other from `offset` on: two for each neuron, or one where
/// [`Shape::rest`] is 0.
///
/// # Errors
/// [`Error::Plan`] for parts that are not whole blocks of [`BLOCK`], or more than the file holds.
pub fn extents(file: FileEntry, offset: u64, shape: Shape) -> Result<ExtentTable> {
    let wrong = |what: &str| Err(Error::Plan(format!("bundles of neurons {what}")));
    if !shape.gate.is_multiple_of(BLOCK) || !shape.rest.is_multiple_of(BLOCK) {
        return wrong("have parts of whole blocks of 4096 bytes");
    }
    let count = u64::from(shape.matrices) * u64::from(shape.neurons);
    let all = shape.gate.checked_add(shape.rest).and_then(|b| b.checked_mul(count));
    if all.and_then(|b| b.checked_add(offset)).is_none_or(|end| end > file.bytes) {
        return wrong("pass the end of their file");
    }
    let mut at = offset;
    let parts = (0..count).flat_map(|_| [shape.gate, shape.rest]).filter(|&bytes| bytes > 0);
    let extent = |bytes| {
        at += bytes;
        Extent { file: 0, offset: at - bytes, bytes, crc32c: None }
    };
    let extents = parts.map(extent).collect();
    ExtentTable::new(vec![file], extents)
}

/// The classes of the buffers that a store reads into: what memory holds, and a cluster of each part that passes through.
pub fn classes(shape: Shape, memory: Memory) -> Vec<Class> {
    let count = u64::from(shape.matrices) * u64::from(shape.neurons);
    let class = |bytes: u64, memory: u64| {
        let kept = memory.checked_div(bytes).unwrap_or(0).min(count);
        let count = u32::try_from(kept + u64::from(shape.cluster)).unwrap_or(u32::MAX);
        (bytes > 0).then_some(Class { bytes, count })
    };
    [class(shape.gate, memory.gates), class(shape.rest, memory.rests)].into_iter().flatten().collect()
}

/// Neurons on flash and in memory.
pub struct NeuronStore {
    flash: Flash,
    shape: Shape,
    state: Mutex<State>,
}

/// One part of all neurons.
struct Side {
    cache: Segmented,
    /// By neuron: what is kept.
    kept: Vec<Option<Arc<Loaded>>>,
    /// Buffers that pass through, and those that may.
    passing: u32,
    most: u32,
    /// The task whose reads are being asked for.
    asking: Option<Task>,
}

/// A read that is needed.
#[derive(Clone, Copy, Debug)]
struct Want {
    cluster: u32,
    /// Place among the cluster's rows.
    at: usize,
    side: usize,
    neuron: u32,
    keep: bool,
}

/// A cluster on its way.
#[derive(Default)]
struct Flow {
    place: usize,
    matrix: u32,
    cluster: u32,
    /// Who may be active, then who is, in order.
    neurons: Vec<u32>,
    /// Bytes of both parts, by place in `neurons`.
    parts: [Vec<Option<Arc<Loaded>>>; 2],
    /// Reads that are not asked for yet, the next one last.
    wants: Vec<Want>,
    /// Reads that have not come.
    missing: usize,
    /// Buffers of each part that only pass through.
    passing: [u32; 2],
}

struct State {
    sides: [Side; 2],
    pipeline: Pipeline,
    flows: Vec<Flow>,
    /// By buffer: whose read fills it.
    pending: Vec<Option<Want>>,
    under_way: usize,
    /// Lanes in [`NeuronStore::work`].
    inside: usize,
    error: Option<Error>,
}

impl NeuronStore {
    /// A store over flash whose table is that of [`extents`] and whose buffers are those of [`classes`].
    ///
    /// # Errors
    /// [`Error::Plan`] for neurons that cannot be numbered, or a table or buffers of other neurons.
    pub fn new(flash: Flash, shape: Shape, memory: Memory) -> Result<Self> {
        let plan = |e: crate::neurons::NeuronError| Error::Plan(e.to_string());
        let side = |bytes: u64, memory: u64| -> Result<Side> {
            let one = Shape { gate: bytes.max(1), rest: 0, ..shape };
            let regions = Regions { fixed: 0, hot: 0, cold: memory };
            let cache = Segmented::new(one, regions).map_err(plan)?;
            let kept = (0..shape.matrices * shape.neurons).map(|_| None).collect();
            Ok(Side { cache, kept, passing: 0, most: shape.cluster, asking: None })
        };
        let sides = [side(shape.gate, memory.gates)?, side(shape.rest, memory.rests)?];
        let per = 1 + usize::from(shape.rest > 0);
        let needed: u64 = classes(shape, memory).iter().map(|c| u64::from(c.count)).sum();
        if flash.table().extents().len() != per * sides[GATE].kept.len()
            || (flash.buffers().len() as u64) < needed
        {
            return Err(Error::Plan(
                "the table or the buffers of flash are those of other neurons".to_owned(),
            ));
        }
        let state = State {
            sides,
            pipeline: Pipeline::new(Order::Cluster, &[]).map_err(plan)?,
            flows: Vec::new(),
            pending: vec![None; flash.buffers().len()],
            under_way: 0,
            inside: 0,
            error: None,
        };
        Ok(Self { flash, shape, state: Mutex::new(state) })
    }

    /// A step begins over these matrices, each at most once. All lanes then come to [`NeuronStore::work`].
    ///
    /// # Errors
    /// A matrix that is not there or comes twice; the step before has not ended.
    pub fn begin(&self, matrices: &[u32]) -> Result<()> {
        let mut guard = self.lock();
        let state = &mut *guard;
        if state.inside > 0 || (state.error.is_none() && state.pipeline.unfinished() > 0) {
            return Err(Error::Plan("a step of neurons begins before the last one has ended".to_owned()));
        }
        if state.error.is_some() {
            self.recover(state);
        }
        let mut seen = vec![false; self.shape.matrices as usize];
        for &matrix in matrices {
            if seen.get_mut(matrix as usize).is_none_or(|s| std::mem::replace(s, true)) {
                return Err(Error::Plan(format!("matrix {matrix} is not there or comes twice")));
            }
        }
        state.flows.clear();
        for (place, &matrix) in matrices.iter().enumerate() {
            for cluster in 0..self.shape.clusters() {
                let first = cluster * self.shape.cluster;
                let neurons = (first..self.shape.neurons.min(first + self.shape.cluster)).collect();
                state.flows.push(Flow { place, matrix, cluster, neurons, ..Flow::default() });
            }
        }
        let first: Vec<_> =
            state.flows.iter().map(|f| (f.place as u32, Next::Stage(Stage::Predict))).collect();
        state.pipeline = Pipeline::new(Order::Cluster, &first).map_err(|e| Error::Plan(e.to_string()))?;
        for side in &mut state.sides {
            side.cache.begin();
        }
        Ok(())
    }

    /// A lane's share of the step: returns when all of it is computed.
    ///
    /// # Errors
    /// [`Error::Flash`] for what cannot be read. All lanes get it, and the next step begins with empty memory.
    pub fn work(&self, lane: usize, compute: &dyn Compute) -> Result<()> {
        self.lock().inside += 1;
        let result = self.share(lane, compute);
        self.lock().inside -= 1;
        result
    }

    fn share(&self, lane: usize, compute: &dyn Compute) -> Result<()> {
        loop {
            let mut guard = self.lock();
            let state = &mut *guard;
            self.hear(state);
            self.ask(state);
            if let Some(error) = &state.error {
                return Err(again(error));
            }
            if let Some(task) = state.pipeline.compute() {
                let mut flow = std::mem::take(&mut state.flows[task.cluster as usize]);
                drop(guard);
                run(&mut flow, lane, task.stage, compute);
                let mut guard = self.lock();
                guard.computed(task, flow, self.shape);
            } else if state.pipeline.unfinished() == 0 {
                return Ok(());
            } else {
                drop(guard);
                self.flash.news(Some(NEWS));
            }
        }
    }

    /// What was asked of first and second parts.
    pub fn counts(&self) -> [Counts; 2] {
        self.lock().sides.each_ref().map(|s| s.cache.neurons())
    }

    /// The reader.
    pub fn flash(&self) -> &Flash {
        &self.flash
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What flash has to tell.
    fn hear(&self, state: &mut State) {
        while let Some(event) = self.flash.poll() {
            match event {
                Event::Done { ticket, loaded } => state.arrived(ticket.buffer(), loaded),
                Event::Failed { ticket, error } => {
                    state.ended(ticket.buffer());
                    state.error.get_or_insert(Error::Flash(Box::new(error)));
                }
                Event::Cancelled { ticket } => {
                    state.ended(ticket.buffer());
                }
                Event::Arrived { .. } | Event::Released { .. } => {}
            }
        }
    }

    /// Asks for what clusters need, gates first, as long as there are buffers.
    fn ask(&self, state: &mut State) {
        for (side, stage) in [(GATE, Stage::ReadGate), (REST, Stage::ReadRest)] {
            while state.error.is_none() {
                if state.sides[side].asking.is_none() {
                    state.sides[side].asking = state.pipeline.next_of(stage);
                }
                let Some(task) = state.sides[side].asking else { break };
                let Some(want) = state.flows[task.cluster as usize].wants.pop() else {
                    state.sides[side].asking = None;
                    continue;
                };
                if !self.submit(state, want) {
                    state.flows[task.cluster as usize].wants.push(want);
                    break;
                }
            }
        }
    }

    /// Asks for one read; whether there was room.
    fn submit(&self, state: &mut State, want: Want) -> bool {
        let matrix = state.flows[want.cluster as usize].matrix;
        let side = &mut state.sides[want.side];
        let bytes = [self.shape.gate, self.shape.rest][want.side];
        if !want.keep && side.passing == side.most {
            return false;
        }
        let Some(buffer) = self.flash.buffers().take(bytes) else { return false };
        let per = 1 + u32::from(self.shape.rest > 0);
        let extent = (matrix * self.shape.neurons + want.neuron) * per + want.side as u32;
        match self.flash.submit(extent, 1, Priority::Demand, buffer) {
            Ok(ticket) => {
                side.passing += u32::from(!want.keep);
                state.flows[want.cluster as usize].passing[want.side] += u32::from(!want.keep);
                state.pending[ticket.buffer()] = Some(want);
                state.under_way += 1;
            }
            Err(error) => state.error = Some(error),
        }
        true
    }

    /// After an error: waits for what is still read, and forgets everything.
    fn recover(&self, state: &mut State) {
        while state.under_way > 0 {
            self.flash.news(Some(NEWS));
            self.hear(state);
        }
        for side in &mut state.sides {
            side.cache.clear();
            side.kept.fill(None);
            (side.passing, side.asking) = (0, None);
        }
        state.flows.clear();
        state.error = None;
    }
}

impl State {
    /// A read has ended, well or not.
    fn ended(&mut self, buffer: usize) -> Option<Want> {
        let want = self.pending.get_mut(buffer)?.take()?;
        self.under_way -= 1;
        Some(want)
    }

    /// A part of a neuron has come.
    fn arrived(&mut self, buffer: usize, loaded: Loaded) {
        let Some(want) = self.ended(buffer) else { return };
        if self.error.is_some() {
            return;
        }
        let loaded = Arc::new(loaded);
        let flow = &mut self.flows[want.cluster as usize];
        flow.parts[want.side][want.at] = Some(Arc::clone(&loaded));
        flow.missing -= 1;
        if want.keep {
            let side = &mut self.sides[want.side];
            let neurons = side.cache.shape().neurons;
            side.kept[(flow.matrix * neurons + want.neuron) as usize] = Some(loaded);
        }
        if flow.missing == 0 {
            let (stage, next) = [(Stage::ReadGate, Stage::Gate), (Stage::ReadRest, Stage::Rest)][want.side];
            self.tell(Task { cluster: want.cluster, stage }, Next::Stage(next));
        }
    }

    /// A lane has computed a stage.
    fn computed(&mut self, task: Task, mut flow: Flow, shape: Shape) {
        let next = match task.stage {
            _ if flow.neurons.is_empty() => Next::End,
            Stage::Predict => self.need(task.cluster, &mut flow, GATE),
            Stage::Gate if shape.rest > 0 => self.need(task.cluster, &mut flow, REST),
            Stage::Gate => Next::Stage(Stage::Rest),
            Stage::ReadGate | Stage::ReadRest | Stage::Rest => Next::End,
        };
        if next == Next::End {
            for (side, passing) in self.sides.iter_mut().zip(flow.passing) {
                side.passing -= passing;
            }
            flow = Flow::default();
        }
        self.flows[task.cluster as usize] = flow;
        self.tell(task, next);
    }

    /// Asks the cache for a part of a cluster's neurons: what it holds is taken, and what it lacks will be read.
    fn need(&mut self, cluster: u32, flow: &mut Flow, at_side: usize) -> Next {
        let side = &mut self.sides[at_side];
        let neurons = side.cache.shape().neurons;
        let (read, compute) = [(Stage::ReadGate, Stage::Gate), (Stage::ReadRest, Stage::Rest)][at_side];
        let (matrix, parts) = (flow.matrix, &mut flow.parts[at_side]);
        parts.clear();
        parts.resize(flow.neurons.len(), None);
        for (at, &neuron) in flow.neurons.iter().enumerate() {
            let kept = &mut side.kept;
            let gone = |told| {
                if let Told::Evict(id) = told {
                    kept[id as usize] = None;
                }
            };
            let keep = match side.cache.neuron(matrix, neuron, Part::Whole, gone) {
                Ok(Found::Hot | Found::Cold) => {
                    parts[at].clone_from(&side.kept[(matrix * neurons + neuron) as usize]);
                    continue;
                }
                Ok(Found::Load(_)) => true,
                Ok(Found::Stream(_)) => false,
                Err(e) => {
                    self.error.get_or_insert(Error::Plan(e.to_string()));
                    return Next::End;
                }
            };
            flow.wants.push(Want { cluster, at, side: at_side, neuron, keep });
        }
        // The first neuron is read first.
        flow.wants.reverse();
        flow.missing = flow.wants.len();
        Next::Stage(if flow.missing > 0 { read } else { compute })
    }

    fn tell(&mut self, task: Task, next: Next) {
        if let Err(e) = self.pipeline.done(task, next) {
            self.error.get_or_insert(Error::Plan(e.to_string()));
        }
    }
}

/// One stage of a cluster.
fn run(flow: &mut Flow, lane: usize, stage: Stage, compute: &dyn Compute) {
    let work = Work { lane, place: flow.place, matrix: flow.matrix, cluster: flow.cluster };
    match stage {
        Stage::Predict => compute.predict(work, &mut flow.neurons),
        Stage::Gate => {
            let mut active = Vec::with_capacity(flow.neurons.len());
            compute.gate(work, &rows(flow), &mut active);
            // Parts of those that are not active go now.
            let mut gates = std::mem::take(&mut flow.parts[GATE]);
            let stays = |n: &u32| active.binary_search(n).is_ok();
            let mut kept = flow.neurons.iter().map(stays);
            gates.retain(|_| kept.next().unwrap_or(false));
            flow.parts[GATE] = gates;
            flow.neurons.retain(stays);
        }
        Stage::Rest => compute.rest(work, &rows(flow)),
        Stage::ReadGate | Stage::ReadRest => {}
    }
}

fn rows(flow: &Flow) -> Vec<Row<'_>> {
    let part = |side: usize, at: usize| {
        let loaded = flow.parts[side].get(at).and_then(Option::as_deref);
        loaded.map_or(&[][..], Loaded::bytes)
    };
    let row = |(at, &neuron)| Row { neuron, gate: part(GATE, at), rest: part(REST, at) };
    flow.neurons.iter().enumerate().map(row).collect()
}

/// The same error, for another lane.
fn again(error: &Error) -> Error {
    match error {
        Error::Flash(e) => Error::Flash(e.clone()),
        other => Error::Plan(other.to_string()),
    }
}
