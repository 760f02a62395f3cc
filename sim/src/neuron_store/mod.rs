//! Neurons on disk: a step that computes what is in memory while the rest is read (PowerInfer-2, §4.2 to
//! §4.4).
//!
//! [`crate::neurons`] decides what is kept, read and computed next: with a cache for each of the two parts of
//! a bundle, and a pipeline over the clusters of a step. The store carries that out: threads call
//! [`NeuronStore::work`] and take ready clusters, the disk reads in parallel, and idle threads handle
//! completed reads. A [`NeuronCompute`] does the arithmetic.
//!
//! The order of computation depends on the disk, but results need not. A cluster's rows are passed in order,
//! and a caller that sums over clusters does so at the end, in their order.

mod compute;
mod layout;
mod state;

pub use compute::{NeuronCompute, Row, Work};
pub use layout::{Memory, classes, extents};

use crate::neurons::{NeuronError, Next, Order, Pipeline, Stage};
use moec_runtime::error::{Error, Result};
use moec_runtime::offload::disk::{Disk, Event, Priority, ThreadedDisk};
use moec_runtime::offload::neurons::{Counts, Regions, Segmented, Shape};
use state::{Flow, GATE, PendingRead, Side, State, UP_DOWN, run};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// Time that a thread waits for events before it looks whether another thread has made something ready.
const POLL_INTERVAL: Duration = Duration::from_micros(200);

/// Neurons on disk and in memory.
pub struct NeuronStore {
    disk: ThreadedDisk,
    shape: Shape,
    state: Mutex<State>,
}

impl NeuronStore {
    /// Creates a store over a disk whose table is that of [`extents`] and whose buffers are those of
    /// [`classes`].
    ///
    /// # Errors
    /// [`Error::Bundle`] for neurons that cannot be numbered, or a table or buffers of other neurons.
    pub fn new(disk: ThreadedDisk, shape: Shape, memory: Memory) -> Result<Self> {
        let plan = |e: NeuronError| Error::plan(e.to_string());
        let side = |bytes: u64, memory: u64| -> Result<Side> {
            let one = Shape { gate: bytes.max(1), up_down: 0, ..shape };
            let regions = Regions { fixed: 0, hot: 0, cold: memory };
            let cache = Segmented::new(one, regions).map_err(|e| plan(e.into()))?;
            let kept = (0..shape.matrices * shape.neurons).map(|_| None).collect();
            Ok(Side { cache, kept, passing: 0, most: shape.cluster, next_task: None })
        };
        let sides = [side(shape.gate, memory.gates)?, side(shape.up_down, memory.up_down)?];
        let per = 1 + usize::from(shape.up_down > 0);
        let needed: u64 = classes(shape, memory).iter().map(|c| u64::from(c.count)).sum();
        if disk.queue().table().extents().len() != per * sides[GATE].kept.len()
            || (disk.buffers().len() as u64) < needed
        {
            return Err(Error::plan("the table or the buffers of the disk are those of other neurons"));
        }
        let state = State {
            sides,
            pipeline: Pipeline::new(Order::Cluster, &[]).map_err(plan)?,
            flows: Vec::new(),
            pending: vec![None; disk.buffers().len()],
            under_way: 0,
            inside: 0,
            error: None,
        };
        Ok(Self { disk, shape, state: Mutex::new(state) })
    }

    /// Begins a step over these matrices, each at most once. All threads then call [`NeuronStore::work`].
    ///
    /// # Errors
    /// A matrix that does not exist or is listed twice; the step before has not ended.
    pub fn begin(&self, matrices: &[u32]) -> Result<()> {
        let mut guard = self.lock();
        let state = &mut *guard;
        if state.inside > 0 || (state.error.is_none() && state.pipeline.unfinished() > 0) {
            return Err(Error::plan("a step of neurons begins before the last one has ended"));
        }
        if state.error.is_some() {
            self.recover(state);
        }
        let mut seen = vec![false; self.shape.matrices as usize];
        for &matrix in matrices {
            if seen.get_mut(matrix as usize).is_none_or(|s| std::mem::replace(s, true)) {
                return Err(Error::plan(format!("matrix {matrix} is not there or comes twice")));
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
        state.pipeline = Pipeline::new(Order::Cluster, &first).map_err(Error::plan)?;
        for side in &mut state.sides {
            side.cache.begin();
        }
        Ok(())
    }

    /// A thread's share of the step: returns when all of it is computed.
    ///
    /// # Errors
    /// [`Error::Read`] if a read fails. All threads get it, and the next step begins with empty memory.
    pub fn work(&self, thread: usize, compute: &dyn NeuronCompute) -> Result<()> {
        self.lock().inside += 1;
        let result = self.share(thread, compute);
        self.lock().inside -= 1;
        result
    }

    fn share(&self, thread: usize, compute: &dyn NeuronCompute) -> Result<()> {
        loop {
            let mut guard = self.lock();
            let state = &mut *guard;
            self.handle_disk_events(state);
            self.request(state);
            if let Some(error) = &state.error {
                return Err(again(error));
            }
            if let Some(task) = state.pipeline.compute() {
                let mut flow = std::mem::take(&mut state.flows[task.cluster as usize]);
                drop(guard);
                run(&mut flow, thread, task.stage, compute);
                let mut guard = self.lock();
                guard.computed(task, flow, self.shape);
            } else if state.pipeline.unfinished() == 0 {
                return Ok(());
            } else {
                drop(guard);
                self.disk.wait_for_event(Some(POLL_INTERVAL));
            }
        }
    }

    /// Counts of requests for first and second parts.
    pub fn counts(&self) -> [Counts; 2] {
        self.lock().sides.each_ref().map(|s| s.cache.neurons())
    }

    /// The reader.
    pub fn disk(&self) -> &ThreadedDisk {
        &self.disk
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Handles events of the disk.
    fn handle_disk_events(&self, state: &mut State) {
        while let Some(event) = self.disk.poll() {
            match event {
                Event::Done { ticket, loaded } => state.arrived(ticket.buffer(), loaded),
                Event::Failed { ticket, error } => {
                    state.ended(ticket.buffer());
                    state.error.get_or_insert(Error::Read(Box::new(error)));
                }
                Event::Cancelled { ticket } => {
                    state.ended(ticket.buffer());
                }
                Event::Arrived { .. } | Event::Released { .. } => {}
            }
        }
    }

    /// Requests what clusters need, gates first, as long as there are buffers.
    fn request(&self, state: &mut State) {
        for (side, stage) in [(GATE, Stage::ReadGate), (UP_DOWN, Stage::ReadUpDown)] {
            while state.error.is_none() {
                if state.sides[side].next_task.is_none() {
                    state.sides[side].next_task = state.pipeline.next_of(stage);
                }
                let Some(task) = state.sides[side].next_task else { break };
                let Some(read) = state.flows[task.cluster as usize].reads.pop() else {
                    state.sides[side].next_task = None;
                    continue;
                };
                if !self.submit(state, read) {
                    state.flows[task.cluster as usize].reads.push(read);
                    break;
                }
            }
        }
    }

    /// Requests one read; returns whether there was room.
    fn submit(&self, state: &mut State, read: PendingRead) -> bool {
        let matrix = state.flows[read.cluster as usize].matrix;
        let side = &mut state.sides[read.side];
        let bytes = [self.shape.gate, self.shape.up_down][read.side];
        if !read.keep && side.passing == side.most {
            return false;
        }
        let Some(buffer) = self.disk.buffers().take(bytes) else { return false };
        let per = 1 + u32::from(self.shape.up_down > 0);
        let extent = (matrix * self.shape.neurons + read.neuron) * per + read.side as u32;
        match self.disk.submit(extent, 1, Priority::Demand, buffer) {
            Ok(ticket) => {
                side.passing += u32::from(!read.keep);
                state.flows[read.cluster as usize].passing[read.side] += u32::from(!read.keep);
                state.pending[ticket.buffer()] = Some(read);
                state.under_way += 1;
            }
            Err(error) => state.error = Some(error),
        }
        true
    }

    /// Recovers from an error: waits for reads in flight, and forgets everything.
    fn recover(&self, state: &mut State) {
        while state.under_way > 0 {
            self.disk.wait_for_event(Some(POLL_INTERVAL));
            self.handle_disk_events(state);
        }
        for side in &mut state.sides {
            side.cache.clear();
            side.kept.fill(None);
            (side.passing, side.next_task) = (0, None);
        }
        state.flows.clear();
        state.error = None;
    }
}

/// A copy of an error, for another thread.
fn again(error: &Error) -> Error {
    match error {
        Error::Read(e) => Error::Read(e.clone()),
        other => Error::Bundle(other.to_string()),
    }
}
