//! Progress of other threads, which a thread without work waits for.

use super::barrier::{PAUSES, SPIN};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Longest sleep. A thread that misses a change notices it then.
const SLEEP: Duration = Duration::from_micros(200);

/// A count of changes. Threads spin briefly until it changes, then sleep, as at a
/// [`Barrier`](super::barrier::Barrier).
#[derive(Debug, Default)]
pub(crate) struct Progress {
    changes: AtomicUsize,
    sleepers: AtomicUsize,
    lock: Mutex<()>,
    wake: Condvar,
}

impl Progress {
    /// Number of changes so far.
    pub(crate) fn now(&self) -> usize {
        self.changes.load(Ordering::Acquire)
    }

    /// Counts a change, and wakes threads that sleep.
    pub(crate) fn advance(&self) {
        self.changes.fetch_add(1, Ordering::SeqCst);
        if self.sleepers.load(Ordering::SeqCst) > 0 {
            drop(self.lock.lock().unwrap_or_else(PoisonError::into_inner));
            self.wake.notify_all();
        }
    }

    /// Returns when there were changes after `seen`, or after a short sleep.
    pub(crate) fn wait(&self, seen: usize) {
        let start = Instant::now();
        while start.elapsed() < SPIN {
            for _ in 0..PAUSES {
                if self.now() != seen {
                    return;
                }
                std::hint::spin_loop();
            }
            std::thread::yield_now();
        }
        let guard = self.lock.lock().unwrap_or_else(PoisonError::into_inner);
        self.sleepers.fetch_add(1, Ordering::SeqCst);
        if self.changes.load(Ordering::SeqCst) == seen {
            drop(self.wake.wait_timeout(guard, SLEEP).unwrap_or_else(PoisonError::into_inner));
        }
        self.sleepers.fetch_sub(1, Ordering::SeqCst);
    }
}
