//! Barrier at which all threads of a program wait between steps.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Time that a thread spins before it sleeps. Steps last tens of microseconds; a wake-up costs as much.
pub(super) const SPIN: Duration = Duration::from_micros(20);

/// Pauses between two readings of the clock, about a microsecond. Then the thread yields its core: on a busy
/// machine the missing thread may be waiting for this very core. Spinning without yielding is then several
/// times slower than sleeping at once. If no thread wants the core, yielding costs almost nothing.
pub(super) const PAUSES: u32 = 64;

/// A sense-reversing barrier: the sense is the parity of `generation`. Threads spin briefly, then sleep, so
/// that they do not starve a thread that lost its core.
#[derive(Debug)]
pub struct Barrier {
    threads: usize,
    spin: Duration,
    arrived: AtomicUsize,
    generation: AtomicUsize,
    sleepers: AtomicUsize,
    lock: Mutex<()>,
    wake: Condvar,
}

impl Barrier {
    /// A barrier of `threads` threads. With more threads than cores no thread spins.
    pub fn new(threads: usize) -> Self {
        Self {
            threads,
            spin: if threads <= crate::platform::cpu::cores() { SPIN } else { Duration::ZERO },
            arrived: AtomicUsize::new(0),
            generation: AtomicUsize::new(0),
            sleepers: AtomicUsize::new(0),
            lock: Mutex::new(()),
            wake: Condvar::new(),
        }
    }

    /// Number of threads.
    pub fn threads(&self) -> usize {
        self.threads
    }

    /// Returns when all threads have called it equally often. Their earlier writes are then visible to all.
    pub fn wait(&self) {
        if self.threads == 1 {
            return;
        }
        // Cannot change before this thread has arrived.
        let generation = self.generation.load(Ordering::Relaxed);
        if self.arrived.fetch_add(1, Ordering::AcqRel) + 1 == self.threads {
            self.arrived.store(0, Ordering::Relaxed);
            // Sequentially consistent with the sleeper's increment and load: either the sleeper sees the new
            // generation, or it is seen here and woken. This is a read-modify-write, because QEMU's user-mode
            // emulation of AArch64 on x86 reorders a plain store with the load that follows. (Seen in 7.2: 5
            // of 1000 rounds of Dekker's test.) A thread would then sleep forever. The cost is the same.
            self.generation.swap(generation.wrapping_add(1), Ordering::SeqCst);
            if self.sleepers.load(Ordering::SeqCst) > 0 {
                drop(self.lock.lock().unwrap_or_else(PoisonError::into_inner));
                self.wake.notify_all();
            }
        } else if !self.spin_past(generation) {
            self.sleep_past(generation);
        }
    }

    fn spin_past(&self, generation: usize) -> bool {
        if self.spin.is_zero() {
            return false;
        }
        let start = Instant::now();
        loop {
            for _ in 0..PAUSES {
                if self.generation.load(Ordering::Acquire) != generation {
                    return true;
                }
                std::hint::spin_loop();
            }
            if start.elapsed() >= self.spin {
                return false;
            }
            std::thread::yield_now();
        }
    }

    fn sleep_past(&self, generation: usize) {
        let mut guard = self.lock.lock().unwrap_or_else(PoisonError::into_inner);
        self.sleepers.fetch_add(1, Ordering::SeqCst);
        while self.generation.load(Ordering::SeqCst) == generation {
            guard = self.wake.wait(guard).unwrap_or_else(PoisonError::into_inner);
        }
        self.sleepers.fetch_sub(1, Ordering::SeqCst);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every thread adds its number in every round; between two barriers all must see the same sum.
    fn stress(threads: usize, rounds: usize) {
        let barrier = Barrier::new(threads);
        let sum = AtomicUsize::new(0);
        let per_round: usize = (1..=threads).sum();
        std::thread::scope(|scope| {
            for thread in 0..threads {
                let (barrier, sum) = (&barrier, &sum);
                scope.spawn(move || {
                    for round in 1..=rounds {
                        sum.fetch_add(thread + 1, Ordering::Relaxed);
                        barrier.wait();
                        assert_eq!(sum.load(Ordering::Relaxed), round * per_round);
                        if (round + thread) % 97 == 0 {
                            std::thread::sleep(Duration::from_micros(80)); // lets the others sleep
                        }
                        barrier.wait();
                    }
                });
            }
        });
    }

    #[test]
    fn barrier_holds_all_threads_until_the_last() {
        for (threads, rounds) in [(1, 10), (2, 5000), (3, 2000), (7, 500)] {
            stress(threads, rounds);
        }
    }
}
