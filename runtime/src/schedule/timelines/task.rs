//! Input and result of a scheduler.

use crate::schedule::scheduled::ExpertUnit;

/// An expert of a layer that tokens chose.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Task {
    /// Expert.
    pub expert: u16,
    /// Its tokens.
    pub load: u32,
    /// Time when the GPU holds it, in microseconds from now: 0 if it is cached, later while it is in
    /// transfer. `None`: only the host holds it.
    pub held: Option<f64>,
}

/// Times at which the units and the link finish earlier work, in microseconds from now.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Free {
    /// The GPU, after dense parts and shared experts.
    pub gpu: f64,
    /// The CPU.
    pub cpu: f64,
    /// The link, after experts in transfer.
    pub link: f64,
}

/// Time span in which an expert is computed, in microseconds from now.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Run {
    /// Its index among the tasks.
    pub task: usize,
    /// Expert.
    pub expert: u16,
    /// Unit that computes it.
    pub unit: ExpertUnit,
    /// Start and end of its transfer over the link, if it is transferred for this.
    pub transfer: Option<(f64, f64)>,
    /// Start.
    pub start: f64,
    /// End.
    pub end: f64,
}

/// Three timelines.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Timelines {
    /// Every task once: those of the GPU in its order, then those of the CPU in its own.
    pub runs: Vec<Run>,
    /// End of the last expert; the later of [`Free::gpu`] and [`Free::cpu`] without tasks.
    pub makespan: f64,
    /// Times at which the units and the link are done.
    pub done: Free,
}

impl Timelines {
    /// Experts that are transferred, in order.
    pub fn transferred(&self) -> impl Iterator<Item = u16> + '_ {
        self.runs.iter().filter(|r| r.transfer.is_some()).map(|r| r.expert)
    }
}
