//! Results of a scheduler.

use super::budget::Ends;
use super::placement::Layout;

/// Kind of compute unit that computes an expert.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ExpertUnit {
    /// The GPU.
    Gpu,
    /// The CPU.
    Cpu,
    /// The NDP unit of the expert's memory.
    Near,
}

/// Unit that computes an expert in one step.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ScheduledUnit {
    /// On the GPU.
    Gpu,
    /// On the CPU.
    Cpu,
    /// On the NDP unit of this memory.
    Near(u16),
}

/// Move of an expert before a layer's next step (TriMoE, §4.3).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Action {
    /// An expert is transferred to the GPU ahead of its use, into a free frame or that of another.
    Prefetch {
        /// Expert that is transferred.
        expert: u16,
        /// Expert that it evicts.
        evict: Option<u16>,
    },
    /// A localized expert becomes striped, or a striped one localized.
    Relayout {
        /// Expert that changes its layout.
        expert: u16,
        /// Its layout afterwards.
        to: Layout,
    },
    /// A localized expert moves from one memory to another.
    Rebalance {
        /// Expert that leaves.
        expert: u16,
        /// Source memory.
        from: u16,
        /// Destination memory.
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

/// An action with its expected benefit and cost.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Move {
    /// Layer of the expert.
    pub layer: usize,
    /// The move.
    pub action: Action,
    /// Microseconds that it is predicted to save.
    pub benefit_us: f64,
    /// Microseconds for which it occupies the resource that it uses most: PCIe, or a link between memories.
    pub time_us: f64,
    /// Its end.
    pub(crate) ends: Ends,
}

/// Schedule of one step of one layer.
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
    /// Time of each memory's NDP unit, without contention.
    pub near_us: Vec<f64>,
    /// Moves for the next layer.
    pub moves: Vec<Move>,
    /// Whether the experts of a prompt are all on the GPU, and those that it does not hold are streamed
    /// through its frames (TriMoE, §4.1).
    pub streamed: bool,
}

/// An expert of a prompt that is streamed through a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Streamed {
    /// Expert.
    pub expert: u16,
    /// Layer whose frame it gets.
    pub layer: usize,
    /// Expert of that layer that the frame held.
    pub evicts: Option<u16>,
}
