//! The place where all threads of a program meet between steps.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Time that a thread spins before it sleeps. Steps last tens of microseconds; a wake-up costs as much.
const SPIN: Duration = Duration::from_micros(20);

/// Pauses, about a microsecond, between two looks at the clock. Then the core is offered to others: on a
/// busy machine the missing thread may be waiting for this very core, and spinning without that is several
/// times slower than sleeping at once. Where no thread wants the core, the offer costs next to nothing.
const PAUSES: u32 = 64;

/// A sense-reversing barrier: the sense is the parity of `generation`. It spins briefly, then sleeps, so
/// that a thread which lost its core is not starved by those that wait for it.
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
    /// A barrier of `threads` threads. With more threads than cores none spins.
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

    /// Threads that meet.
    pub fn threads(&self) -> usize {
        self.threads
    }

    /// Returns when all threads have called it as often. What any of them wrote before is then visible
    /// to all.
    pub fn wait(&self) {
        if self.threads == 1 {
            return;
        }
        // Cannot change before this thread has arrived.
        let generation = self.generation.load(Ordering::Relaxed);
        if self.arrived.fetch_add(1, Ordering::AcqRel) + 1 == self.threads {
            self.arrived.store(0, Ordering::Relaxed);
            // Sequentially consistent with the sleeper's increment and look: either it sees the new
            // generation, or it is seen here and woken. A read-modify-write, because QEMU's user-mode
            // emulation of AArch64 on x86 lets a plain store pass the load that follows (seen in 7.2: 5 of
            // 1000 rounds of Dekker's test), after which a thread would sleep for ever. It costs the same.
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

    /// Every thread adds its number in every round; between two meetings all must see the same sum.
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
                            std::thread::sleep(Duration::from_micros(80)); // make the others fall asleep
                        }
                        barrier.wait();
                    }
                });
            }
        });
    }

    #[test]
    fn nobody_runs_ahead() {
        for (threads, rounds) in [(1, 10), (2, 5000), (3, 2000), (7, 500)] {
            stress(threads, rounds);
        }
    }
}
