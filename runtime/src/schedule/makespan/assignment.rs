//! Who computes what, and how long it takes: equations 5 to 7 of TriMoE, kept up to date move by move.
//!
//! `T_contention` of equation 6 is what the host's reads take of a DIMM's time: a read of a striped expert, by the
//! GPU or by the processor, takes the same of every DIMM, one of a localized expert takes all of its DIMM
//! ([`super::Costs::contention`]). What the GPU holds is not read. Reads of striped experts are counted once for
//! all DIMMs, so that an expert moves in constant time.

use super::schedule::Unit;
use super::ticks::{NEVER, Ticks};

/// In place of a DIMM: the expert is striped.
pub(super) const STRIPED: u16 = u16::MAX;

/// The units, in the order in which ties are broken.
pub(super) const UNITS: [Unit; 3] = [Unit::Cpu, Unit::Gpu, Unit::Ndp];

/// An expert with tokens, and what it costs where.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Task {
    pub(super) expert: u16,
    /// Its DIMM, or [`STRIPED`].
    pub(super) dimm: u16,
    /// Whether the GPU holds it.
    pub(super) cached: bool,
    /// What it adds to each time, by the unit that computes it.
    pub(super) effects: [Effect; 3],
    /// `f_calc_gpu`.
    pub(super) calc: Ticks,
    /// To the GPU; 0 if it holds it.
    pub(super) transfer: Ticks,
}

impl Task {
    /// Costs by unit, and what a read by the host takes of its DIMM, or of every one.
    pub(super) fn effects(cost: [Ticks; 3], read: Ticks, dimm: u16, cached: bool) -> [Effect; 3] {
        let read = match dimm {
            STRIPED => Effect { every: read, ..Effect::default() },
            _ => Effect { dimm: read, ..Effect::default() },
        };
        let gpu = if cached { Effect::default() } else { read };
        let mut effects = [Effect::default(); 3];
        effects[Unit::Gpu as usize] = Effect { gpu: cost[Unit::Gpu as usize], ..gpu };
        effects[Unit::Cpu as usize] = Effect { cpu: cost[Unit::Cpu as usize], ..read };
        effects[Unit::Ndp as usize] = Effect { dimm: cost[Unit::Ndp as usize], ..Effect::default() };
        effects
    }

    /// What it costs on a unit.
    pub(super) fn cost(&self, unit: Unit) -> Ticks {
        let effect = self.effects[unit as usize];
        match unit {
            Unit::Gpu => effect.gpu,
            Unit::Cpu => effect.cpu,
            Unit::Ndp => effect.dimm,
        }
    }

    /// Whether a unit can compute it.
    pub(super) fn can(&self, unit: Unit) -> bool {
        self.cost(unit) < NEVER
    }

    /// The unit where it costs least.
    pub(super) fn cheapest(&self) -> Unit {
        let [mut best, ..] = UNITS;
        for unit in UNITS {
            if self.cost(unit) < self.cost(best) {
                best = unit;
            }
        }
        best
    }

    /// What it adds to each time where it is computed.
    pub(super) fn effect(&self, unit: Unit) -> Effect {
        self.effects[unit as usize]
    }
}

/// Times that an expert adds: to the GPU, to the processor, to every DIMM, and to its own.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct Effect {
    pub(super) gpu: Ticks,
    pub(super) cpu: Ticks,
    pub(super) every: Ticks,
    pub(super) dimm: Ticks,
}

impl std::ops::Sub for Effect {
    type Output = Self;

    fn sub(self, other: Self) -> Self {
        Self {
            gpu: self.gpu - other.gpu,
            cpu: self.cpu - other.cpu,
            every: self.every - other.every,
            dimm: self.dimm - other.dimm,
        }
    }
}

/// A step of a layer: its tasks, and the unit of each, with the times that these make.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Assignment {
    pub(super) tasks: Vec<Task>,
    /// By task.
    pub(super) units: Vec<Unit>,
    pub(super) gpu: Ticks,
    pub(super) cpu: Ticks,
    /// On top of each DIMM's own.
    pub(super) every: Ticks,
    /// By DIMM.
    pub(super) dimms: Vec<Ticks>,
}

/// What determines the makespan.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Device {
    Gpu,
    Cpu,
    Dimm(usize),
}

impl Assignment {
    /// Without tasks.
    pub(super) fn clear(&mut self, dimms: usize) {
        self.tasks.clear();
        self.units.clear();
        self.dimms.clear();
        self.dimms.resize(dimms, 0);
        (self.gpu, self.cpu, self.every) = (0, 0, 0);
    }

    /// One more task.
    pub(super) fn push(&mut self, task: Task, unit: Unit) {
        self.tasks.push(task);
        self.units.push(unit);
        self.add(task.dimm, task.effect(unit));
    }

    /// What moving a task to another unit changes.
    pub(super) fn change(&self, task: usize, to: Unit) -> Effect {
        let t = &self.tasks[task];
        t.effect(to) - t.effect(self.units[task])
    }

    /// Moves a task to another unit.
    pub(super) fn reassign(&mut self, task: usize, to: Unit) {
        let change = self.change(task, to);
        self.units[task] = to;
        self.add(self.tasks[task].dimm, change);
    }

    pub(super) fn add(&mut self, dimm: u16, effect: Effect) {
        self.gpu += effect.gpu;
        self.cpu += effect.cpu;
        self.every += effect.every;
        if let Some(own) = self.dimms.get_mut(usize::from(dimm)) {
            *own += effect.dimm;
        }
    }

    /// Time of the slowest DIMM.
    pub(super) fn slowest(&self) -> Ticks {
        self.dimms.iter().max().map_or(0, |d| d + self.every)
    }

    /// Equation 7.
    pub(super) fn makespan(&self) -> Ticks {
        self.gpu.max(self.cpu).max(self.slowest())
    }

    /// The device that takes longest; of several, the GPU before the processor before the DIMMs by number.
    pub(super) fn bottleneck(&self) -> Device {
        let makespan = self.makespan();
        if self.gpu == makespan {
            return Device::Gpu;
        }
        if self.cpu == makespan {
            return Device::Cpu;
        }
        Device::Dimm(self.dimms.iter().position(|d| d + self.every == makespan).unwrap_or(0))
    }

    /// Whether a task is computed on a device.
    pub(super) fn is_on(&self, task: usize, device: Device) -> bool {
        match (self.units[task], device) {
            (Unit::Gpu, Device::Gpu) | (Unit::Cpu, Device::Cpu) => true,
            (Unit::Ndp, Device::Dimm(d)) => usize::from(self.tasks[task].dimm) == d,
            _ => false,
        }
    }

    /// Takes the units and times of another assignment of the same tasks.
    pub(super) fn copy_from(&mut self, other: &Self) {
        self.units.clone_from(&other.units);
        self.dimms.clone_from(&other.dimms);
        (self.gpu, self.cpu, self.every) = (other.gpu, other.cpu, other.every);
    }
}
