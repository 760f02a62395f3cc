//! Steps of all layers, one after the other.
#![expect(
    clippy::cast_possible_truncation,
    reason = "an evaluator and simulator: numbers are rounded, places were checked"
)]

use super::error::StepsError;
use super::event::{Event, Track};
use super::fluid::Resource;
use super::report::{Busy, LayerReport, StepReport};
use super::system::System;
use super::timeline::{Task, TaskPurpose, Timeline};
use super::work::{Before, Rows};
use moec_runtime::schedule::scheduled::{Action, ExpertScheduler, Layout, Placement, ScheduledUnit, Setup};

/// The host's reads.
const HOST: u32 = 0;
/// Priority of NDP units' reads: the host goes first, as in [`moec_dram::Channel`].
const UNITS: u32 = 1;
/// Moves, in their order after everything else.
const MOVES: u32 = 2;

/// The machine with its scheduler.
///
/// A layer's step begins with attention on the GPU (or the CPU without a GPU). After the router, the
/// scheduler assigns each expert to a unit, and rows are copied to the host. Every unit computes its experts
/// one after the other, the longest first. The GPU computes its resident experts while weights of the others
/// are transferred one by one; it computes each of these on arrival. The step ends when all rows are back.
///
/// Right after it the scheduler chooses the moves for the next step of the *same* layer. Its knowledge of
/// that step is then complete, so moves may take as long as a whole step of the model. They run after
/// everything else; a step waits for an expert that is still moving when its layer begins.
#[derive(Clone, Debug)]
pub struct Simulator {
    scheduler: ExpertScheduler,
    timeline: Timeline,
    map: Map,
    /// Pending move of each layer and expert.
    moving: Vec<Vec<Option<usize>>>,
    moves: u32,
}

/// Indices of the resources, and what reads take of them.
#[derive(Clone, Debug)]
struct Map {
    system: System,
    all_dimms: usize,
    dimms: usize,
    bytes: f64,
}

/// State that all units share.
const PCIE: Resource = 0;
const BACK: Resource = 1;
const SINGLE: usize = 2;

impl Map {
    fn resources(&self) -> usize {
        SINGLE + self.system.channels + 2 * self.all_dimms
    }

    fn channel(&self, dimm: usize) -> Resource {
        (SINGLE + dimm % self.system.channels) as Resource
    }

    fn memory(&self, dimm: usize) -> Resource {
        (SINGLE + self.system.channels + dimm) as Resource
    }

    fn link(&self, dimm: usize) -> Resource {
        (SINGLE + self.system.channels + self.all_dimms + dimm) as Resource
    }

    /// The host reads `bytes` of a layout.
    fn read(&self, bytes: f64, layout: Layout) -> Vec<(Resource, f64)> {
        let r = &self.system.rates;
        match layout {
            Layout::Striped => {
                let channel = us(bytes / self.system.channels as f64, r.striped_gbs);
                let memory = us(bytes / self.all_dimms as f64 * r.striped_weight, r.private_gbs);
                let channels = (0..self.system.channels).map(|c| (self.channel(c), channel));
                channels.chain((0..self.all_dimms).map(|d| (self.memory(d), memory))).collect()
            }
            Layout::Local(dimm) => {
                let dimm = usize::from(dimm);
                let memory = us(bytes * r.localized_weight, r.private_gbs);
                vec![(self.channel(dimm), us(bytes, r.localized_gbs)), (self.memory(dimm), memory)]
            }
        }
    }

    /// An expert goes to the GPU.
    fn to_gpu(&self, bytes: f64, layout: Layout) -> Vec<(Resource, f64)> {
        let mut uses = self.read(bytes, layout);
        uses.push((PCIE, us(bytes, self.system.pcie_gbs)));
        uses
    }

    /// An expert between one DIMM and the stripes over all of them.
    fn relayout(&self, dimm: u16) -> Vec<(Resource, f64)> {
        let dimm = usize::from(dimm);
        let share = self.bytes / self.dimms.max(1) as f64;
        let mut uses = Vec::new();
        for d in 0..self.dimms {
            let bytes = if d == dimm { self.bytes - share } else { share };
            let memory = if d == dimm { self.bytes } else { share };
            uses.push((self.link(d), us(bytes, self.system.link_gbs)));
            uses.push((self.memory(d), us(memory, self.system.rates.private_gbs)));
        }
        uses
    }

    /// An expert from one DIMM to another.
    fn rebalance(&self, from: u16, to: u16) -> Vec<(Resource, f64)> {
        let ends = [from, to].map(usize::from);
        ends.into_iter()
            .flat_map(|d| {
                let link = (self.link(d), us(self.bytes, self.system.link_gbs));
                [link, (self.memory(d), us(self.bytes, self.system.rates.private_gbs))]
            })
            .collect()
    }
}

/// Microseconds of bytes at a rate in GB/s.
fn us(bytes: f64, gbs: f64) -> f64 {
    bytes / gbs * 1e-3
}

impl Simulator {
    /// A machine at time 0, with experts where a new scheduler has them.
    ///
    /// # Errors
    /// Errors of [`System::check`] and [`ExpertScheduler::new`].
    pub fn new(setup: Setup, system: System) -> Result<Self, StepsError> {
        Self::with(ExpertScheduler::new(setup)?, system)
    }

    /// A machine at time 0, with experts where a scheduler has them.
    ///
    /// # Errors
    /// Errors of [`System::check`].
    pub fn with(scheduler: ExpertScheduler, system: System) -> Result<Self, StepsError> {
        system.check()?;
        let setup = scheduler.setup();
        let dimms = setup.memories;
        let all_dimms = system.all_dimms.max(dimms);
        let bytes = system.expert_bytes as f64;
        let moving = vec![vec![None; setup.experts]; setup.layers];
        let map = Map { system, all_dimms, dimms, bytes };
        let timeline = Timeline::new(map.resources(), all_dimms);
        Ok(Self { scheduler, timeline, map, moving, moves: 0 })
    }

    /// The scheduler, to give it profiles and placements before the first step.
    pub fn scheduler_mut(&mut self) -> &mut ExpertScheduler {
        &mut self.scheduler
    }

    /// The scheduler.
    pub fn scheduler(&self) -> &ExpertScheduler {
        &self.scheduler
    }

    /// Keeps the events from now on.
    pub fn record(&mut self) {
        self.timeline.events.get_or_insert_default();
    }

    /// The events that were kept, in the order of their ends.
    pub fn events(&self) -> &[Event] {
        self.timeline.events.as_deref().unwrap_or_default()
    }

    /// A step of all layers, of which `loads` are tokens by layer and expert.
    ///
    /// # Errors
    /// [`StepsError::Layers`], and those of [`Simulator::layer`].
    pub fn step(&mut self, loads: &[Vec<u32>], before: Before, rows: Rows) -> Result<StepReport, StepsError> {
        let layers = self.moving.len();
        if loads.len() != layers {
            return Err(StepsError::Layers { found: loads.len(), layers });
        }
        let each = loads.iter().enumerate().map(|(l, loads)| self.layer(l, loads, before, rows));
        Ok(StepReport { layers: each.collect::<Result<_, _>>()? })
    }

    /// A step of one layer.
    ///
    /// # Errors
    /// Errors of the scheduler, and [`StepsError::Number`] for negative or NaN times.
    pub fn layer(
        &mut self,
        layer: usize,
        loads: &[u32],
        before: Before,
        rows: Rows,
    ) -> Result<LayerReport, StepsError> {
        before.check()?;
        rows.check()?;
        let begin = self.timeline.now;
        self.before(layer, before);
        self.timeline.run()?;
        let before_us = self.timeline.now - begin;
        // Reset after the gate, so that the report covers only the experts.
        self.timeline.used.fill(0.0);
        self.timeline.occupied.fill(0.0);
        (self.timeline.stalled, self.timeline.gpu_domain) = (0.0, 0.0);
        let gate = self.timeline.now;
        let (predicted_us, away, cpu_calc) = self.experts(layer, loads, rows)?;
        self.timeline.run()?;
        let experts_us = self.timeline.now - gate;
        let busy = self.busy(cpu_calc);
        let stalled_us = self.timeline.stalled;
        if away {
            self.rows(layer, Track::Pcie, PCIE, us(rows.to_gpu, self.map.system.pcie_gbs));
            self.timeline.run()?;
        }
        let rows_us = self.timeline.now - gate - experts_us;
        let moves = self.moves(layer)?;
        Ok(LayerReport {
            layer,
            begin_us: begin,
            before_us,
            experts_us,
            rows_us,
            predicted_us,
            busy,
            moves,
            stalled_us,
        })
    }

    fn before(&mut self, layer: usize, before: Before) {
        let has_gpu = self.scheduler.setup().costs.gpu.is_some();
        let bytes = before.host_bytes;
        let mut calc = Task {
            track: if has_gpu { Track::Gpu } else { Track::Cpu },
            what: TaskPurpose::Before { layer },
            class: HOST,
            calc_us: before.calc_us,
            uses: Vec::new(),
            after: [None; 2],
            awaited: true,
        };
        if bytes > 0.0 && has_gpu {
            let uses = self.map.to_gpu(bytes, Layout::Striped);
            let what = TaskPurpose::Cache { layer };
            self.timeline.add(Task { track: Track::Pcie, what, calc_us: 0.0, uses, ..calc.clone() });
        } else if bytes > 0.0 {
            calc.uses = self.map.read(bytes, Layout::Striped);
        }
        self.timeline.add(calc);
    }

    fn rows(&mut self, layer: usize, track: Track, resource: Resource, time: f64) -> usize {
        self.timeline.add(Task {
            track,
            what: TaskPurpose::Rows { layer },
            class: HOST,
            calc_us: 0.0,
            uses: vec![(resource, time)],
            after: [None; 2],
            awaited: true,
        })
    }

    /// Assigns every expert to its unit. Returns the predicted makespan, whether rows are copied to the host,
    /// and the CPU's time of arithmetic.
    fn experts(&mut self, layer: usize, loads: &[u32], rows: Rows) -> Result<(f64, bool, f64), StepsError> {
        // Placements as they are before the step, which do not change in it.
        let frames = self.scheduler.placement(layer).map_or(0, Placement::frames);
        let schedule = if rows.prompt {
            self.scheduler.dispatch_in_frames(layer, loads, frames, true)?
        } else {
            self.scheduler.dispatch(layer, loads)?
        };
        let schedule = schedule.clone();
        let away = schedule.units.iter().flatten().any(|h| *h != ScheduledUnit::Gpu);
        let has_gpu = self.scheduler.setup().costs.gpu.is_some();
        let rows = (away && has_gpu)
            .then(|| self.rows(layer, Track::PcieBack, BACK, us(rows.to_host, self.map.system.pcie_gbs)));
        let mut order: Vec<usize> = (0..loads.len()).filter(|&e| loads[e] > 0).collect();
        // With equal loads times are equal, except for layouts.
        order.sort_by_key(|&e| (std::cmp::Reverse(loads[e]), e));
        let mut cpu_calc = 0.0;
        for &expert in &order {
            let Some(unit) = schedule.units[expert] else { continue };
            cpu_calc += self.expert(layer, expert, loads[expert], unit, rows);
        }
        if schedule.streamed {
            self.scheduler.stream(layer);
        }
        Ok((schedule.makespan_us, rows.is_some(), cpu_calc))
    }

    /// Adds one expert's tasks; returns the CPU's time of arithmetic for it.
    fn expert(
        &mut self,
        layer: usize,
        expert: usize,
        tokens: u32,
        unit: ScheduledUnit,
        rows: Option<usize>,
    ) -> f64 {
        let costs = &self.scheduler.setup().costs;
        let n = f64::from(tokens);
        let Some(place) = self.scheduler.placement(layer).and_then(|p| p.places().get(expert)).copied()
        else {
            return 0.0;
        };
        let moved = self.moving[layer][expert].filter(|&m| !self.timeline.is_done(m));
        let task = Task {
            track: Track::Cpu,
            what: TaskPurpose::Expert { layer, expert, tokens },
            class: HOST,
            calc_us: 0.0,
            uses: Vec::new(),
            after: [rows, moved],
            awaited: true,
        };
        match unit {
            ScheduledUnit::Gpu => {
                let calc_us = costs.t_gpu_hit(n);
                let mut after = [moved, None];
                if !place.cached {
                    let uses = self.map.to_gpu(self.map.bytes, place.layout);
                    let what = TaskPurpose::Weights { layer, expert };
                    let travel = Task { track: Track::Pcie, what, uses, after, ..task.clone() };
                    after = [Some(self.timeline.add(travel)), None];
                }
                self.timeline.add(Task { track: Track::Gpu, calc_us, after, ..task });
                0.0
            }
            ScheduledUnit::Cpu => {
                let calc_us = costs.cpu.table.at(n);
                let uses = self.map.read(self.map.bytes, place.layout);
                self.timeline.add(Task { calc_us, uses, ..task });
                calc_us
            }
            ScheduledUnit::Near(dimm) => {
                let calc_us = costs.near.as_ref().map_or(0.0, |u| u.table.at(n));
                let memory = self.map.memory(usize::from(dimm));
                let uses = vec![(memory, us(self.map.bytes, self.map.system.rates.private_gbs))];
                self.timeline.add(Task { track: Track::Ndp(dimm), class: UNITS, calc_us, uses, ..task });
                0.0
            }
        }
    }

    fn busy(&self, cpu_calc: f64) -> Busy {
        let (timeline, map) = (&self.timeline, &self.map);
        let occupied = |track| timeline.occupied[timeline.place(track)];
        let used = |r: Resource| timeline.used[usize::from(r)];
        Busy {
            gpu: occupied(Track::Gpu),
            gpu_domain: timeline.gpu_domain,
            cpu: occupied(Track::Cpu),
            cpu_calc,
            pcie: used(PCIE),
            ndp: (0..map.dimms).map(|d| occupied(Track::Ndp(d as u16))).collect(),
            memory: (0..map.all_dimms).map(|d| used(map.memory(d))).collect(),
            link: (0..map.dimms).map(|d| used(map.link(d))).collect(),
            channel: (0..map.system.channels).map(|c| used(map.channel(c))).collect(),
        }
    }

    /// Starts the moves for this layer's next step.
    fn moves(&mut self, layer: usize) -> Result<usize, StepsError> {
        let layouts: Vec<Layout> = self
            .scheduler
            .placement(layer)
            .map_or(Vec::new(), |p| p.places().iter().map(|p| p.layout).collect());
        let window = self.scheduler.setup().window;
        let moves = self.scheduler.moves_for(layer, window)?.to_vec();
        if !self.map.system.moves_take_time {
            return Ok(moves.len());
        }
        for m in &moves {
            let (expert, kind, track, uses) = match m.action {
                Action::Prefetch { expert, .. } => {
                    let layout = layouts.get(usize::from(expert)).copied().unwrap_or(Layout::Striped);
                    (expert, "prefetch", Track::Pcie, self.map.to_gpu(self.map.bytes, layout))
                }
                Action::Relayout { expert, to } => {
                    let from = layouts.get(usize::from(expert)).and_then(|l| l.memory());
                    let dimm = to.memory().or(from).unwrap_or(0);
                    (expert, "relayout", Track::Link(dimm), self.map.relayout(dimm))
                }
                Action::Rebalance { expert, from, to } => {
                    (expert, "rebalancing", Track::Link(from), self.map.rebalance(from, to))
                }
            };
            let expert = usize::from(expert);
            // An earlier move of the same expert goes first wherever both use a link.
            let task = Task {
                track,
                what: TaskPurpose::Move { layer, expert, kind },
                class: MOVES + self.moves,
                calc_us: 0.0,
                uses,
                after: [None; 2],
                awaited: false,
            };
            self.moves = self.moves.saturating_add(1).min(u32::MAX - MOVES);
            self.moving[layer][expert] = Some(self.timeline.add(task));
        }
        Ok(moves.len())
    }
}
