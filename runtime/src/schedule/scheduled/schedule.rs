//! Results of a scheduler.

use super::placement::Layout;

/// Kind of compute unit that computes an expert.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ExpertUnit {
    /// The GPU.
    Gpu,
    /// The CPU.
    Cpu,
    /// The near-data unit of the memory that the expert lies on.
    Near,
}

/// Unit that computes an expert in one step.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ScheduledUnit {
    /// On the GPU.
    Gpu,
    /// On the CPU.
    Cpu,
    /// On the near-data unit of this memory.
    Near(u16),
}

/// Move before a layer's next step (TriMoE, §4.3).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Action {
    /// The GPU reads an expert ahead of its use, into the frame of another or a free one.
    Prefetch {
        /// Expert that comes.
        expert: u16,
        /// Expert that it evicts.
        evict: Option<u16>,
    },
    /// Localized becomes striped, or striped localized.
    Relayout {
        /// Expert that changes its layout.
        expert: u16,
        /// Its layout afterwards.
        to: Layout,
    },
    /// A localized expert goes from one memory to another.
    Rebalance {
        /// Expert that leaves.
        expert: u16,
        /// From this memory.
        from: u16,
        /// To this memory.
        to: u16,
    },
}

impl Action {
    /// Expert that moves.
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
    /// The move.
    pub action: Action,
    /// Microseconds that it is predicted to save.
    pub benefit_us: f64,
    /// Microseconds that it keeps the busiest resource it uses: PCIe, or a link between memories.
    pub time_us: f64,
}

/// One step of one layer.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Schedule {
    /// Unit of each expert; `None`: it has no tokens.
    pub units: Vec<Option<ScheduledUnit>>,
    /// Equation 7, in microseconds.
    pub makespan_us: f64,
    /// Equation 5 of the GPU.
    pub gpu_us: f64,
    /// Equation 5 of the CPU.
    pub cpu_us: f64,
    /// Equation 6 of each memory, with contention.
    pub memory_us: Vec<f64>,
    /// Time of each memory's near-data unit, without contention.
    pub near_us: Vec<f64>,
    /// Moves for the layer that comes next.
    pub moves: Vec<Move>,
}
