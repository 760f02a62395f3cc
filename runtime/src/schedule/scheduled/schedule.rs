//! What a scheduler answers.

use super::placement::Layout;

/// A kind of unit that computes experts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Unit {
    /// The GPU.
    Gpu,
    /// The processor.
    Cpu,
    /// The near-data unit of the memory that the expert lies on.
    Near,
}

/// Where an expert is computed in one step.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Home {
    /// On the GPU.
    Gpu,
    /// On the processor.
    Cpu,
    /// On the near-data unit of this memory.
    Near(u16),
}

/// What moves before a layer's next step (TriMoE, §4.3).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Action {
    /// The GPU reads an expert ahead of its use, into the frame of another or a free one.
    Prefetch {
        /// Who comes.
        expert: u16,
        /// Whose frame it takes.
        evict: Option<u16>,
    },
    /// Localized becomes striped, or striped localized.
    Relayout {
        /// Who changes.
        expert: u16,
        /// Its layout afterwards.
        to: Layout,
    },
    /// A localized expert goes from one memory to another.
    Rebalance {
        /// Who goes.
        expert: u16,
        /// From this memory.
        from: u16,
        /// To this memory.
        to: u16,
    },
}

impl Action {
    /// Who moves.
    pub fn expert(self) -> u16 {
        match self {
            Self::Prefetch { expert, .. }
            | Self::Relayout { expert, .. }
            | Self::Rebalance { expert, .. } => expert,
        }
    }
}

/// An action with what it is expected to bring and what it takes.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Move {
    /// Layer of the expert.
    pub layer: usize,
    /// What moves.
    pub action: Action,
    /// Microseconds that it is predicted to save.
    pub benefit_us: f64,
    /// Microseconds that it keeps the busiest resource it uses: PCIe, or a link between memories.
    pub time_us: f64,
}

/// One step of one layer.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Schedule {
    /// Where each expert is computed; `None`: it has no tokens.
    pub homes: Vec<Option<Home>>,
    /// Equation 7, in microseconds.
    pub makespan_us: f64,
    /// Equation 5 of the GPU.
    pub gpu_us: f64,
    /// Equation 5 of the processor.
    pub cpu_us: f64,
    /// Equation 6 of each memory, with contention.
    pub memory_us: Vec<f64>,
    /// What each memory's near-data unit computes, without contention.
    pub near_us: Vec<f64>,
    /// What moves for the layer that comes next.
    pub moves: Vec<Move>,
}
