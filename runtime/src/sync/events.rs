//! Events: steps that other units wait for.
//!
//! Threads of one unit wait for each other at barriers. Units wait for each other at events: each step that a
//! step of another unit depends on has one. It occurs when every thread of its unit has done its share.

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Time that a thread spins before it sleeps, as at a barrier.
const SPIN: Duration = Duration::from_micros(20);
/// Pauses between two readings of the clock.
const PAUSES: u32 = 64;

/// The events of one call.
#[derive(Debug)]
pub(crate) struct Events {
    /// Threads that have not arrived yet, by event.
    left: Vec<AtomicUsize>,
    spin: Duration,
    sleepers: AtomicUsize,
    lock: Mutex<()>,
    wake: Condvar,
    /// Nanoseconds that [`Events::wait_timed`] took.
    waited: AtomicU64,
}

impl Events {
    /// Room for at most `most` events per entry point; `threads` counts all threads that walk. With more
    /// threads than cores no thread spins.
    pub(crate) fn new(most: usize, threads: usize) -> Self {
        Self {
            left: (0..most).map(|_| AtomicUsize::new(0)).collect(),
            spin: if threads <= crate::platform::cpu::cores() { SPIN } else { Duration::ZERO },
            sleepers: AtomicUsize::new(0),
            lock: Mutex::new(()),
            wake: Condvar::new(),
            waited: AtomicU64::new(0),
        }
    }

    /// Sets, before a call, the number of threads that each event waits for.
    pub(crate) fn reset(&mut self, threads: impl Iterator<Item = usize>) {
        for (left, threads) in self.left.iter_mut().zip(threads) {
            *left.get_mut() = threads;
        }
    }

    /// Records that a thread has done its share of the step.
    pub(crate) fn arrive(&self, event: usize) {
        // Sequentially consistent with the sleeper's increment and load: either the sleeper sees that no
        // thread is left, or it is seen here and woken.
        if self.left[event].fetch_sub(1, Ordering::SeqCst) == 1 && self.sleepers.load(Ordering::SeqCst) > 0 {
            drop(self.lock.lock().unwrap_or_else(PoisonError::into_inner));
            self.wake.notify_all();
        }
    }

    /// Whether all of these have occurred.
    pub(crate) fn occurred(&self, events: &[usize]) -> bool {
        events.iter().all(|&event| self.left[event].load(Ordering::Acquire) == 0)
    }

    /// Returns when all threads have done their shares. Their earlier writes are then visible.
    pub(crate) fn wait(&self, event: usize) {
        let left = &self.left[event];
        if left.load(Ordering::Acquire) == 0 || self.spin_until(left) {
            return;
        }
        let mut guard = self.lock.lock().unwrap_or_else(PoisonError::into_inner);
        self.sleepers.fetch_add(1, Ordering::SeqCst);
        while left.load(Ordering::SeqCst) > 0 {
            guard = self.wake.wait(guard).unwrap_or_else(PoisonError::into_inner);
        }
        self.sleepers.fetch_sub(1, Ordering::SeqCst);
    }

    /// Waits for several events.
    pub(crate) fn wait_all(&self, events: &[usize]) {
        for &event in events {
            self.wait(event);
        }
    }

    /// Waits for several events, and counts the time.
    pub(crate) fn wait_timed(&self, events: &[usize]) {
        if events.is_empty() {
            return;
        }
        let begin = Instant::now();
        self.wait_all(events);
        let nanoseconds = u64::try_from(begin.elapsed().as_nanos()).unwrap_or(u64::MAX);
        self.waited.fetch_add(nanoseconds, Ordering::Relaxed);
    }

    /// Time of all calls of [`Events::wait_timed`].
    pub(crate) fn waited(&self) -> Duration {
        Duration::from_nanos(self.waited.load(Ordering::Relaxed))
    }

    fn spin_until(&self, left: &AtomicUsize) -> bool {
        if self.spin.is_zero() {
            return false;
        }
        let start = Instant::now();
        while start.elapsed() < self.spin {
            for _ in 0..PAUSES {
                if left.load(Ordering::Acquire) == 0 {
                    return true;
                }
                std::hint::spin_loop();
            }
            std::thread::yield_now();
        }
        false
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Two units hand a number back and forth, each waiting for the other's last step.
    #[test]
    fn writes_before_an_event_are_visible_after_it() {
        const STEPS: usize = 2000;
        for threads in [1, 2, 3] {
            let mut events = Events::new(2 * STEPS, threads + 1);
            events.reset((0..2 * STEPS).map(|i| if i % 2 == 0 { threads } else { 1 }));
            let (events, sum) = (&events, &AtomicUsize::new(0));
            assert!(events.waited().is_zero());
            std::thread::scope(|scope| {
                for _ in 0..threads {
                    scope.spawn(move || {
                        for step in 0..STEPS {
                            if step > 0 {
                                events.wait(2 * step - 1);
                            }
                            sum.fetch_add(1, Ordering::Relaxed);
                            events.arrive(2 * step);
                        }
                    });
                }
                for step in 0..STEPS {
                    events.wait_timed(&[2 * step]);
                    assert_eq!(sum.load(Ordering::Relaxed), (step + 1) * threads);
                    if step % 97 == 0 {
                        std::thread::sleep(Duration::from_micros(80)); // lets the others sleep
                    }
                    events.arrive(2 * step + 1);
                }
            });
            assert!(!events.waited().is_zero());
        }
    }
}
