//! Tasks of a model: the work of the units for a prompt and for the tokens after it, with the costs of a
//! device.
//!
//! A layer is norm, attention or another mixer, residual; norm, router, gather, experts, scatter, residual
//! (NPUMoE, §3.1 and Table 4). Matrix products cost what the device's table has; all other tasks move bytes.
//! A launch takes the CPU for its dispatch, then the NPU, and its result is available after one
//! synchronisation. Launches of one layer are divided among the queues of the NPU, with the rates of its device
//! file; one queue launches them one after the other, as in NPUMoE's Table 4. Meanwhile the CPU computes the
//! cold experts, one after the other.

use super::constants::Constants;
use super::model::{Model, ModelLayer, Moe};
use super::timeline::{Queue, Task, TaskKind};
use super::units::Units;
use moec_ir::placement::{ExpertGroup, ExpertTable};

/// Bytes of a number of an activation.
const F16: u64 = 2;

/// One call of a model.
#[derive(Clone, Copy, Debug)]
pub struct Call<'a> {
    /// Index of the call.
    pub call: u32,
    /// Rows of the static shapes: the chunk in prompts, sequences in decoding.
    pub rows: u32,
    /// Positions that attention reads: static shapes read the whole cache.
    pub context: u32,
    /// Tokens that chose each expert, by MoE layer.
    pub loads: &'a [Vec<u32>],
    /// True if logits are computed.
    pub head: bool,
}

/// Units of a call.
#[derive(Clone, Copy, Debug)]
pub struct CallUnits<'a> {
    /// Attention.
    pub attention: Queue,
    /// Dense and shared networks.
    pub dense: Queue,
    /// Groups and units, by MoE layer; `None`: every expert on the CPU.
    pub tables: Option<&'a [ExpertTable]>,
    /// Batch of the entry point, if it decodes.
    pub batch: Option<u32>,
    /// True if graphs stay on the NPU.
    pub resident: bool,
}

impl CallUnits<'_> {
    /// Groups that run on the NPU, with their indices.
    pub fn graphs<'t>(
        &self,
        table: &'t ExpertTable,
        units: &Units<'_>,
    ) -> impl Iterator<Item = (usize, &'t ExpertGroup)> {
        let (batch, npu) = (self.batch, units.npu_index());
        table.groups.iter().enumerate().filter(move |(_, g)| g.unit_in(batch) == npu)
    }
}

/// Builds tasks.
#[derive(Debug)]
pub struct Work<'a> {
    units: &'a Units<'a>,
    model: &'a Model,
    constants: Constants,
    tasks: Vec<Task>,
    /// Task that the next one waits for.
    last: Option<usize>,
    call: u32,
    layer: u32,
    rows: u32,
}

impl<'a> Work<'a> {
    /// An empty builder.
    pub fn new(model: &'a Model, units: &'a Units<'a>, constants: Constants) -> Self {
        Self { units, model, constants, tasks: Vec::new(), last: None, call: 0, layer: 0, rows: 0 }
    }

    /// The tasks.
    pub fn tasks(self) -> Vec<Task> {
        self.tasks
    }

    /// Adds a call after the existing ones.
    pub fn add(&mut self, call: &Call<'_>, place: &CallUnits<'_>) {
        (self.call, self.rows) = (call.call, call.rows);
        let model = self.model;
        let mut moe = 0;
        for layer in &model.layers {
            self.layer = layer.layer;
            self.add_row_traffic(TaskKind::Norm, 2, u64::from(call.rows));
            let numbers = (layer.attention + layer.per_position * u64::from(call.context)) as f64;
            if numbers > 0.0 {
                self.matrices(TaskKind::Attention, numbers, place.attention);
            }
            if layer.mixer > 0 {
                // No graph holds a state that accumulates over tokens.
                self.matrices(TaskKind::Mixer, layer.mixer as f64, Queue::Cpu);
            }
            self.add_row_traffic(TaskKind::Residual, 3, u64::from(call.rows));
            self.add_row_traffic(TaskKind::Norm, 2, u64::from(call.rows));
            if layer.dense > 0 {
                self.matrices(TaskKind::Dense, layer.dense as f64, place.dense);
            }
            if let Some(experts) = layer.experts {
                let loads = call.loads.get(moe).map_or(&[][..], Vec::as_slice);
                self.experts(layer, experts, loads, moe, place);
                moe += 1;
            }
            self.add_row_traffic(TaskKind::Residual, 3, u64::from(call.rows));
        }
        if call.head {
            let us = self.units.cpu.matmul_us(1.0, model.head as f64).unwrap_or(0.0);
            self.rows = 1;
            self.then(Queue::Cpu, TaskKind::Head, TaskKind::Head, us);
        }
    }

    /// Adds a task that waits for `after`.
    fn push(&mut self, queue: Queue, what: TaskKind, part: TaskKind, us: f64, after: Vec<usize>) -> usize {
        self.push_on(queue.of(self.units), what, part, us, after)
    }

    /// As [`Work::push`], on a queue by its index.
    fn push_on(&mut self, queue: usize, what: TaskKind, part: TaskKind, us: f64, after: Vec<usize>) -> usize {
        let (layer, call, rows) = (self.layer, self.call, self.rows);
        let task = Task { queue, kind: what, part, us, lag_us: 0.0, after, layer, call, index: None, rows };
        self.tasks.push(task);
        self.tasks.len() - 1
    }

    /// Adds a task after all existing ones and before all later ones.
    fn then(&mut self, queue: Queue, what: TaskKind, part: TaskKind, us: f64) {
        let after = self.last.into_iter().collect();
        self.last = Some(self.push(queue, what, part, us, after));
    }

    /// Adds the time on the CPU of reading and writing rows of the residual stream, `times` times in all.
    fn add_row_traffic(&mut self, what: TaskKind, times: u64, rows: u64) {
        let bytes = rows * self.model.hidden * F16 * times;
        let us = bytes as f64 * 1e-3 / self.constants.copy_gb_per_s;
        self.then(Queue::Cpu, what, what, us);
    }

    /// Adds the matrix products of all rows.
    fn matrices(&mut self, part: TaskKind, numbers: f64, queue: Queue) {
        let rows = f64::from(self.rows);
        match queue {
            Queue::Cpu => {
                let us = self.units.cpu.matmul_us(rows, numbers).unwrap_or(0.0);
                // Decoding is bound by reading weights on any unit.
                let share = if self.rows > 1 { self.constants.attention_on_cpu } else { 1.0 };
                self.then(Queue::Cpu, part, part, us * share);
            }
            Queue::Npu => {
                let us = self.units.npu.matmul_us(rows, numbers).unwrap_or(0.0);
                let after = self.last.into_iter().collect();
                let queue = Queue::Npu.of(self.units);
                self.last = Some(self.launch(queue, part, us, 0.0, after));
            }
        }
    }

    /// Adds the launch of a graph on a queue: dispatch, load, computation. Dependent tasks wait for one more
    /// synchronisation.
    fn launch(&mut self, queue: usize, part: TaskKind, us: f64, load_us: f64, after: Vec<usize>) -> usize {
        let figure = |f: &Option<moec_device::Figure>| f.as_ref().map_or(0.0, |f| f.value);
        let dispatch = figure(&self.units.npu.dispatch_cost_us) + load_us * self.constants.load_on_cpu;
        let mut at = self.push(Queue::Cpu, TaskKind::Launch, part, dispatch, after);
        if load_us > 0.0 {
            let rest = load_us * (1.0 - self.constants.load_on_cpu);
            at = self.push_on(queue, TaskKind::Load, part, rest, vec![at]);
        }
        let at = self.push_on(queue, part, part, us, vec![at]);
        self.tasks[at].lag_us = figure(&self.units.npu.sync_cost_us);
        at
    }

    /// Adds router, gather, experts and scatter.
    fn experts(&mut self, layer: &ModelLayer, moe: Moe, loads: &[u32], index: usize, place: &CallUnits<'_>) {
        let table = place.tables.and_then(|t| t.get(index));
        let us = self.units.cpu.matmul_us(f64::from(self.rows), layer.router as f64).unwrap_or(0.0);
        self.then(Queue::Cpu, TaskKind::Router, TaskKind::Router, us);
        let load = |e: usize| loads.get(e).copied().unwrap_or(0);
        let graphs: Vec<(usize, u32, &[u32])> = table.map_or(Vec::new(), |t| {
            let hot = place.graphs(t, self.units);
            let busy = hot.filter(|(_, g)| g.experts.iter().any(|&e| load(e as usize) > 0));
            let most = |g: &ExpertGroup| g.experts.iter().map(|&e| load(e as usize)).max().unwrap_or(0);
            let rows = |g: &ExpertGroup| g.rows(most(g), t.tiers.get(g.tier as usize).copied().unwrap_or(0));
            busy.map(|(i, g)| (i, rows(g), &*g.experts)).collect()
        });
        // Tokens with room on the NPU, tokens that run on the CPU, and padding.
        let (mut hot, mut padding) = (0_u64, 0_u64);
        let mut cold: Vec<u32> = loads.to_vec();
        for &(_, capacity, experts) in &graphs {
            for &e in experts {
                let n = load(e as usize);
                let room = n.min(capacity);
                hot += u64::from(room);
                padding += u64::from(capacity - room);
                let spills =
                    table.and_then(|t| t.experts.get(e as usize)).is_some_and(|r| r.fallback.is_some());
                if let Some(rest) = cold.get_mut(e as usize) {
                    *rest = if spills { n - room } else { 0 };
                }
            }
        }
        let kept = hot + cold.iter().map(|&n| u64::from(n)).sum::<u64>();
        if kept == 0 {
            return;
        }
        self.add_row_traffic(TaskKind::Gather, 2, kept);
        if padding > 0 {
            self.add_row_traffic(TaskKind::Pad, 1, padding);
        }
        let start: Vec<usize> = self.last.into_iter().collect();
        let all = self.rows;
        // Graphs that are loaded for each launch run one after the other.
        let mut queues = self.units.npu_queues();
        queues.truncate(if place.resident { graphs.len() } else { 1 });
        // The last launch of each queue.
        let mut before = vec![start.clone(); queues.len()];
        for (i, &(index, capacity, experts)) in graphs.iter().enumerate() {
            let at = i % queues.len();
            let numbers = moe.size.weights as f64;
            let each = self.units.npu.matmul_us(f64::from(capacity), numbers).unwrap_or(0.0);
            let us = each * experts.len() as f64;
            let us = match queues.len() {
                1 => us,
                n => self.units.npu.parallel_us(n as u32, graphs.len() as u32, us),
            };
            let bytes = moe.size.bytes * experts.len() as u64;
            let load_us =
                if place.resident { 0.0 } else { bytes as f64 * 1e-3 / self.constants.load_gb_per_s };
            self.rows = capacity.saturating_mul(experts.len() as u32);
            let first = self.tasks.len();
            let launched =
                self.launch(queues[at], TaskKind::Experts, us, load_us, std::mem::take(&mut before[at]));
            self.tasks[first..].iter_mut().for_each(|t| t.index = Some(index as u32));
            before[at] = vec![launched];
        }
        let mut ends = before.concat();
        let cpu = self.units.cpu;
        let cost = |n: u32| cpu.matmul_us(f64::from(n), moe.size.weights as f64).unwrap_or(0.0);
        if graphs.is_empty() {
            // No task comes between: one task is sufficient for all.
            let us = cold.iter().map(|&n| cost(n)).sum();
            self.rows = cold.iter().sum();
            ends.push(self.push(Queue::Cpu, TaskKind::Experts, TaskKind::Experts, us, start));
        } else {
            for (e, &n) in cold.iter().enumerate().filter(|(_, n)| **n > 0) {
                self.rows = n;
                let at = self.push(Queue::Cpu, TaskKind::Experts, TaskKind::Experts, cost(n), start.clone());
                self.tasks[at].index = Some(e as u32);
                ends.push(at);
            }
        }
        self.rows = all;
        let bytes = kept * self.model.hidden * F16 * 3;
        let us = bytes as f64 * 1e-3 / self.constants.copy_gb_per_s;
        self.last = Some(self.push(Queue::Cpu, TaskKind::Scatter, TaskKind::Scatter, us, ends));
    }
}
