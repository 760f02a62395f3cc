//! Values that the blocks of a matrix share while it is packed: which columns are outliers, and the factors
//! of its feedback.

use moec_codegen::pack::Feedback;
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

/// Feedback of the matrices that have blocks left, by matrix. The first thread that needs it computes it,
/// others wait for it, and the last block drops it. With blocks in order there are no more of them than
/// threads.
#[derive(Debug)]
pub(crate) struct Shared {
    /// Blocks of a matrix.
    blocks: usize,
    open: Mutex<BTreeMap<usize, Open>>,
}

/// A matrix whose feedback is computed or in use.
#[derive(Debug)]
struct Open {
    /// Blocks that are not packed yet.
    left: usize,
    factors: Once<Feedback>,
    outliers: Once<[u32]>,
}

/// Value that is computed once.
type Once<T> = Arc<OnceLock<Option<Arc<T>>>>;

impl Shared {
    /// Feedback for matrices with this many blocks.
    pub(crate) fn new(blocks: usize) -> Self {
        Self { blocks, open: Mutex::default() }
    }

    fn open(&self) -> MutexGuard<'_, BTreeMap<usize, Open>> {
        self.open.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Factors of a matrix, for one of its blocks.
    pub(crate) fn of(
        &self,
        matrix: usize,
        compute: impl FnOnce() -> Option<Arc<Feedback>>,
    ) -> Option<Arc<Feedback>> {
        let factors = self.matrix(matrix, |open| Arc::clone(&open.factors));
        // The lock is not held, so that other matrices are packed meanwhile.
        factors.get_or_init(compute).clone()
    }

    /// Outliers of a matrix, for one of its blocks; `None` where they could not be computed.
    pub(crate) fn outliers(
        &self,
        matrix: usize,
        compute: impl FnOnce() -> Option<Arc<[u32]>>,
    ) -> Option<Arc<[u32]>> {
        let outliers = self.matrix(matrix, |open| Arc::clone(&open.outliers));
        outliers.get_or_init(compute).clone()
    }

    fn matrix<T>(&self, matrix: usize, get: impl FnOnce(&Open) -> T) -> T {
        let new = || Open { left: self.blocks, factors: Arc::default(), outliers: Arc::default() };
        get(self.open().entry(matrix).or_insert_with(new))
    }

    /// Records that a block of the matrix is packed.
    pub(crate) fn done(&self, matrix: usize) {
        let mut open = self.open();
        let Some(factors) = open.get_mut(&matrix) else { return };
        factors.left = factors.left.saturating_sub(1);
        if factors.left == 0 {
            open.remove(&matrix);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::Shared;
    use moec_codegen::pack::Feedback;
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::thread;

    #[test]
    fn blocks_compute_shared_factors_once_and_free_them() {
        const BLOCKS: usize = 8;
        let (shared, computed) = (Shared::new(BLOCKS), AtomicUsize::new(0));
        let compute = || {
            computed.fetch_add(1, Ordering::Relaxed);
            Feedback::new([(0..1, vec![1.0])]).map(Arc::new)
        };
        let held = shared.of(3, compute).unwrap();
        thread::scope(|scope| {
            for _ in 0..BLOCKS {
                scope.spawn(|| {
                    let mine = shared.of(3, compute).unwrap();
                    assert!(Arc::ptr_eq(&mine, &held));
                    shared.done(3);
                });
            }
        });
        assert_eq!(computed.load(Ordering::Relaxed), 1);
        assert_eq!(Arc::strong_count(&held), 1);
        assert!(!Arc::ptr_eq(&shared.of(4, compute).unwrap(), &held));
        assert_eq!(computed.load(Ordering::Relaxed), 2);
    }
}
