//! An event-driven timeline of queues, each of which executes one task at a time. A device has one for every
//! unit and every link.
//!
//! A task waits for its dependencies and for its queue. A free queue takes the ready task that was submitted
//! first. Equal tasks give bitwise equal timelines.

use super::units::Units;
use moec_device::{Device, DeviceUnit};
use std::cmp::Reverse;
use std::collections::{BTreeSet, BinaryHeap};

/// The queues between which a placement chooses.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Queue {
    /// The CPU.
    Cpu,
    /// The neural processing unit.
    Npu,
}

impl Queue {
    /// Index of the queue in a device.
    pub fn of(self, units: &Units<'_>) -> usize {
        let index = match self {
            Self::Cpu => units.cpu_index(),
            Self::Npu => units.npu_index(),
        };
        index as usize
    }
}

/// Names of a device's queues: its units, its links, then the further queues of units that have several.
pub fn queues(device: &Device) -> Vec<String> {
    let units = device.units.iter().map(|u| u.name.clone());
    let links = device.links.iter().map(|l| format!("{} → {}", l.from, l.to));
    let further = |u: &DeviceUnit| {
        let name = u.name.clone();
        (2..=u.queues()).map(move |n| format!("{name}, queue {n}"))
    };
    units.chain(links).chain(device.units.iter().flat_map(further)).collect()
}

/// Queues of a unit, by index into [`queues`].
pub fn queues_of(device: &Device, unit: usize) -> Vec<usize> {
    let count = |u: &DeviceUnit| u.queues() as usize - 1;
    let before: usize = device.units.iter().take(unit).map(count).sum();
    let first = device.units.len() + device.links.len() + before;
    let further = device.units.get(unit).map_or(0, count);
    [unit].into_iter().chain(first..first + further).collect()
}

/// Kind of a task; most are rows of NPUMoE's Table 4.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum TaskKind {
    /// Norms before attention and of the experts.
    Norm,
    /// Projections, scores, values.
    Attention,
    /// Projections of another mixer of tokens.
    Mixer,
    /// Dense and shared feed-forward networks.
    Dense,
    /// Router logits and top-k.
    Router,
    /// Moving rows to the experts' buffers.
    Gather,
    /// Zeros after the rows.
    Pad,
    /// Dispatch of a graph to the NPU, by the CPU.
    Launch,
    /// Loading a graph that does not stay resident onto the NPU.
    Load,
    /// Experts.
    Experts,
    /// Adding weighted rows to their tokens.
    Scatter,
    /// The residual addition.
    Residual,
    /// The output matrix.
    Head,
    /// Everything between the experts of two layers.
    Between,
    /// Waiting for an expert.
    Wait,
    /// An expert read from disk.
    Read,
    /// An expert read from disk before it was requested.
    ReadAhead,
}

impl TaskKind {
    /// Name in timelines.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Norm => "norm",
            Self::Attention => "attention",
            Self::Mixer => "mixer",
            Self::Dense => "dense",
            Self::Router => "router",
            Self::Gather => "gather",
            Self::Pad => "pad",
            Self::Launch => "launch",
            Self::Load => "load",
            Self::Experts => "experts",
            Self::Scatter => "scatter",
            Self::Residual => "residual",
            Self::Head => "head",
            Self::Between => "between",
            Self::Wait => "wait",
            Self::Read => "read",
            Self::ReadAhead => "read ahead",
        }
    }
}

/// A task.
#[derive(Clone, Debug, PartialEq)]
pub struct Task {
    /// Queue, by index.
    pub queue: usize,
    /// Kind.
    pub kind: TaskKind,
    /// Part that the task works for: launches of experts and of attention differ here.
    pub part: TaskKind,
    /// Duration, in microseconds.
    pub us: f64,
    /// Additional wait of dependent tasks, in microseconds: the queue is free meanwhile.
    pub lag_us: f64,
    /// Dependencies, by index; all smaller than the task's own.
    pub after: Vec<usize>,
    /// Layer.
    pub layer: u32,
    /// Call of the model: chunks of the prompt, then decoded tokens.
    pub call: u32,
    /// Graph or expert of the layer, if there are several.
    pub index: Option<u32>,
    /// Rows that it computes.
    pub rows: u32,
}

/// Time of a task.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Span {
    /// Start, in microseconds.
    pub start: f64,
    /// End.
    pub end: f64,
}

/// Tasks and their times.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Timeline {
    /// Names of the queues.
    pub queues: Vec<String>,
    /// The tasks.
    pub tasks: Vec<Task>,
    /// Time of each task.
    pub spans: Vec<Span>,
    /// Time of the last result, in microseconds.
    pub wall_us: f64,
}

/// An instant, in an order that a heap can keep.
#[derive(Clone, Copy, Debug, PartialEq)]
struct TaskTime(f64);

impl Eq for TaskTime {}

impl PartialOrd for TaskTime {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for TaskTime {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        self.0.total_cmp(&other.0)
    }
}

/// Event of a task.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Event {
    Ended(usize),
    Ready(usize),
}

impl Timeline {
    /// Executes tasks on queues of these names, one name for each queue index of the tasks.
    pub fn of(tasks: Vec<Task>, queues: Vec<String>) -> Self {
        let mut readers: Vec<Vec<usize>> = vec![Vec::new(); tasks.len()];
        let mut missing: Vec<usize> = vec![0; tasks.len()];
        let mut events: BinaryHeap<Reverse<(TaskTime, Event)>> = BinaryHeap::new();
        for (i, task) in tasks.iter().enumerate() {
            for &before in task.after.iter().filter(|&&b| b < i) {
                readers[before].push(i);
                missing[i] += 1;
            }
            if missing[i] == 0 {
                events.push(Reverse((TaskTime(0.0), Event::Ready(i))));
            }
        }
        let mut spans = vec![Span { start: 0.0, end: 0.0 }; tasks.len()];
        let mut ready: Vec<BTreeSet<usize>> = vec![BTreeSet::new(); queues.len()];
        let mut busy = vec![false; queues.len()];
        let mut earliest = vec![0.0_f64; tasks.len()];
        let mut wall_us = 0.0_f64;
        while let Some(Reverse((now, event))) = events.pop() {
            match event {
                Event::Ready(i) => {
                    ready[tasks[i].queue].insert(i);
                }
                Event::Ended(i) => {
                    busy[tasks[i].queue] = false;
                    let visible = now.0 + tasks[i].lag_us;
                    wall_us = wall_us.max(visible);
                    for &reader in &readers[i] {
                        earliest[reader] = earliest[reader].max(visible);
                        missing[reader] -= 1;
                        if missing[reader] == 0 {
                            events.push(Reverse((TaskTime(earliest[reader]), Event::Ready(reader))));
                        }
                    }
                }
            }
            // All events of one instant are processed before any task starts.
            if events.peek().is_some_and(|Reverse((next, _))| next.0 <= now.0) {
                continue;
            }
            for queue in 0..queues.len() {
                if busy[queue] {
                    continue;
                }
                if let Some(i) = ready[queue].pop_first() {
                    busy[queue] = true;
                    spans[i] = Span { start: now.0, end: now.0 + tasks[i].us };
                    events.push(Reverse((TaskTime(spans[i].end), Event::Ended(i))));
                }
            }
        }
        Self { queues, tasks, spans, wall_us }
    }

    /// Microseconds that a queue works.
    pub fn busy_us(&self, queue: usize) -> f64 {
        self.tasks.iter().filter(|t| t.queue == queue).fold(0.0, |sum, t| sum + t.us)
    }

    /// Microseconds in which at least one of these queues works, on tasks of a kind or on any.
    pub fn working_us(&self, queues: &[usize], kind: Option<TaskKind>) -> f64 {
        let own = self.tasks.iter().zip(&self.spans);
        let own = own.filter(|(t, _)| queues.contains(&t.queue) && kind.is_none_or(|kind| t.kind == kind));
        if let [_] = queues {
            return own.fold(0.0, |sum, (t, _)| sum + t.us);
        }
        let mut spans: Vec<Span> = own.map(|(_, span)| *span).collect();
        spans.sort_by(|a, b| a.start.total_cmp(&b.start));
        let (mut sum, mut end) = (0.0, 0.0_f64);
        for span in spans {
            sum += (span.end - span.start.max(end)).max(0.0);
            end = end.max(span.end);
        }
        sum
    }

    /// Microseconds of tasks of one kind, waiting not counted.
    pub fn sum_us(&self, what: TaskKind) -> f64 {
        self.tasks.iter().filter(|t| t.kind == what).fold(0.0, |sum, t| sum + t.us)
    }

    /// Microseconds from the first start to the last result of a part's tasks, summed over layers and calls:
    /// the time of a part whose own tasks overlap.
    pub fn part_us(&self, part: TaskKind) -> f64 {
        let mut sum = 0.0;
        let mut open: Option<(u32, u32, f64, f64)> = None;
        // Tasks of a layer and a call are consecutive.
        for (task, span) in self.tasks.iter().zip(&self.spans).filter(|(t, _)| t.part == part) {
            let visible = span.end + task.lag_us;
            open = match open {
                Some((call, layer, start, end)) if (call, layer) == (task.call, task.layer) => {
                    Some((call, layer, start.min(span.start), end.max(visible)))
                }
                before => {
                    sum += before.map_or(0.0, |b| b.3 - b.2);
                    Some((task.call, task.layer, span.start, visible))
                }
            };
        }
        sum + open.map_or(0.0, |b| b.3 - b.2)
    }
}
