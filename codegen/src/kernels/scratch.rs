//! What a kernel takes of the memory that is its thread's alone.

use super::{attention, cache, expert, multiply, neuron, router};
use crate::machine::Isa;
use crate::spec::KernelSpec;

impl KernelSpec {
    /// Bytes of scratch that one thread needs; the scratch must be aligned to 64 bytes.
    pub fn scratch_bytes(&self, isa: &Isa) -> usize {
        match self {
            Self::CacheWrite { .. } => cache::scratch_bytes(self, isa),
            Self::Attention { .. } => attention::scratch_bytes(self, isa),
            Self::AttentionMerge { splits, .. } => splits * 4,
            Self::Router { desc, .. } => router::scratch_bytes(desc, isa),
            &Self::ExpertGateUp { layout, hidden, format, compute, order, schedule, .. } => {
                let (products, panel) = expert::scratch_bytes(isa, hidden, format, compute, order, schedule);
                products + expert::gathered_bytes(isa, layout.rows, hidden, compute) + panel
            }
            &Self::ExpertDown { inter, format, compute, order, schedule, .. } => {
                let (products, panel) = expert::scratch_bytes(isa, inter, format, compute, order, schedule);
                products + panel
            }
            &Self::Linear { k: depth, format, compute, schedule, .. } => {
                multiply::scratch_bytes(isa, depth, format, compute, schedule)
            }
            Self::NeuronUp { .. } | Self::NeuronGate { .. } | Self::NeuronUpAt { .. } => {
                neuron::up_scratch(isa, self)
            }
            &Self::NeuronPredict { layout, rank, .. } => neuron::predict::scratch_bytes(layout.rows, rank),
            Self::NeuronDown { inter, .. } | Self::NeuronDownAt { inter, .. } => neuron::down_scratch(*inter),
            Self::Recurrence(of) => of.kernel().scratch_bytes(isa),
            _ => 0,
        }
    }
}
