//! Border between the artifacts of graphs and the cache of cold neurons, which moves with the entry point
//! (PowerInfer-2, §4.2).
//!
//! An entry point that needs more memory for its artifacts gets it at once. One that needs less leaves the
//! border where it is at first: moving it back would read the freed artifacts again. The border moves when
//! the neurons that were read since then amount to these bytes, which is at most twice what the best choice
//! in hindsight reads (ski rental). So calls of two batch sizes in turn read no artifact again.

use moec_ir::plan::{Paging, Regions};

/// See the module.
#[derive(Debug)]
pub(crate) struct Border {
    /// By entry point.
    regions: Vec<Regions>,
    current: Option<Regions>,
    /// Whether the last call needed the current regions.
    needed: bool,
    /// Bytes that had been read from disk after the last such call.
    needed_at: u64,
}

impl Border {
    /// The border of a plan; `None` if its regions are fixed.
    pub(crate) fn new(paging: &Paging) -> Option<Self> {
        let regions = paging.regions.clone();
        (!regions.is_empty()).then_some(Self { regions, current: None, needed: false, needed_at: 0 })
    }

    /// The regions for a call of an entry point, and whether they are others than before. `read`: bytes that
    /// were read from disk so far.
    pub(crate) fn enter(&mut self, entry: usize, read: u64) -> Option<(Regions, bool)> {
        let own = *self.regions.get(entry)?;
        if std::mem::take(&mut self.needed) {
            self.needed_at = read;
        }
        let freed = self.current.and_then(|current| current.graphs.checked_sub(own.graphs));
        let pays = freed.is_none_or(|freed| read.saturating_sub(self.needed_at) >= freed);
        let moves = self.current != Some(own) && pays;
        if moves {
            self.current = Some(own);
        }
        self.needed = self.current == Some(own);
        Some((self.current?, moves))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn border(regions: &[(u64, u32)]) -> Border {
        let regions = regions.iter().map(|&(graphs, frames)| Regions { graphs, frames }).collect();
        Border { regions, current: None, needed: false, needed_at: 0 }
    }

    #[test]
    fn larger_batches_move_the_border_at_once_and_smaller_ones_when_it_pays() {
        let mut border = border(&[(100, 9), (300, 1)]);
        let mut enter = |entry, read| border.enter(entry, read).map(|(r, moved)| (r.frames, moved));
        assert_eq!(enter(0, 0), Some((9, true)));
        assert_eq!(enter(0, 50), Some((9, false)));
        assert_eq!(enter(1, 60), Some((1, true)));
        // Moving back frees 200 bytes of artifacts. Reads of the larger batch do not count.
        assert_eq!(enter(0, 400), Some((1, false)));
        assert_eq!(enter(0, 599), Some((1, false)));
        assert_eq!(enter(0, 600), Some((9, true)));
        assert_eq!(enter(2, 600), None);
    }

    /// Batch sizes in turn do not move it, however much they read.
    #[test]
    fn alternating_batches_leave_the_border() {
        let mut border = border(&[(100, 9), (300, 1)]);
        let moved: Vec<bool> = (0..20)
            .filter_map(|i| border.enter((i + 1) % 2, 150 * i as u64))
            .map(|(_, moved)| moved)
            .collect();
        assert!(moved[0] && moved[1..].iter().all(|moved| !moved), "{moved:?}");
    }
}
