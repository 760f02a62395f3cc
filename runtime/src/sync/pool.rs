//! A small thread pool: one wake per call, after which all threads run the same code.

use crate::error::{Error, Result};
use crate::platform::cpu::{self, CoreSet};
use crate::sync::barrier::Barrier;
use std::cell::UnsafeCell;
use std::sync::{Arc, OnceLock};
use std::thread::JoinHandle;

/// Job of all threads, given their index and the barrier between steps.
type Job = dyn Fn(usize, &Barrier) + Sync;

struct Shared {
    /// Barrier of threads between steps.
    barrier: Barrier,
    /// Barrier of all threads before and after a job.
    gate: Barrier,
    /// Written by thread 0 while all other threads wait at the gate; they read it after the gate.
    job: UnsafeCell<Option<*const Job>>,
}

// SAFETY: `job` is written only by thread 0 (there is one: `Pool::run` borrows mutably) while every other
// thread waits at the gate, which orders that write before their reads. The pointee is `Sync`.
unsafe impl Sync for Shared {}
// SAFETY: as above; no part of it is bound to one thread.
unsafe impl Send for Shared {}

/// CPU threads, which walk steps together, and the threads of other units, which walk on their own. The
/// caller of [`Pool::run`] is thread 0.
pub struct Pool {
    shared: Arc<Shared>,
    handles: Vec<JoinHandle<()>>,
    binding: Binding,
}

/// Cores that the CPU threads of a pool are bound to.
#[derive(Clone, Copy, Debug)]
pub enum Binding {
    /// Any.
    None,
    /// To each thread a core of its own, except to the caller's.
    Each,
    /// To all threads these cores; to the caller's while it runs a job.
    Within(CoreSet),
}

impl Pool {
    /// A pool of `threads` CPU threads, including the caller's, and of `others` others, which are bound to
    /// no core. With [`Binding::Each`] the caller's thread is not bound: threads that it starts later would
    /// inherit its binding.
    ///
    /// # Errors
    /// [`Error::Io`] if the operating system refuses to start a thread.
    pub fn new(threads: usize, others: usize, binding: Binding) -> Result<Self> {
        Self::with_others(threads, &vec![None; others], binding)
    }

    /// As [`Pool::new`], with the cores that each of the others is bound to; `None`: any.
    ///
    /// # Errors
    /// As [`Pool::new`].
    pub fn with_others(threads: usize, others: &[Option<CoreSet>], binding: Binding) -> Result<Self> {
        let all = threads.max(1) + others.len();
        let shared = Arc::new(Shared {
            barrier: Barrier::new(threads.max(1)),
            gate: Barrier::new(all),
            job: UnsafeCell::new(None),
        });
        // No thread enters the barrier before all threads exist: with one missing it would never open.
        let complete = Arc::new(OnceLock::new());
        let mut handles = Vec::new();
        for index in 1..all {
            let (shared, gate) = (Arc::clone(&shared), Arc::clone(&complete));
            let own =
                index.checked_sub(threads.max(1)).and_then(|other| others.get(other).copied().flatten());
            let body = move || {
                if *gate.wait() {
                    match binding {
                        Binding::Each if index < threads => cpu::pin(index),
                        Binding::Within(cores) if index < threads => _ = cores.bind(),
                        _ => _ = own.map(|cores| cores.bind()),
                    }
                    work(&shared, index);
                }
            };
            match std::thread::Builder::new().name(format!("moec-{index}")).spawn(body) {
                Ok(handle) => handles.push(handle),
                Err(e) => {
                    let _ = complete.set(false);
                    for handle in handles {
                        drop(handle.join());
                    }
                    return Err(Error::thread(e));
                }
            }
        }
        let _ = complete.set(true);
        Ok(Self { shared, handles, binding })
    }

    /// Number of CPU threads, including the caller's.
    pub fn threads(&self) -> usize {
        self.shared.barrier.threads()
    }

    /// Runs `job` on every thread and returns when all are done. CPU threads have the first indexes, the
    /// others follow. All CPU threads must wait at the barrier equally often, and no other thread may. A
    /// panic in a job ends the process: the other threads would wait forever.
    pub fn run(&mut self, job: &(dyn Fn(usize, &Barrier) + Sync)) {
        let barrier = &self.shared.barrier;
        if !self.handles.is_empty() {
            #[allow(clippy::transmute_ptr_to_ptr, reason = "a cast cannot lengthen the lifetime")]
            // SAFETY: only the lifetime changes; all threads are done with the job when `run` returns.
            let job = unsafe {
                std::mem::transmute::<*const (dyn Fn(usize, &Barrier) + Sync + '_), *const Job>(job)
            };
            self.post(Some(job));
        }
        let own = match self.binding {
            Binding::Within(cores) => CoreSet::of_this_thread().filter(|own| *own != cores && cores.bind()),
            _ => None,
        };
        let guard = AbortOnPanic;
        job(0, barrier);
        std::mem::forget(guard);
        self.shared.gate.wait();
        if let Some(own) = own {
            own.bind();
        }
    }

    fn post(&self, job: Option<*const Job>) {
        // SAFETY: every other thread waits at the gate (or will, before it reads) and this is thread 0.
        unsafe { *self.shared.job.get() = job };
        self.shared.gate.wait();
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        if !self.handles.is_empty() {
            self.post(None);
        }
        for handle in self.handles.drain(..) {
            drop(handle.join());
        }
    }
}

fn work(shared: &Shared, thread: usize) {
    loop {
        shared.gate.wait();
        // SAFETY: thread 0 wrote it before the gate above and writes again only after the next one.
        let Some(job) = (unsafe { *shared.job.get() }) else { return };
        let guard = AbortOnPanic;
        // SAFETY: `run` keeps the job alive until this thread has reached the gate below.
        unsafe { (*job)(thread, &shared.barrier) };
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
    fn every_thread_runs_every_job() {
        for threads in [1, 2, 3, 5] {
            let mut pool = Pool::new(threads, 0, Binding::None).unwrap();
            assert_eq!(pool.threads(), threads);
            let (first, second) = (AtomicUsize::new(0), AtomicUsize::new(0));
            for round in 1..=300 {
                pool.run(&|thread, barrier| {
                    first.fetch_add(thread + 1, Ordering::Relaxed);
                    barrier.wait();
                    assert_eq!(first.load(Ordering::Relaxed), round * threads * (threads + 1) / 2);
                    barrier.wait();
                    second.fetch_add(1, Ordering::Relaxed);
                });
                assert_eq!(second.load(Ordering::Relaxed), round * threads);
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
    fn threads_are_pinned_and_the_caller_is_not() {
        let before = allowed();
        let threads = cpu::cores().min(3);
        let mut pool = Pool::new(threads, 1, Binding::Each).unwrap();
        let seen = std::sync::Mutex::new(vec![String::new(); threads + 1]);
        pool.run(&|thread, _| seen.lock().unwrap()[thread] = allowed());
        let seen = seen.into_inner().unwrap();
        // The caller, threads that it starts later, and threads of other units keep all cores.
        let later = std::thread::spawn(allowed).join().unwrap();
        assert!([&seen[0], &later, &seen[threads]].into_iter().all(|cores| *cores == before), "{seen:?}");
        let mut pinned = seen[1..threads].to_vec();
        pinned.dedup();
        assert_eq!(pinned.len(), threads - 1);
        assert!(pinned.iter().all(|cores| *cores != before), "{pinned:?}");
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn computing_threads_are_bound_to_a_set_of_cores_while_they_run_a_job() {
        let before = allowed();
        let last = CoreSet::of_this_thread().unwrap().cores().last().copied().unwrap();
        let mut pool = Pool::new(3, 1, Binding::Within(CoreSet::of(&[last]))).unwrap();
        let seen = std::sync::Mutex::new(vec![String::new(); 4]);
        for _ in 0..2 {
            pool.run(&|thread, _| seen.lock().unwrap()[thread] = allowed());
            // The caller has all cores again, and the thread of another unit always has.
            assert_eq!(allowed(), before);
            let seen = seen.lock().unwrap();
            assert!(
                seen[..3].iter().all(|cores| *cores == format!("Cpus_allowed_list:\t{last}")),
                "{seen:?}"
            );
            assert_eq!(seen[3], before);
        }
        // Cores that do not exist leave threads as they are.
        let mut pool = Pool::new(2, 0, Binding::Within(CoreSet::of(&[1023, usize::MAX]))).unwrap();
        pool.run(&|_, _| assert_eq!(allowed(), before));
    }

    #[test]
    fn other_units_have_threads_of_their_own() {
        let mut pool = Pool::new(2, 2, Binding::None).unwrap();
        assert_eq!(pool.threads(), 2);
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
