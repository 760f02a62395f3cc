//! Work on all cores whose results are returned in order, with a bound on the number of unfinished jobs.
//!
//! A worker takes a job and a buffer together, so the buffers bound the unfinished jobs. The worker of the
//! earliest job always has a buffer: results that wait for an earlier one wait for a running worker.

use std::collections::{BTreeMap, VecDeque};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError, mpsc};
use std::thread;

/// Jobs that are known before it is their turn.
const AHEAD: usize = 16;

/// Buffers per worker: one is filled while others wait, are written or are hashed.
const PER_WORKER: usize = 3;

/// Jobs, and the buffers for what they give.
pub(super) struct Jobs<I: Iterator> {
    remaining: Mutex<RemainingJobs<I>>,
    freed: Condvar,
    workers: usize,
}

struct RemainingJobs<I: Iterator> {
    jobs: I,
    ahead: VecDeque<I::Item>,
    /// Number of the next job.
    next: usize,
    free: Vec<Vec<u8>>,
    /// Whether the queue is closed: no more results are taken.
    over: bool,
}

/// A job that a worker has taken.
struct ClaimedJob<J> {
    number: usize,
    job: J,
    buffer: Vec<u8>,
    /// Jobs that are not announced yet.
    new_jobs: Vec<J>,
}

impl<J: Clone + Send, I: Iterator<Item = J> + Send> Jobs<I> {
    /// Creates a queue for this many threads.
    pub(super) fn new(jobs: I, workers: usize) -> Self {
        let workers = workers.max(1);
        let free = vec![Vec::new(); workers * PER_WORKER + 1];
        let remaining = RemainingJobs { jobs, ahead: VecDeque::new(), next: 0, free, over: false };
        Self { remaining: Mutex::new(remaining), freed: Condvar::new(), workers }
    }

    fn remaining(&self) -> MutexGuard<'_, RemainingJobs<I>> {
        self.remaining.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The next job, as soon as there is a buffer for it; `None` where there is no more to do.
    fn take(&self) -> Option<ClaimedJob<J>> {
        let waits = |remaining: &mut RemainingJobs<I>| remaining.free.is_empty() && !remaining.over;
        let mut remaining =
            self.freed.wait_while(self.remaining(), waits).unwrap_or_else(PoisonError::into_inner);
        let remaining = &mut *remaining;
        if remaining.over {
            return None;
        }
        let known = remaining.ahead.len();
        remaining.ahead.extend(remaining.jobs.by_ref().take(AHEAD + 1 - known.min(AHEAD)));
        let new_jobs = remaining.ahead.range(known..).cloned().collect();
        let job = remaining.ahead.pop_front()?;
        let number = remaining.next;
        remaining.next += 1;
        Some(ClaimedJob { number, job, buffer: remaining.free.pop()?, new_jobs })
    }

    /// Gives a buffer back.
    pub(super) fn free(&self, mut buffer: Vec<u8>) {
        buffer.clear();
        self.remaining().free.push(buffer);
        self.freed.notify_one();
    }

    /// Executes `work` on every job with an empty buffer, and passes the filled buffers to `take` on this
    /// thread, in the order of the jobs. `expect` is called with every job some time before its turn. Each
    /// worker reuses its own scratch.
    ///
    /// Every buffer must be returned by [`Self::free`], at any time and from any thread: further jobs wait
    /// for it.
    ///
    /// # Errors
    /// The error of the earliest job that fails, after the results before it were taken; the error of `take`,
    /// which ends the run.
    pub(super) fn run<S: Default, E: Send>(
        &self,
        expect: impl Fn(&J) + Sync,
        work: impl Fn(&J, &mut S, &mut Vec<u8>) -> Result<(), E> + Sync,
        mut take: impl FnMut(J, Vec<u8>) -> Result<(), E>,
    ) -> Result<(), E> {
        thread::scope(|scope| {
            let (send, results) = mpsc::channel();
            // If this ends early, no worker may wait for a buffer.
            let _end = End { jobs: self, always: true };
            for _ in 0..self.workers {
                let (send, expect, work) = (send.clone(), &expect, &work);
                scope.spawn(move || {
                    let _end = End { jobs: self, always: false };
                    let mut scratch = S::default();
                    while let Some(ClaimedJob { number, job, mut buffer, new_jobs }) = self.take() {
                        new_jobs.iter().for_each(expect);
                        let result = work(&job, &mut scratch, &mut buffer).map(|()| buffer);
                        if send.send((number, job, result)).is_err() {
                            break;
                        }
                    }
                });
            }
            drop(send);
            let (mut early, mut next) = (BTreeMap::new(), 0);
            for (number, job, result) in results {
                early.insert(number, (job, result));
                while let Some((job, result)) = early.remove(&next) {
                    take(job, result?)?;
                    next += 1;
                }
            }
            Ok(())
        })
    }
}

/// Closes the queue when dropped: always, or only during a panic.
struct End<'a, I: Iterator> {
    jobs: &'a Jobs<I>,
    always: bool,
}

impl<I: Iterator> Drop for End<'_, I> {
    fn drop(&mut self) {
        if self.always || thread::panicking() {
            self.jobs.remaining.lock().unwrap_or_else(PoisonError::into_inner).over = true;
            self.jobs.freed.notify_all();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::time::Duration;

    /// Computes the numbers below `n`, of each four the earlier ones slower. Returns the results in order,
    /// and the final result.
    fn run(n: u32, workers: usize, bad: Option<u32>, stop: Option<u32>) -> (Vec<u32>, Result<(), String>) {
        let jobs = Jobs::new(0..n, workers);
        let (mut taken, under_way, started) = (Vec::new(), AtomicUsize::new(0), AtomicUsize::new(0));
        let ended = jobs.run(
            |_| {
                started.fetch_add(1, Ordering::Relaxed);
            },
            |&job, worked: &mut u32, buffer| {
                *worked += 1;
                assert!(buffer.is_empty() && *worked <= n);
                assert!(under_way.fetch_add(1, Ordering::Relaxed) <= workers * PER_WORKER);
                thread::sleep(Duration::from_micros(u64::from(3 - job % 4) * 300));
                buffer.extend(job.to_le_bytes());
                if bad == Some(job) { Err(format!("{job} is bad")) } else { Ok(()) }
            },
            |job, buffer| {
                assert_eq!(buffer, job.to_le_bytes());
                under_way.fetch_sub(1, Ordering::Relaxed);
                taken.push(job);
                jobs.free(buffer);
                if stop == Some(job) { Err("enough".to_owned()) } else { Ok(()) }
            },
        );
        assert!(ended.is_err() || started.into_inner() == n as usize);
        (taken, ended)
    }

    #[test]
    fn results_are_delivered_in_order() {
        for (n, workers) in [(0, 1), (1, 3), (5, 1), (200, 4)] {
            assert_eq!(run(n, workers, None, None), ((0..n).collect(), Ok(())));
        }
    }

    #[test]
    fn first_error_ends_the_run_after_earlier_results() {
        assert_eq!(run(100, 4, Some(41), None), ((0..41).collect(), Err("41 is bad".into())));
        assert_eq!(run(100, 4, None, Some(7)), ((0..8).collect(), Err("enough".into())));
    }

    #[test]
    fn workers_wait_until_buffers_are_returned() {
        let jobs = Jobs::new(0..100, 2);
        let started = AtomicUsize::new(0);
        let (send, kept) = mpsc::channel();
        thread::scope(|scope| {
            let (jobs, started) = (&jobs, &started);
            scope.spawn(move || {
                thread::sleep(Duration::from_millis(20));
                assert!(started.load(Ordering::Relaxed) <= 2 * PER_WORKER + 1);
                for buffer in &kept {
                    jobs.free(buffer);
                }
            });
            let work = |_: &i32, (): &mut (), _: &mut Vec<u8>| {
                started.fetch_add(1, Ordering::Relaxed);
                Ok::<(), ()>(())
            };
            jobs.run(|_| (), work, |_, buffer| send.send(buffer).map_err(drop)).unwrap();
            drop(send);
        });
        assert_eq!(started.into_inner(), 100);
    }

    #[test]
    #[should_panic(expected = "a scoped thread panicked")]
    fn panicking_worker_does_not_block_the_others() {
        let jobs = Jobs::new(0..100, 2);
        let work = |job: &i32, (): &mut (), _: &mut Vec<u8>| {
            assert!(*job != 3, "not this one");
            Ok::<(), ()>(())
        };
        let _ = jobs.run(
            |_| (),
            work,
            |_, buffer| {
                jobs.free(buffer);
                Ok(())
            },
        );
    }
}
