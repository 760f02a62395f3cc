//! Assignment of experts to units, and its time: equations 5 to 7 of TriMoE, kept up to date move by move.
//!
//! `T_contention` of equation 6 is the time that the host's reads take from a memory. A read of a striped
//! expert, by the GPU or the CPU, takes the same time from every memory; one of a localized expert takes time
//! from its own memory only ([`super::Costs::contention`]). Experts on the GPU are not read. Reads of striped
//! experts are counted once for all memories, so that an expert moves in constant time.

use super::ticks::{FORBIDDEN, NEVER, Ticks};
use crate::schedule::scheduled::ExpertUnit;

/// Value of a memory for a striped expert.
pub(crate) const STRIPED: u16 = u16::MAX;

/// The units, in the order in which ties are broken.
pub(crate) const UNITS: [ExpertUnit; 3] = [ExpertUnit::Cpu, ExpertUnit::Gpu, ExpertUnit::Near];

/// An expert with tokens, and its cost on each unit.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Task {
    pub(crate) expert: u16,
    /// Its memory, or [`STRIPED`].
    pub(crate) memory: u16,
    /// Whether the GPU holds it.
    pub(crate) cached: bool,
    /// Increase of each time, by the unit that computes the expert.
    pub(crate) effects: [Effect; 3],
    /// `f_calc_gpu`.
    pub(crate) calc: Ticks,
    /// Time of the transfer to the GPU; 0 if the GPU holds it.
    pub(crate) transfer: Ticks,
}

impl Task {
    /// Increases by unit, from the costs by unit and the time that a read by the host takes from its memory,
    /// or from every memory.
    pub(crate) fn effects(cost: [Ticks; 3], read: Ticks, memory: u16, cached: bool) -> [Effect; 3] {
        let read = match memory {
            STRIPED => Effect { every: read, ..Effect::default() },
            _ => Effect { memory: read, ..Effect::default() },
        };
        let gpu = if cached { Effect::default() } else { read };
        let mut effects = [Effect::default(); 3];
        effects[ExpertUnit::Gpu as usize] = Effect { gpu: cost[ExpertUnit::Gpu as usize], ..gpu };
        effects[ExpertUnit::Cpu as usize] = Effect { cpu: cost[ExpertUnit::Cpu as usize], ..read };
        effects[ExpertUnit::Near as usize] =
            Effect { memory: cost[ExpertUnit::Near as usize], ..Effect::default() };
        effects
    }

    /// Cost on a unit.
    pub(crate) fn cost(&self, unit: ExpertUnit) -> Ticks {
        let effect = self.effects[unit as usize];
        match unit {
            ExpertUnit::Gpu => effect.gpu,
            ExpertUnit::Cpu => effect.cpu,
            ExpertUnit::Near => effect.memory,
        }
    }

    /// Whether a unit can compute it.
    pub(crate) fn can(&self, unit: ExpertUnit) -> bool {
        self.cost(unit) < NEVER
    }

    /// Makes the GPU unable to compute it.
    pub(crate) fn refuse_gpu(&mut self) {
        self.effects[ExpertUnit::Gpu as usize].gpu = FORBIDDEN;
    }

    /// The unit where it costs least.
    pub(crate) fn cheapest(&self) -> ExpertUnit {
        let [mut best, ..] = UNITS;
        for unit in UNITS {
            if self.cost(unit) < self.cost(best) {
                best = unit;
            }
        }
        best
    }

    /// Increase of each time if a unit computes it.
    pub(crate) fn effect(&self, unit: ExpertUnit) -> Effect {
        self.effects[unit as usize]
    }
}

/// Times that an expert adds: to the GPU, to the CPU, to every memory, and to its own memory.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct Effect {
    pub(crate) gpu: Ticks,
    pub(crate) cpu: Ticks,
    pub(crate) every: Ticks,
    pub(crate) memory: Ticks,
}

impl std::ops::Sub for Effect {
    type Output = Self;

    fn sub(self, other: Self) -> Self {
        Self {
            gpu: self.gpu - other.gpu,
            cpu: self.cpu - other.cpu,
            every: self.every - other.every,
            memory: self.memory - other.memory,
        }
    }
}

/// Assignment of a step of a layer: its tasks, their units, and the resulting times.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Assignment {
    pub(crate) tasks: Vec<Task>,
    /// By task.
    pub(crate) units: Vec<ExpertUnit>,
    pub(crate) gpu: Ticks,
    pub(crate) cpu: Ticks,
    /// Time of every memory, in addition to its own.
    pub(crate) every: Ticks,
    /// By memory.
    pub(crate) memories: Vec<Ticks>,
}

/// Device that determines the makespan.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Device {
    Gpu,
    Cpu,
    Memory(usize),
}

impl Assignment {
    /// Removes all tasks.
    pub(crate) fn clear(&mut self, memories: usize) {
        self.tasks.clear();
        self.units.clear();
        self.memories.clear();
        self.memories.resize(memories, 0);
        (self.gpu, self.cpu, self.every) = (0, 0, 0);
    }

    /// Adds a task on a unit.
    pub(crate) fn push(&mut self, task: Task, unit: ExpertUnit) {
        self.tasks.push(task);
        self.units.push(unit);
        self.add(task.memory, task.effect(unit));
    }

    /// Change by moving a task to another unit.
    pub(crate) fn change(&self, task: usize, to: ExpertUnit) -> Effect {
        let t = &self.tasks[task];
        t.effect(to) - t.effect(self.units[task])
    }

    /// Moves a task to another unit.
    pub(crate) fn reassign(&mut self, task: usize, to: ExpertUnit) {
        let change = self.change(task, to);
        self.units[task] = to;
        self.add(self.tasks[task].memory, change);
    }

    pub(crate) fn add(&mut self, memory: u16, effect: Effect) {
        self.gpu += effect.gpu;
        self.cpu += effect.cpu;
        self.every += effect.every;
        if let Some(own) = self.memories.get_mut(usize::from(memory)) {
            *own += effect.memory;
        }
    }

    /// Time of the slowest memory.
    pub(crate) fn slowest(&self) -> Ticks {
        self.memories.iter().max().map_or(0, |d| d + self.every)
    }

    /// Equation 7.
    pub(crate) fn makespan(&self) -> Ticks {
        self.gpu.max(self.cpu).max(self.slowest())
    }

    /// The device that takes longest; of several, the GPU before the CPU before the memories by number.
    pub(crate) fn bottleneck(&self) -> Device {
        let makespan = self.makespan();
        if self.gpu == makespan {
            return Device::Gpu;
        }
        if self.cpu == makespan {
            return Device::Cpu;
        }
        Device::Memory(self.memories.iter().position(|d| d + self.every == makespan).unwrap_or(0))
    }

    /// Whether a task is computed on a device.
    pub(crate) fn is_on(&self, task: usize, device: Device) -> bool {
        match (self.units[task], device) {
            (ExpertUnit::Gpu, Device::Gpu) | (ExpertUnit::Cpu, Device::Cpu) => true,
            (ExpertUnit::Near, Device::Memory(d)) => usize::from(self.tasks[task].memory) == d,
            _ => false,
        }
    }

    /// Takes the units and times of another assignment of the same tasks.
    pub(crate) fn copy_from(&mut self, other: &Self) {
        self.units.clone_from(&other.units);
        self.memories.clone_from(&other.memories);
        (self.gpu, self.cpu, self.every) = (other.gpu, other.cpu, other.every);
    }
}
