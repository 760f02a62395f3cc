//! What is decided at a dispatch: who computes a layer's experts, and whose weights go where for that.

use crate::offload::cache::Key;
use crate::schedule::scheduled::Unit;

/// An expert is brought into a frame of the GPU's memory, whose expert has left it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Bring {
    /// The expert.
    pub key: Key,
    /// Where to.
    pub frame: u32,
}

/// Weights on their way.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Transfer {
    /// Into a frame of the GPU's memory.
    Bring(Bring),
    /// Within the host's memories: to one of them, or striped over all.
    Relocate {
        /// The expert.
        key: Key,
        /// Where to.
        to: Option<u16>,
    },
}

/// Who computes the experts of a layer.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Decision {
    /// By expert; the processor, where it has no tokens.
    pub units: Vec<Unit>,
    /// What is brought for that, and moved for layers to come, in order.
    pub transfers: Vec<Transfer>,
    /// How long the layer is expected to take, in microseconds.
    pub makespan_us: f64,
}

impl Decision {
    /// Empties it, for a layer of so many experts.
    pub(super) fn clear(&mut self, experts: usize) {
        self.units.clear();
        self.units.resize(experts, Unit::Cpu);
        self.transfers.clear();
        self.makespan_us = 0.0;
    }
}
