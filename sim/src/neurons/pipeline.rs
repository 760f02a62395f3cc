//! Scheduling of the five stages of neuron clusters, computed by several workers while one reads
//! (PowerInfer-2, §4.3).
//!
//! A cluster goes through Pred, GIO, GC, UDIO and UDC in this order, without stages that it does not need:
//! resident rows are not read, inactive clusters end early. With [`Order::Cluster`] a cluster waits for no
//! other: a free thread takes any ready cluster of any matrix. With [`Order::Matrix`] (Figure 6a) a matrix
//! begins when all clusters of the one before it have ended; gate is one matrix, up and down are the next.
//!
//! Bundles execute neurons on disk in this order, too (`moec_runtime`'s pager of neurons): gates first, then what
//! follows them. There up and down are two tasks, and down of a cluster waits for that of the cluster before it, so
//! that sums have one order; here both are one, and the caller adds them up.
//!
//! This module only decides. The caller reports ended tasks and the next need of their clusters
//! ([`Pipeline::done`]), and takes new tasks ([`Pipeline::compute`], [`Pipeline::read`]). Time is the
//! caller's.

use super::error::NeuronError;
use std::collections::VecDeque;

/// Stage of a cluster, in order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Stage {
    /// Pred: predicts which of its neurons may be active.
    Predict,
    /// GIO: gate rows are read.
    ReadGate,
    /// GC: gate rows times the input.
    Gate,
    /// UDIO: up and down of the active ones are read.
    ReadUpDown,
    /// UDC: up, then down with its result.
    UpDown,
}

impl Stage {
    /// All stages, in order.
    pub const ALL: [Self; 5] = [Self::Predict, Self::ReadGate, Self::Gate, Self::ReadUpDown, Self::UpDown];

    /// Whether it reads; the others compute.
    pub fn reads(self) -> bool {
        matches!(self, Self::ReadGate | Self::ReadUpDown)
    }

    /// Whether it belongs to the first matrix, the gate; the others belong to up and down.
    fn of_gate(self) -> bool {
        self <= Self::Gate
    }
}

/// Whether matrices wait for each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Order {
    /// No: clusters go their own ways (Figure 6b).
    Cluster,
    /// Yes: one matrix after the other (Figure 6a).
    Matrix,
}

/// A stage of a cluster.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Task {
    /// The cluster, by its position among those of [`Pipeline::new`].
    pub cluster: u32,
    /// The stage.
    pub stage: Stage,
}

/// Next need of a cluster.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Next {
    /// This stage.
    Stage(Stage),
    /// Nothing; the cluster has ended.
    End,
}

/// Clusters in progress through one block of a layer: an FFN, or all experts that a step routes to.
#[derive(Clone, Debug)]
pub struct Pipeline {
    order: Order,
    /// The block of every cluster, an expert for instance: its two matrices are one after the other in
    /// [`Order::Matrix`].
    blocks: Vec<u32>,
    /// Next or current stage of each cluster; `None` at its end.
    stages: Vec<Option<Stage>>,
    running: Vec<bool>,
    /// Tasks that are ready, one queue for each stage.
    ready: [VecDeque<u32>; 5],
    /// For [`Order::Matrix`]: the number of clusters that each matrix still waits for, and the open matrix.
    left: Vec<u32>,
    open: usize,
    /// Clusters whose next stage belongs to a matrix that is not open.
    waiting: Vec<Vec<u32>>,
    unfinished: usize,
}

/// Most blocks of clusters.
const MOST_BLOCKS: u32 = 1 << 16;

impl Pipeline {
    /// Creates a pipeline of clusters, each with its block and its first need. Blocks are numbered in the
    /// order in which [`Order::Matrix`] takes them.
    ///
    /// # Errors
    /// [`NeuronError::Pipeline`] for a block past 2¹⁶, or more clusters than 32 bits can number.
    pub fn new(order: Order, clusters: &[(u32, Next)]) -> Result<Self, NeuronError> {
        let wrong = |cluster, what: String| NeuronError::Pipeline { cluster, what };
        if u32::try_from(clusters.len()).is_err() {
            return Err(wrong(u32::MAX, "there are more clusters than 32 bits can number".to_owned()));
        }
        if let Some(at) = clusters.iter().position(|c| c.0 >= MOST_BLOCKS) {
            return Err(wrong(at as u32, format!("block {} is past {MOST_BLOCKS}", clusters[at].0)));
        }
        let matrices = clusters.iter().map(|c| 2 * c.0 as usize + 2).max().unwrap_or(0);
        let mut pipeline = Self {
            order,
            blocks: clusters.iter().map(|c| c.0).collect(),
            stages: vec![None; clusters.len()],
            running: vec![false; clusters.len()],
            ready: Default::default(),
            left: vec![0; matrices],
            open: 0,
            waiting: vec![Vec::new(); matrices],
            unfinished: 0,
        };
        for &(block, next) in clusters {
            // A cluster that begins with the second matrix has ended the first.
            if let Next::Stage(stage) = next {
                pipeline.left[2 * block as usize] += u32::from(stage.of_gate());
                pipeline.left[2 * block as usize + 1] += 1;
            }
        }
        pipeline.advance();
        for (cluster, &(_, next)) in clusters.iter().enumerate() {
            if let Next::Stage(stage) = next {
                pipeline.unfinished += 1;
                pipeline.enter(cluster as u32, stage);
            }
        }
        Ok(pipeline)
    }

    /// Next task of a computing worker; `None` while nothing is ready. First stages that may cause reads, so
    /// that the disk has work, then stages that end a cluster.
    pub fn compute(&mut self) -> Option<Task> {
        self.take(&[Stage::Predict, Stage::Gate, Stage::UpDown])
    }

    /// Next task of the reading worker; `None` while nothing is ready. Gates first, since more reads depend
    /// on them.
    pub fn read(&mut self) -> Option<Task> {
        self.take(&[Stage::ReadGate, Stage::ReadUpDown])
    }

    /// Next task of one stage alone: for callers with a worker of its own for it.
    pub fn next_of(&mut self, stage: Stage) -> Option<Task> {
        self.take(&[stage])
    }

    /// Records that a task has ended, and that its cluster now needs `next`.
    ///
    /// # Errors
    /// [`NeuronError::Pipeline`] for a task that was not taken, or a stage that is not after it.
    pub fn done(&mut self, task: Task, next: Next) -> Result<(), NeuronError> {
        let Task { cluster, stage } = task;
        let at = cluster as usize;
        let wrong = |what: String| Err(NeuronError::Pipeline { cluster, what });
        if self.running.get(at) != Some(&true) || self.stages[at] != Some(stage) {
            return wrong(format!("{stage:?} has ended, which was not begun"));
        }
        if let Next::Stage(next) = next
            && next <= stage
        {
            return wrong(format!("{next:?} cannot follow {stage:?}"));
        }
        self.running[at] = false;
        self.stages[at] = None;
        let block = self.blocks[at] as usize;
        match next {
            Next::Stage(next) => {
                if stage.of_gate() && !next.of_gate() {
                    self.leave(2 * block);
                }
                self.enter(cluster, next);
            }
            Next::End => {
                self.unfinished -= 1;
                if stage.of_gate() {
                    self.leave(2 * block);
                }
                self.leave(2 * block + 1);
            }
        }
        Ok(())
    }

    /// Clusters that have not ended.
    pub fn unfinished(&self) -> usize {
        self.unfinished
    }

    fn take(&mut self, stages: &[Stage]) -> Option<Task> {
        stages.iter().find_map(|&stage| {
            let cluster = self.ready[stage as usize].pop_front()?;
            self.running[cluster as usize] = true;
            Some(Task { cluster, stage })
        })
    }

    /// Moves a cluster to a stage; it waits if its matrix is not open.
    fn enter(&mut self, cluster: u32, stage: Stage) {
        let at = cluster as usize;
        self.stages[at] = Some(stage);
        let matrix = 2 * self.blocks[at] as usize + usize::from(!stage.of_gate());
        if self.order == Order::Matrix && matrix > self.open {
            self.waiting[matrix].push(cluster);
        } else {
            self.ready[stage as usize].push_back(cluster);
        }
    }

    /// Counts one cluster less that a matrix waits for.
    fn leave(&mut self, matrix: usize) {
        self.left[matrix] -= 1;
        self.advance();
    }

    /// Opens the first matrix that still waits for clusters.
    fn advance(&mut self) {
        while self.order == Order::Matrix && self.left.get(self.open) == Some(&0) {
            self.open += 1;
            let Some(waiting) = self.waiting.get_mut(self.open) else { return };
            for cluster in std::mem::take(waiting) {
                if let Some(stage) = self.stages[cluster as usize] {
                    self.ready[stage as usize].push_back(cluster);
                }
            }
        }
    }
}
