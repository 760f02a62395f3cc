//! Decision at a dispatch: the unit of each expert of a layer, and the transfers that it needs.

use crate::offload::cache::Key;
use crate::schedule::scheduled::ExpertUnit;

/// Transfer of an expert into a frame of the GPU's memory; the frame's previous expert is evicted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FrameTransfer {
    /// The expert.
    pub key: Key,
    /// Destination frame.
    pub frame: u32,
}

/// Transfer of an expert's weights.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Transfer {
    /// Into a frame of the GPU's memory.
    ToFrame(FrameTransfer),
    /// Within the host's memories: to one of them, or striped over all.
    Relocate {
        /// The expert.
        key: Key,
        /// Destination.
        to: Option<u16>,
    },
}

/// Units of the experts of a layer.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Decision {
    /// By expert; the CPU if it has no tokens.
    pub units: Vec<ExpertUnit>,
    /// Experts of the CPU in the order in which it computes them. Empty: the most loaded first.
    pub cpu_order: Vec<u16>,
    /// Transfers for this layer, in order.
    pub transfers: Vec<Transfer>,
    /// Moves for the next layer, in order: they begin when the experts of this layer have been computed.
    pub moves: Vec<Transfer>,
    /// Experts of this layer whose moves within the host's memories have ended.
    pub moved: Vec<Key>,
    /// Expected time of the layer, in microseconds.
    pub makespan_us: f64,
}

impl Decision {
    /// Empties it, for a layer of this many experts.
    pub(super) fn clear(&mut self, experts: usize) {
        self.units.clear();
        self.units.resize(experts, ExpertUnit::Cpu);
        self.cpu_order.clear();
        self.transfers.clear();
        self.moves.clear();
        self.moved.clear();
        self.makespan_us = 0.0;
    }
}
