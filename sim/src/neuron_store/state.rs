//! State of a step: its clusters, their reads, and the parts in memory.

use super::compute::{NeuronCompute, Row, Work};
use crate::neurons::{Next, Pipeline, Stage, Task};
use moec_runtime::error::Error;
use moec_runtime::offload::disk::Loaded;
use moec_runtime::offload::neurons::{CacheLookup, Event as CacheEvent, Part, Segmented, Shape};
use std::sync::Arc;

pub(super) const GATE: usize = 0;
pub(super) const UP_DOWN: usize = 1;

/// State of one part of all neurons.
pub(super) struct Side {
    pub(super) cache: Segmented,
    /// Kept bytes, by neuron.
    pub(super) kept: Vec<Option<Arc<Loaded>>>,
    /// Buffers that bypass the cache: number in use, and maximum.
    pub(super) passing: u32,
    pub(super) most: u32,
    /// The task whose reads are being requested.
    pub(super) next_task: Option<Task>,
}

/// A read for a neuron of a cluster.
#[derive(Clone, Copy, Debug)]
pub(super) struct PendingRead {
    pub(super) cluster: u32,
    /// Position among the cluster's rows.
    pub(super) at: usize,
    pub(super) side: usize,
    pub(super) neuron: u32,
    pub(super) keep: bool,
}

/// A cluster in progress.
#[derive(Default)]
pub(super) struct Flow {
    pub(super) place: usize,
    pub(super) matrix: u32,
    pub(super) cluster: u32,
    /// Possibly active neurons, then the active ones, in order.
    pub(super) neurons: Vec<u32>,
    /// Bytes of both parts, by position in `neurons`.
    pub(super) parts: [Vec<Option<Arc<Loaded>>>; 2],
    /// Reads that were not requested yet, the next one last.
    pub(super) reads: Vec<PendingRead>,
    /// Number of reads that have not arrived.
    pub(super) missing: usize,
    /// Number of buffers of each part that bypass the cache.
    pub(super) passing: [u32; 2],
}

pub(super) struct State {
    pub(super) sides: [Side; 2],
    pub(super) pipeline: Pipeline,
    pub(super) flows: Vec<Flow>,
    /// By buffer: the read that fills it.
    pub(super) pending: Vec<Option<PendingRead>>,
    pub(super) under_way: usize,
    /// Threads in [`NeuronStore::work`].
    pub(super) inside: usize,
    pub(super) error: Option<Error>,
}

impl State {
    /// Removes a read that has ended, successfully or not.
    pub(super) fn ended(&mut self, buffer: usize) -> Option<PendingRead> {
        let read = self.pending.get_mut(buffer)?.take()?;
        self.under_way -= 1;
        Some(read)
    }

    /// Handles the arrival of a part of a neuron.
    pub(super) fn arrived(&mut self, buffer: usize, loaded: Loaded) {
        let Some(read) = self.ended(buffer) else { return };
        if self.error.is_some() {
            return;
        }
        let loaded = Arc::new(loaded);
        let flow = &mut self.flows[read.cluster as usize];
        flow.parts[read.side][read.at] = Some(Arc::clone(&loaded));
        flow.missing -= 1;
        if read.keep {
            let side = &mut self.sides[read.side];
            let neurons = side.cache.shape().neurons;
            side.kept[(flow.matrix * neurons + read.neuron) as usize] = Some(loaded);
        }
        if flow.missing == 0 {
            let (stage, next) =
                [(Stage::ReadGate, Stage::Gate), (Stage::ReadUpDown, Stage::UpDown)][read.side];
            self.notify(Task { cluster: read.cluster, stage }, Next::Stage(next));
        }
    }

    /// Records that a thread has computed a stage.
    pub(super) fn computed(&mut self, task: Task, mut flow: Flow, shape: Shape) {
        let next = match task.stage {
            _ if flow.neurons.is_empty() => Next::End,
            Stage::Predict => self.need(task.cluster, &mut flow, GATE),
            Stage::Gate if shape.up_down > 0 => self.need(task.cluster, &mut flow, UP_DOWN),
            Stage::Gate => Next::Stage(Stage::UpDown),
            Stage::ReadGate | Stage::ReadUpDown | Stage::UpDown => Next::End,
        };
        if next == Next::End {
            for (side, passing) in self.sides.iter_mut().zip(flow.passing) {
                side.passing -= passing;
            }
            flow = Flow::default();
        }
        self.flows[task.cluster as usize] = flow;
        self.notify(task, next);
    }

    /// Requests a part of a cluster's neurons from the cache: takes resident ones, and queues reads of the
    /// others.
    fn need(&mut self, cluster: u32, flow: &mut Flow, at_side: usize) -> Next {
        let side = &mut self.sides[at_side];
        let neurons = side.cache.shape().neurons;
        let (read, compute) = [(Stage::ReadGate, Stage::Gate), (Stage::ReadUpDown, Stage::UpDown)][at_side];
        let (matrix, parts) = (flow.matrix, &mut flow.parts[at_side]);
        parts.clear();
        parts.resize(flow.neurons.len(), None);
        for (at, &neuron) in flow.neurons.iter().enumerate() {
            let kept = &mut side.kept;
            let evicted = |event| {
                if let CacheEvent::Evict(id) = event {
                    kept[id as usize] = None;
                }
            };
            let keep = match side.cache.neuron(matrix, neuron, Part::Whole, evicted) {
                Ok(CacheLookup::Hot | CacheLookup::Cold) => {
                    parts[at].clone_from(&side.kept[(matrix * neurons + neuron) as usize]);
                    continue;
                }
                Ok(CacheLookup::Load(_)) => true,
                Ok(CacheLookup::Stream(_)) => false,
                Err(e) => {
                    self.error.get_or_insert(Error::plan(e.to_string()));
                    return Next::End;
                }
            };
            flow.reads.push(PendingRead { cluster, at, side: at_side, neuron, keep });
        }
        // The first neuron is read first.
        flow.reads.reverse();
        flow.missing = flow.reads.len();
        Next::Stage(if flow.missing > 0 { read } else { compute })
    }

    fn notify(&mut self, task: Task, next: Next) {
        if let Err(e) = self.pipeline.done(task, next) {
            self.error.get_or_insert(Error::plan(e.to_string()));
        }
    }
}

/// Computes one stage of a cluster.
pub(super) fn run(flow: &mut Flow, thread: usize, stage: Stage, compute: &dyn NeuronCompute) {
    let work = Work { thread, place: flow.place, matrix: flow.matrix, cluster: flow.cluster };
    match stage {
        Stage::Predict => compute.predict(work, &mut flow.neurons),
        Stage::Gate => {
            let mut active = Vec::with_capacity(flow.neurons.len());
            compute.gate(work, &rows(flow), &mut active);
            // Parts of inactive neurons are dropped now.
            let mut gates = std::mem::take(&mut flow.parts[GATE]);
            let stays = |n: &u32| active.binary_search(n).is_ok();
            let mut kept = flow.neurons.iter().map(stays);
            gates.retain(|_| kept.next().unwrap_or(false));
            flow.parts[GATE] = gates;
            flow.neurons.retain(stays);
        }
        Stage::UpDown => compute.up_down(work, &rows(flow)),
        Stage::ReadGate | Stage::ReadUpDown => {}
    }
}

fn rows(flow: &Flow) -> Vec<Row<'_>> {
    let part = |side: usize, at: usize| {
        let loaded = flow.parts[side].get(at).and_then(Option::as_deref);
        loaded.map_or(&[][..], Loaded::bytes)
    };
    let row = |(at, &neuron)| Row { neuron, gate: part(GATE, at), up_down: part(UP_DOWN, at) };
    flow.neurons.iter().enumerate().map(row).collect()
}
