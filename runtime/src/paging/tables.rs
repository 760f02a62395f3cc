//! Where the matrices of experts are now, as kernels read it.

use crate::memory::Addr;
use crate::unit::Half;
use moec_ir::plan::PagedLayer;
use std::ptr;
use std::sync::atomic::{AtomicPtr, Ordering};

/// An address for every matrix of every expert: of the last frame that held it.
pub(super) struct Tables(Vec<[Vec<AtomicPtr<u8>>; 2]>);

impl Tables {
    pub(super) fn new(layers: &[PagedLayer]) -> Self {
        let empty = |l: &PagedLayer| (0..l.experts).map(|_| AtomicPtr::new(ptr::null_mut())).collect();
        Self(layers.iter().map(|l| [empty(l), empty(l)]).collect())
    }

    /// The table of a layer's part. Kernels read an entry after they were told that it is ready.
    pub(super) fn address(&self, half: Half) -> Addr {
        let table = self.0.get(half.layer).and_then(|parts| parts.get(half.part));
        Addr::read_only(table.map_or(ptr::null(), |t| t.as_ptr().cast()))
    }

    pub(super) fn set(&self, half: Half, expert: usize, to: Addr) {
        if let Some(entry) = self.0.get(half.layer).and_then(|p| p.get(half.part)?.get(expert)) {
            entry.store(to.ptr(), Ordering::Relaxed);
        }
    }
}
