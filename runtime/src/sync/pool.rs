//! A small thread pool: one wake per call, after which all threads run the same code.

use crate::error::{Error, Result};
use crate::platform::cpu;
use crate::sync::barrier::Barrier;
use std::cell::UnsafeCell;
use std::sync::{Arc, OnceLock};
use std::thread::JoinHandle;

/// Job of all threads, given their lane and the barrier between steps.
type Job = dyn Fn(usize, &Barrier) + Sync;

struct Shared {
    /// Barrier of lanes between steps.
    barrier: Barrier,
    /// Barrier of all threads before and after a job.
    gate: Barrier,
    /// Written by lane 0 while all other threads wait at the gate, read by them after it.
    job: UnsafeCell<Option<*const Job>>,
}

// SAFETY: `job` is written only by lane 0 (there is one: `Pool::run` borrows mutably) while every other
// lane waits at the gate, which orders that write before their reads. The pointee is `Sync`.
unsafe impl Sync for Shared {}
// SAFETY: as above; nothing in it belongs to one thread.
unsafe impl Send for Shared {}

/// Threads that walk steps together, the lanes, and those of other units, which walk beside them. The caller of [`Pool::run`]
/// is lane 0.
pub struct Pool {
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
}

impl Pool {
    /// A pool of `lanes` threads, the caller's included, and of `beside` others. With `pin` each lane but the caller's is bound to a
    /// core of its own: what the caller starts later would be bound with it.
    ///
    /// # Errors
    /// [`Error::Io`] if the system starts no more threads.
    pub fn new(lanes: usize, beside: usize, pin: bool) -> Result<Self> {
        let all = lanes.max(1) + beside;
        let shared = Arc::new(Shared {
            barrier: Barrier::new(lanes.max(1)),
            gate: Barrier::new(all),
            job: UnsafeCell::new(None),
        });
        // No thread enters the barrier before all threads exist: with one missing it would never open.
        let complete = Arc::new(OnceLock::new());
        let mut threads = Vec::new();
        for lane in 1..all {
            let (shared, gate) = (Arc::clone(&shared), Arc::clone(&complete));
            let body = move || {
                if *gate.wait() {
                    if pin && lane < lanes {
                        cpu::pin(lane);
                    }
                    work(&shared, lane);
                }
            };
            match std::thread::Builder::new().name(format!("moec-{lane}")).spawn(body) {
                Ok(handle) => threads.push(handle),
                Err(e) => {
                    let _ = complete.set(false);
                    for thread in threads {
                        drop(thread.join());
                    }
                    return Err(Error::thread(e));
                }
            }
        }
        let _ = complete.set(true);
        Ok(Self { shared, threads })
    }

    /// Lanes, the caller's included.
    pub fn lanes(&self) -> usize {
        self.shared.barrier.lanes()
    }

    /// Runs `job` on every thread and returns when all are done: on lanes by their index, on others by the indexes that follow.
    /// Every lane must meet the other lanes equally often, and no other thread may. A panic in a job ends the process: the other lanes would wait for ever.
    pub fn run(&mut self, job: &(dyn Fn(usize, &Barrier) + Sync)) {
        let barrier = &self.shared.barrier;
        if !self.threads.is_empty() {
            #[allow(clippy::transmute_ptr_to_ptr, reason = "a cast cannot lengthen the lifetime")]
            // SAFETY: only the lifetime changes; all lanes are done with the job when `run` returns.
            let job = unsafe {
                std::mem::transmute::<*const (dyn Fn(usize, &Barrier) + Sync + '_), *const Job>(job)
            };
            self.post(Some(job));
        }
        let guard = AbortOnPanic;
        job(0, barrier);
        std::mem::forget(guard);
        self.shared.gate.wait();
    }

    fn post(&self, job: Option<*const Job>) {
        // SAFETY: every other thread waits at the gate (or will, before it reads) and this is lane 0.
        unsafe { *self.shared.job.get() = job };
        self.shared.gate.wait();
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        if !self.threads.is_empty() {
            self.post(None);
        }
        for thread in self.threads.drain(..) {
            drop(thread.join());
        }
    }
}

fn work(shared: &Shared, lane: usize) {
    loop {
        shared.gate.wait();
        // SAFETY: lane 0 wrote it before the meeting above and writes again only after the next one.
        let Some(job) = (unsafe { *shared.job.get() }) else { return };
        let guard = AbortOnPanic;
        // SAFETY: `run` keeps the job alive until this lane has met it at the gate below.
        unsafe { (*job)(lane, &shared.barrier) };
        std::mem::forget(guard);
        shared.gate.wait();
    }
}

/// Ends the process when dropped, that is, when a job unwinds.
struct AbortOnPanic;

impl Drop for AbortOnPanic {
    fn drop(&mut self) {
        std::process::abort();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicUsize, Ordering};

    #[test]
    fn every_lane_runs_every_job() {
        for lanes in [1, 2, 3, 5] {
            let mut pool = Pool::new(lanes, 0, false).unwrap();
            assert_eq!(pool.lanes(), lanes);
            let (first, second) = (AtomicUsize::new(0), AtomicUsize::new(0));
            for round in 1..=300 {
                pool.run(&|lane, barrier| {
                    first.fetch_add(lane + 1, Ordering::Relaxed);
                    barrier.wait();
                    assert_eq!(first.load(Ordering::Relaxed), round * lanes * (lanes + 1) / 2);
                    barrier.wait();
                    second.fetch_add(1, Ordering::Relaxed);
                });
                assert_eq!(second.load(Ordering::Relaxed), round * lanes);
            }
        }
    }

    /// Cores that the calling thread may use.
    #[cfg(target_os = "linux")]
    fn allowed() -> String {
        let status = std::fs::read_to_string("/proc/thread-self/status").unwrap();
        status.lines().find(|l| l.starts_with("Cpus_allowed_list")).unwrap().to_owned()
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn lanes_are_pinned_and_the_caller_is_not() {
        let before = allowed();
        let lanes = cpu::cores().min(3);
        let mut pool = Pool::new(lanes, 1, true).unwrap();
        let seen = std::sync::Mutex::new(vec![String::new(); lanes + 1]);
        pool.run(&|lane, _| seen.lock().unwrap()[lane] = allowed());
        let seen = seen.into_inner().unwrap();
        // The caller, what it starts from now on, and threads of other units keep all cores.
        let later = std::thread::spawn(allowed).join().unwrap();
        assert!([&seen[0], &later, &seen[lanes]].into_iter().all(|cores| *cores == before), "{seen:?}");
        let mut pinned = seen[1..lanes].to_vec();
        pinned.dedup();
        assert_eq!(pinned.len(), lanes - 1);
        assert!(pinned.iter().all(|cores| *cores != before), "{pinned:?}");
    }

    #[test]
    fn others_run_beside_the_lanes() {
        let mut pool = Pool::new(2, 2, false).unwrap();
        assert_eq!(pool.lanes(), 2);
        let seen: Vec<_> = (0..4).map(|_| AtomicUsize::new(0)).collect();
        for round in 1..=100 {
            pool.run(&|thread, barrier| {
                if thread < 2 {
                    barrier.wait();
                }
                seen[thread].fetch_add(1, Ordering::Relaxed);
            });
            assert!(seen.iter().all(|n| n.load(Ordering::Relaxed) == round));
        }
    }
}
