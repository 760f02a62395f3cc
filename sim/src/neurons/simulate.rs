//! Simulation of the pipeline in virtual time: several computing workers, one that reads, and a duration for
//! each stage.

use super::error::NeuronError;
use super::pipeline::{Next, Order, Pipeline, Stage, Task};
use std::cmp::Reverse;
use std::collections::BinaryHeap;

/// A cluster with the time of each stage, in nanoseconds; `None` for a stage that it does not need.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Job {
    /// Block that it belongs to, an expert for instance ([`Pipeline::new`]).
    pub block: u32,
    /// By [`Stage`].
    pub stages: [Option<u64>; 5],
}

impl Job {
    /// Need after a stage; the first need for `None`.
    fn next(&self, after: Option<Stage>) -> Next {
        let behind = Stage::ALL.into_iter().filter(|&s| after.is_none_or(|a| s > a));
        let mut needed = behind.filter(|&s| self.stages[s as usize].is_some());
        needed.next().map_or(Next::End, Next::Stage)
    }
}

/// Work of one worker.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Span {
    /// 0 for the one that reads, then those that compute.
    pub worker: usize,
    /// Its task.
    pub task: Task,
    /// Start, in nanoseconds.
    pub from: u64,
    /// End, in nanoseconds.
    pub to: u64,
}

/// Times of a run, in nanoseconds.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Outcome {
    /// From the beginning to the end of the last cluster.
    pub makespan: u64,
    /// Time of all computing workers together.
    pub computing: u64,
    /// Time of the reading worker.
    pub reading: u64,
    /// Time without computation while the disk was read: the share of reading in the critical path (Table 4).
    pub exposed: u64,
    /// Idle time of all computing workers together, up to the end.
    pub bubbles: u64,
    /// Work of all workers, by its end.
    pub spans: Vec<Span>,
}

impl Outcome {
    /// Share of the time in which all threads wait for the disk.
    pub fn io_share(&self) -> f64 {
        if self.makespan == 0 { 0.0 } else { self.exposed as f64 / self.makespan as f64 }
    }
}

/// Runs clusters on `workers` computing workers and one that reads.
///
/// # Errors
/// [`NeuronError::Pipeline`] for no workers, and errors of [`Pipeline::new`].
pub fn simulate(jobs: &[Job], workers: usize, order: Order) -> Result<Outcome, NeuronError> {
    if workers == 0 {
        return Err(NeuronError::Pipeline {
            cluster: 0,
            what: "there is no worker to compute it".to_owned(),
        });
    }
    let first: Vec<_> = jobs.iter().map(|j| (j.block, j.next(None))).collect();
    let mut pipeline = Pipeline::new(order, &first)?;
    let mut idle: Vec<usize> = (1..=workers).rev().collect();
    let mut reader_idle = true;
    let mut running = BinaryHeap::new();
    let (mut now, mut started) = (0_u64, 0_u64);
    let mut out = Outcome::default();
    loop {
        while !idle.is_empty()
            && let Some(task) = pipeline.compute()
            && let Some(worker) = idle.pop()
        {
            begin(jobs, &mut running, &mut started, now, worker, task);
        }
        if reader_idle && let Some(task) = pipeline.read() {
            reader_idle = false;
            begin(jobs, &mut running, &mut started, now, 0, task);
        }
        let Some(Reverse((end, _, worker, task, from))) = running.pop() else { break };
        if idle.len() == workers {
            out.exposed += end - now;
        }
        now = end;
        out.spans.push(Span { worker, task, from, to: end });
        if worker == 0 {
            reader_idle = true;
            out.reading += end - from;
        } else {
            idle.push(worker);
            out.computing = out.computing.saturating_add(end - from);
        }
        pipeline.done(task, jobs[task.cluster as usize].next(Some(task.stage)))?;
    }
    out.makespan = now;
    out.bubbles = now.saturating_mul(workers as u64).saturating_sub(out.computing);
    Ok(out)
}

/// A running task: end, order of begin, worker, task, begin.
type Running = Reverse<(u64, u64, usize, Task, u64)>;

fn begin(
    jobs: &[Job],
    running: &mut BinaryHeap<Running>,
    started: &mut u64,
    now: u64,
    worker: usize,
    task: Task,
) {
    let takes = jobs[task.cluster as usize].stages[task.stage as usize].unwrap_or(0);
    *started += 1;
    running.push(Reverse((now.saturating_add(takes), *started, worker, task, now)));
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Figure 6: eight clusters, every other one on disk, whose reads take as long as the figure's longest
    /// computation.
    fn figure_6() -> Vec<Job> {
        let job = |i: usize| {
            let io = (i >= 4).then_some(20);
            Job { block: 0, stages: [None, io, Some(10), io, Some(10)] }
        };
        (0..8).map(job).collect()
    }

    #[test]
    fn without_a_barrier_the_reads_of_both_matrices_are_one_stream() {
        let [matrix, cluster] = [Order::Matrix, Order::Cluster].map(|o| simulate(&figure_6(), 4, o).unwrap());
        // Each matrix: 80 of reading and the computation of the last cluster.
        assert_eq!((matrix.makespan, matrix.reading), (180, 160));
        // 160 of reading, and the computation of the last cluster.
        assert_eq!((cluster.makespan, cluster.reading), (170, 160));
        assert_eq!(cluster.computing, matrix.computing);
        assert!(cluster.bubbles < matrix.bubbles);
        assert!(cluster.exposed <= matrix.exposed && cluster.io_share() < 1.0);
    }

    #[test]
    fn resident_clusters_are_computed_during_disk_reads() {
        // One worker. In the first block one cluster is on disk, in the second all are in memory.
        let jobs = [
            Job { block: 0, stages: [None, Some(40), Some(10), None, Some(10)] },
            Job { block: 1, stages: [Some(5), None, Some(15), None, Some(20)] },
        ];
        assert_eq!(simulate(&jobs, 1, Order::Matrix).unwrap().makespan, 100);
        assert_eq!(simulate(&jobs, 1, Order::Cluster).unwrap().makespan, 60);
    }

    #[test]
    fn no_workers_is_an_error_and_no_jobs_take_no_time() {
        assert!(simulate(&figure_6(), 0, Order::Cluster).is_err());
        assert_eq!(simulate(&[], 1, Order::Matrix).unwrap(), Outcome::default());
        assert_eq!(simulate(&[Job::default()], 1, Order::Matrix).unwrap().makespan, 0);
    }

    #[test]
    fn pipeline_rejects_impossible_completions() {
        let mut p = Pipeline::new(Order::Cluster, &[(0, Next::Stage(Stage::Gate)), (0, Next::End)]).unwrap();
        let task = Task { cluster: 0, stage: Stage::Gate };
        assert!(p.done(task, Next::End).is_err());
        assert_eq!((p.read(), p.compute(), p.compute()), (None, Some(task), None));
        assert!(p.done(task, Next::Stage(Stage::ReadGate)).is_err());
        assert!(p.done(Task { cluster: 7, ..task }, Next::End).is_err());
        p.done(task, Next::Stage(Stage::ReadUpDown)).unwrap();
        assert_eq!((p.unfinished(), p.compute()), (1, None));
        let task = p.read().unwrap();
        p.done(task, Next::End).unwrap();
        assert_eq!(p.unfinished(), 0);
        assert!(Pipeline::new(Order::Matrix, &[(u32::MAX, Next::End)]).is_err());
    }

    fn job() -> impl Strategy<Value = Job> {
        let stage = || prop_oneof![Just(None), (0..20_u64).prop_map(Some)];
        (0..3_u32, [stage(), stage(), stage(), stage(), stage()])
            .prop_map(|(block, stages)| Job { block, stages })
    }

    proptest! {
        #[test]
        fn every_stage_runs_once_in_order_on_its_kind_of_worker(
            jobs in proptest::collection::vec(job(), 0..14), workers in 1..4_usize, matrix: bool
        ) {
            let order = if matrix { Order::Matrix } else { Order::Cluster };
            let out = simulate(&jobs, workers, order).unwrap();
            let total = |reads| -> u64 {
                let of = |j: &Job| Stage::ALL.into_iter().filter(|s| s.reads() == reads).filter_map(|s| j.stages[s as usize]).sum::<u64>();
                jobs.iter().map(of).sum()
            };
            prop_assert_eq!((out.reading, out.computing), (total(true), total(false)));
            prop_assert!(out.makespan >= out.reading && out.makespan * workers as u64 >= out.computing);
            prop_assert!(out.makespan <= out.reading + out.computing);
            for (i, job) in jobs.iter().enumerate() {
                let own: Vec<_> = out.spans.iter().filter(|s| s.task.cluster == i as u32).collect();
                let stages: Vec<_> = own.iter().map(|s| s.task.stage).collect();
                let needed: Vec<_> = Stage::ALL.into_iter().filter(|&s| job.stages[s as usize].is_some()).collect();
                prop_assert_eq!(stages, needed);
                prop_assert!(own.windows(2).all(|w| w[0].to <= w[1].from));
                prop_assert!(own.iter().all(|s| (s.worker == 0) == s.task.stage.reads()));
            }
            for worker in 0..=workers {
                let mut own: Vec<_> = out.spans.iter().filter(|s| s.worker == worker).collect();
                own.sort_by_key(|s| (s.from, s.to));
                prop_assert!(own.windows(2).all(|w| w[0].to <= w[1].from));
            }
            if matrix {
                let of = |s: &Span| (jobs[s.task.cluster as usize].block, s.task.stage > Stage::Gate);
                for a in &out.spans {
                    prop_assert!(out.spans.iter().all(|b| of(a) >= of(b) || a.to <= b.from));
                }
            }
        }
    }
}
