//! Tables of the matrices' current addresses, which kernels read.

use crate::exec::unit::LayerPart;
use crate::platform::memory::Addr;
use std::ptr;
use std::sync::atomic::{AtomicPtr, Ordering};

/// Addresses of every matrix of every expert, or of up and down of every neuron, in the last frame that held
/// it. Neurons whose scales are stored separately have a second address, of the scales.
pub(super) struct Tables(Vec<[Vec<AtomicPtr<u8>>; 2]>);

impl Tables {
    /// Creates tables with so many matrices for each part of a layer.
    pub(super) fn new(layers: impl Iterator<Item = [usize; 2]>) -> Self {
        let empty = |n: usize| (0..n).map(|_| AtomicPtr::new(ptr::null_mut())).collect();
        Self(layers.map(|parts| parts.map(empty)).collect())
    }

    /// The table of a layer's part. Kernels read an entry after they were notified that it is ready.
    pub(super) fn address(&self, layer_part: LayerPart) -> Addr {
        let table = self.0.get(layer_part.layer).and_then(|parts| parts.get(layer_part.part.index()));
        Addr::read_only(table.map_or(ptr::null(), |t| t.as_ptr().cast()))
    }

    pub(super) fn set(&self, layer_part: LayerPart, expert: usize, to: Addr) {
        if let Some(entry) =
            self.0.get(layer_part.layer).and_then(|p| p.get(layer_part.part.index())?.get(expert))
        {
            entry.store(to.ptr(), Ordering::Relaxed);
        }
    }
}
