//! The feed-forward part of a layer in virtual time: the NPU has its dense clusters, cores have the others,
//! one core reads. [`Pipeline`] decides what each core does next; here it only takes time, and memory is
//! shared.

use super::phone::Memory;
use moec_sim::neurons::{NeuronError, Next, Order, Pipeline, Stage, Task};

/// Neurons that go through the stages together.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Group {
    /// By [`Stage`]: bytes that a core reads of memory, seconds of UFS. 0: the stage is not needed.
    pub stages: [f64; 5],
}

impl Group {
    fn next(&self, after: Option<Stage>) -> Next {
        let mut later = Stage::ALL.into_iter().filter(|&s| after.is_none_or(|a| s > a));
        later.find(|&s| self.stages[s as usize] > 0.0).map_or(Next::End, Next::Stage)
    }

    /// Seconds of UFS.
    pub fn reads(&self) -> f64 {
        Stage::ALL.into_iter().filter(|s| s.reads()).map(|s| self.stages[s as usize]).sum()
    }

    /// The same with everything in memory.
    #[must_use]
    pub fn held(mut self) -> Self {
        for stage in Stage::ALL.into_iter().filter(|s| s.reads()) {
            self.stages[stage as usize] = 0.0;
        }
        self
    }
}

/// Work of a block.
#[derive(Clone, Debug, PartialEq)]
pub struct Block {
    /// Bytes that the NPU reads.
    pub npu: f64,
    /// Groups that cores compute.
    pub groups: Vec<Group>,
    /// Part of the cores' bytes that comes from memory; the others represent multiply-adds
    /// ([`Memory::rates`]).
    pub density: f64,
}

/// Times, in seconds.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Times {
    /// All of it.
    pub all: f64,
    /// No unit computed, and UFS was read.
    pub exposed: f64,
    /// UFS was read.
    pub reading: f64,
    /// A core computed, and the NPU did not.
    pub cpu: f64,
    /// The NPU computed, and no core did.
    pub npu: f64,
    /// Both did.
    pub both: f64,
}

impl std::ops::AddAssign for Times {
    fn add_assign(&mut self, other: Self) {
        self.all += other.all;
        self.exposed += other.exposed;
        self.reading += other.reading;
        self.cpu += other.cpu;
        self.npu += other.npu;
        self.both += other.both;
    }
}

impl Times {
    /// Every time so many times.
    #[must_use]
    pub fn times(self, n: f64) -> Self {
        Self {
            all: self.all * n,
            exposed: self.exposed * n,
            reading: self.reading * n,
            cpu: self.cpu * n,
            npu: self.npu * n,
            both: self.both * n,
        }
    }
}

impl Block {
    /// Runs it. `workers` are the cores that compute, by their part of the CPU's rate; without an order
    /// nothing is computed while UFS is read.
    ///
    /// # Errors
    /// [`NeuronError::Pipeline`] for no workers.
    pub fn run(&self, memory: &Memory, workers: &[f64], order: Option<Order>) -> Result<Times, NeuronError> {
        if workers.is_empty() {
            return Err(NeuronError::Pipeline { cluster: 0, what: "no core computes it".to_owned() });
        }
        let Some(order) = order else {
            let held = self.groups.iter().map(|g| g.held()).collect();
            let mut times = Self { npu: self.npu, groups: held, density: self.density }.run(
                memory,
                workers,
                Some(Order::Cluster),
            )?;
            let reads: f64 = self.groups.iter().map(Group::reads).sum();
            times += Times { all: reads, exposed: reads, reading: reads, ..Times::default() };
            return Ok(times);
        };
        let first: Vec<_> = self.groups.iter().map(|g| (0, g.next(None))).collect();
        let mut lanes = BlockRun {
            block: self,
            memory,
            workers,
            pipeline: Pipeline::new(order, &first)?,
            cores: vec![None; workers.len()],
            reader: None,
            npu: self.npu,
            times: Times::default(),
        };
        while lanes.step()? {}
        Ok(lanes.times)
    }
}

/// A task with its remaining work.
type RunningTask = Option<(Task, f64)>;

struct BlockRun<'a> {
    block: &'a Block,
    memory: &'a Memory,
    workers: &'a [f64],
    pipeline: Pipeline,
    cores: Vec<RunningTask>,
    reader: RunningTask,
    npu: f64,
    times: Times,
}

impl BlockRun<'_> {
    fn started(&self, task: Task) -> (Task, f64) {
        (task, self.block.groups[task.cluster as usize].stages[task.stage as usize])
    }

    /// Starts ready tasks, and advances to the next end of a task; `false` if no task is left.
    fn step(&mut self) -> Result<bool, NeuronError> {
        for core in 0..self.cores.len() {
            if self.cores[core].is_none()
                && let Some(task) = self.pipeline.compute()
            {
                self.cores[core] = Some(self.started(task));
            }
        }
        if self.reader.is_none()
            && let Some(task) = self.pipeline.read()
        {
            self.reader = Some(self.started(task));
        }
        let part: f64 =
            self.cores.iter().zip(self.workers).filter(|c| c.0.is_some()).map(|(_, part)| part).sum();
        let (cpu, npu) = self.memory.rates(part, self.block.density, self.npu > 0.0);
        // Seconds until each ends.
        let of_core = |core: &RunningTask, worker: f64| core.map(|(_, left)| left * part / (cpu * worker));
        let ends = self.cores.iter().zip(self.workers).filter_map(|(c, &w)| of_core(c, w));
        let others = self.reader.map(|r| r.1).into_iter().chain((self.npu > 0.0).then(|| self.npu / npu));
        let passed = ends.chain(others).fold(f64::INFINITY, f64::min);
        if !passed.is_finite() {
            return Ok(false);
        }
        self.count(passed, part > 0.0);
        // Tasks that end within a billionth of this moment end now, so that rounding does not prolong them.
        let over = passed * (1.0 + 1e-9);
        let mut ended = Vec::new();
        for (core, &worker) in self.cores.iter_mut().zip(self.workers) {
            if of_core(core, worker).is_some_and(|seconds| seconds <= over) {
                ended.extend(core.take().map(|c| c.0));
            } else if let Some((_, left)) = core {
                *left -= passed * cpu * worker / part;
            }
        }
        match &mut self.reader {
            Some((task, left)) if *left <= over => {
                ended.push(*task);
                self.reader = None;
            }
            Some((_, left)) => *left -= passed,
            None => {}
        }
        self.npu = if self.npu <= npu * over { 0.0 } else { self.npu - npu * passed };
        for task in ended {
            let next = self.block.groups[task.cluster as usize].next(Some(task.stage));
            self.pipeline.done(task, next)?;
        }
        Ok(true)
    }

    fn count(&mut self, passed: f64, cores: bool) {
        let times = &mut self.times;
        times.all += passed;
        times.reading += if self.reader.is_some() { passed } else { 0.0 };
        let of = match (cores, self.npu > 0.0) {
            (true, true) => &mut times.both,
            (true, false) => &mut times.cpu,
            (false, true) => &mut times.npu,
            (false, false) => &mut times.exposed,
        };
        *of += passed;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MEMORY: Memory = Memory { cpu: 4.0, npu: 6.0, both: 8.0 };

    fn group(predict: f64, io: f64, compute: f64) -> Group {
        Group { stages: [predict, io, compute, io, compute] }
    }

    #[test]
    fn reads_overlap_computation_only_with_an_order() {
        let block =
            Block { npu: 0.0, density: 1.0, groups: vec![group(0.0, 0.0, 4.0), group(0.0, 1.0, 1.0)] };
        let run = |order| block.run(&MEMORY, &[0.5, 0.5], order).expect("times");
        let (alone, overlapped) = (run(None), run(Some(Order::Cluster)));
        // Eight bytes in sequence at two per second, after two seconds of UFS.
        assert!((alone.all - 6.0).abs() < 1e-9 && (alone.exposed - 2.0).abs() < 1e-9, "{alone:?}");
        assert!((overlapped.reading - 2.0).abs() < 1e-9 && overlapped.exposed == 0.0, "{overlapped:?}");
        assert!((overlapped.all - 4.0).abs() < 1e-9);
    }

    #[test]
    fn units_share_bandwidth_until_one_finishes() {
        // Together they read 8 per second, of which the unit gets 4.8. The unit ends after 1 second; the
        // cores have then done 3.2 of 7.2.
        let block =
            Block { npu: 4.8, density: 1.0, groups: vec![Group { stages: [0.0, 0.0, 7.2, 0.0, 0.0] }] };
        let times = block.run(&MEMORY, &[1.0], Some(Order::Cluster)).expect("times");
        assert!((times.both - 1.0).abs() < 1e-9 && (times.cpu - 1.0).abs() < 1e-9, "{times:?}");
        assert!((times.all - 2.0).abs() < 1e-9 && times.npu == 0.0);
        assert!(block.run(&MEMORY, &[], None).is_err());
        let nothing =
            Block { npu: 0.0, density: 1.0, groups: Vec::new() }.run(&MEMORY, &[1.0], None).expect("times");
        assert_eq!(nothing, Times::default());
    }

    #[test]
    fn a_barrier_between_matrices_is_never_faster() {
        let groups: Vec<Group> =
            (0..8).map(|i| group(0.1, if i % 2 == 0 { 2.0 } else { 0.0 }, 1.0)).collect();
        let block = Block { npu: 3.0, density: 1.0, groups };
        let run = |order| block.run(&MEMORY, &[0.25; 4], Some(order)).expect("times");
        let (cluster, matrix) = (run(Order::Cluster), run(Order::Matrix));
        assert!(cluster.all < matrix.all && cluster.exposed <= matrix.exposed + 1e-9);
        let sum = |t: Times| t.cpu + t.npu + t.both + t.exposed;
        assert!((sum(cluster) - cluster.all).abs() < 1e-9 && (sum(matrix) - matrix.all).abs() < 1e-9);
    }
}
