//! Units and links with what waits for them, and the clock.

use super::error::StepsError;
use super::event::{Event, Track};
use super::fluid::{Flow, Resource, Scratch, share};
use std::collections::{BTreeMap, VecDeque};
use std::fmt;

/// Purpose of a task; its text is part of events.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum TaskPurpose {
    /// Attention, dense layers, shared experts.
    Before { layer: usize },
    /// Reads of attention from the host's memory.
    Cache { layer: usize },
    /// An expert is computed.
    Expert { layer: usize, expert: usize, tokens: u32 },
    /// An expert's weights travel to the GPU.
    Weights { layer: usize, expert: usize },
    /// Rows between GPU and host.
    Rows { layer: usize },
    /// A move that the scheduler decided on.
    Move { layer: usize, expert: usize, kind: &'static str },
}

impl fmt::Display for TaskPurpose {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Before { layer } => write!(f, "layer {layer}, attention"),
            Self::Cache { layer } => write!(f, "layer {layer}, KV cache"),
            Self::Expert { layer, expert, tokens } => {
                let s = if *tokens == 1 { "" } else { "s" };
                write!(f, "layer {layer}, expert {expert}, {tokens} token{s}")
            }
            Self::Weights { layer, expert } => write!(f, "layer {layer}, weights of expert {expert}"),
            Self::Rows { layer } => write!(f, "layer {layer}, rows"),
            Self::Move { layer, expert, kind } => write!(f, "layer {layer}, {kind} of expert {expert}"),
        }
    }
}

/// A piece of work for one lane.
#[derive(Clone, Debug)]
pub(super) struct Task {
    pub(super) track: Track,
    pub(super) what: TaskPurpose,
    pub(super) class: u32,
    /// Minimum duration, in microseconds.
    pub(super) calc_us: f64,
    /// Microseconds of each resource.
    pub(super) uses: Vec<(Resource, f64)>,
    /// Tasks that must have ended before.
    pub(super) after: [Option<usize>; 2],
    /// Whether a step waits for it; moves do not count.
    pub(super) awaited: bool,
}

impl Task {
    /// Its duration without contention.
    fn alone_us(&self) -> f64 {
        self.uses.iter().map(|u| u.1).fold(self.calc_us, f64::max)
    }
}

/// A task that runs.
#[derive(Clone, Debug)]
struct Running {
    task: Task,
    begin: f64,
}

/// All lanes. Each does one task at a time, the first in its queue that need not wait; moves all run at once.
#[derive(Clone, Debug)]
pub(super) struct Timeline {
    pub(super) now: f64,
    resources: usize,
    /// For each track: waiting tasks, and whether one runs.
    queues: Vec<(VecDeque<(usize, Task)>, bool)>,
    flows: Vec<Flow>,
    /// Tasks that have not ended, by number; `Some` once they have begun.
    running: BTreeMap<usize, Option<Running>>,
    tasks: usize,
    /// Awaited tasks that have not ended.
    open: usize,
    scratch: Scratch,
    /// Time that each resource was used, at its full rate.
    pub(super) used: Vec<f64>,
    /// Time that each track had a task.
    pub(super) occupied: Vec<f64>,
    /// Time that the GPU calculated or weights came to it for a task that is awaited.
    pub(super) gpu_domain: f64,
    /// Time in which nothing awaited ran, though something was open.
    pub(super) stalled: f64,
    pub(super) events: Option<Vec<Event>>,
    dimms: usize,
}

/// Tracks that there is one of.
const SINGLE: usize = 4;

impl Timeline {
    pub(super) fn new(resources: usize, dimms: usize) -> Self {
        Self {
            now: 0.0,
            resources,
            queues: vec![(VecDeque::new(), false); SINGLE + dimms],
            flows: Vec::new(),
            running: BTreeMap::new(),
            tasks: 0,
            open: 0,
            scratch: Scratch::default(),
            used: vec![0.0; resources],
            occupied: vec![0.0; SINGLE + 2 * dimms],
            gpu_domain: 0.0,
            stalled: 0.0,
            events: None,
            dimms,
        }
    }

    /// A track's place among the times of [`Timeline::occupied`].
    pub(super) fn place(&self, track: Track) -> usize {
        match track {
            Track::Gpu => 0,
            Track::Cpu => 1,
            Track::Pcie => 2,
            Track::PcieBack => 3,
            Track::Ndp(dimm) => SINGLE + usize::from(dimm),
            Track::Link(dimm) => SINGLE + self.dimms + usize::from(dimm),
        }
    }

    /// Takes a task; gives its number. One that is awaited waits its turn on its track, any other begins at
    /// once.
    pub(super) fn add(&mut self, task: Task) -> usize {
        let number = self.tasks;
        self.tasks += 1;
        self.running.insert(number, None);
        if task.awaited {
            self.open += 1;
            let place = self.place(task.track);
            self.queues[place].0.push_back((number, task));
        } else {
            self.start(number, task);
        }
        number
    }

    /// Whether a task has ended.
    pub(super) fn is_done(&self, task: usize) -> bool {
        !self.running.contains_key(&task)
    }

    /// Continues until all awaited tasks have ended.
    ///
    /// # Errors
    /// [`StepsError::Number`] if a task would never end.
    pub(super) fn run(&mut self) -> Result<(), StepsError> {
        loop {
            self.begin();
            if self.open == 0 {
                return Ok(());
            }
            share(&mut self.flows, self.resources, &mut self.scratch);
            let ends =
                self.flows.iter().map(|f| if f.speed > 0.0 { f.left / f.speed } else { f64::INFINITY });
            let step = ends.fold(f64::INFINITY, f64::min);
            if !step.is_finite() {
                let what = "the time of a task";
                return Err(StepsError::Number { what, from: "from 0 on", value: step });
            }
            self.advance(step);
        }
    }

    /// Starts what can start.
    fn begin(&mut self) {
        for place in 0..self.queues.len() {
            if self.queues[place].1 {
                continue;
            }
            let ready = |t: &Task| t.after.iter().flatten().all(|&a| self.is_done(a));
            let Some(at) = self.queues[place].0.iter().position(|(_, t)| ready(t)) else { continue };
            let Some((number, task)) = self.queues[place].0.remove(at) else { continue };
            self.queues[place].1 = true;
            self.start(number, task);
        }
    }

    fn start(&mut self, number: usize, task: Task) {
        let alone = task.alone_us();
        // A task without duration still ends after tasks that began before it.
        let best = 1.0 / alone.max(1e-6);
        let flow =
            Flow { task: number, class: task.class, left: 1.0, best, speed: 0.0, uses: task.uses.clone() };
        let at = self.flows.partition_point(|f| f.class <= flow.class);
        self.flows.insert(at, flow);
        self.running.insert(number, Some(Running { task, begin: self.now }));
    }

    /// Advances the time, and ends completed tasks.
    fn advance(&mut self, step: f64) {
        let (mut awaited, mut gpu) = (false, false);
        for flow in &mut self.flows {
            flow.left -= flow.speed * step;
            for &(r, us) in &flow.uses {
                self.used[usize::from(r)] += us * flow.speed * step;
            }
            let running = self.running.get(&flow.task).and_then(Option::as_ref).filter(|r| r.task.awaited);
            if let Some(r) = running {
                awaited = true;
                gpu |= matches!(r.task.track, Track::Gpu | Track::Pcie);
            }
        }
        for (occupied, _) in self.occupied.iter_mut().zip(&self.queues).filter(|o| o.1.1) {
            *occupied += step;
        }
        self.stalled += if awaited { 0.0 } else { step };
        self.gpu_domain += if gpu { step } else { 0.0 };
        self.now += step;
        let mut ended = Vec::new();
        self.flows.retain(|f| {
            let over = f.left <= 1e-9;
            if over {
                ended.push(f.task);
            }
            !over
        });
        for number in ended {
            self.end(number);
        }
    }

    fn end(&mut self, number: usize) {
        let Some(Running { task, begin }) = self.running.remove(&number).flatten() else { return };
        let place = self.place(task.track);
        if task.awaited {
            self.open -= 1;
            self.queues[place].1 = false;
        } else {
            self.occupied[place] += self.now - begin;
        }
        if let Some(events) = &mut self.events {
            let name = task.what.to_string();
            events.push(Event { track: task.track, name, begin_us: begin, end_us: self.now });
        }
    }
}
