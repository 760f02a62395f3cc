//! Work on all cores whose results are wanted in order, with a bound on what is under way.
//!
//! A worker takes a job and a buffer at once, so the buffers bound what is held, and the worker of the
//! earliest job always has one: results that wait for an earlier one wait for a worker that is running.

use std::collections::{BTreeMap, VecDeque};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError, mpsc};
use std::thread;

/// Jobs that are known before it is their turn.
const AHEAD: usize = 16;

/// Buffers per worker: one is filled while others wait, are written or are hashed.
const PER_WORKER: usize = 3;

/// Jobs, and the buffers for what they give.
pub(super) struct Jobs<I: Iterator> {
    left: Mutex<Left<I>>,
    freed: Condvar,
    workers: usize,
}

struct Left<I: Iterator> {
    jobs: I,
    ahead: VecDeque<I::Item>,
    /// Number of the next job.
    next: usize,
    free: Vec<Vec<u8>>,
    /// Closed: no more results are wanted.
    over: bool,
}

/// A job that a worker has taken.
struct ClaimedJob<J> {
    number: usize,
    job: J,
    buffer: Vec<u8>,
    /// Jobs that are not announced yet.
    news: Vec<J>,
}

impl<J: Clone + Send, I: Iterator<Item = J> + Send> Jobs<I> {
    /// For so many threads.
    pub(super) fn new(jobs: I, workers: usize) -> Self {
        let workers = workers.max(1);
        let free = vec![Vec::new(); workers * PER_WORKER + 1];
        let left = Left { jobs, ahead: VecDeque::new(), next: 0, free, over: false };
        Self { left: Mutex::new(left), freed: Condvar::new(), workers }
    }

    fn left(&self) -> MutexGuard<'_, Left<I>> {
        self.left.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The next job, as soon as there is a buffer for it; `None` where there is no more to do.
    fn take(&self) -> Option<ClaimedJob<J>> {
        let waits = |left: &mut Left<I>| left.free.is_empty() && !left.over;
        let mut left = self.freed.wait_while(self.left(), waits).unwrap_or_else(PoisonError::into_inner);
        let left = &mut *left;
        if left.over {
            return None;
        }
        let known = left.ahead.len();
        left.ahead.extend(left.jobs.by_ref().take(AHEAD + 1 - known.min(AHEAD)));
        let news = left.ahead.range(known..).cloned().collect();
        let job = left.ahead.pop_front()?;
        let number = left.next;
        left.next += 1;
        Some(ClaimedJob { number, job, buffer: left.free.pop()?, news })
    }

    /// Gives a buffer back.
    pub(super) fn free(&self, mut buffer: Vec<u8>) {
        buffer.clear();
        self.left().free.push(buffer);
        self.freed.notify_one();
    }

    /// Does `work` on every job and gives what it put into its buffer, which came empty, to `take` on this
    /// thread, in the order of the jobs. `expect` is told of every job some time before its turn. What a
    /// worker keeps from job to job is its own.
    ///
    /// Every buffer must come back by [`Self::free`], at any time and from any thread: the jobs wait for
    /// that.
    ///
    /// # Errors
    /// That of the earliest job that has one, after all before it were taken; that of `take`, which ends it
    /// all.
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
                    let mut kept = S::default();
                    while let Some(ClaimedJob { number, job, mut buffer, news }) = self.take() {
                        news.iter().for_each(expect);
                        let done = work(&job, &mut kept, &mut buffer).map(|()| buffer);
                        if send.send((number, job, done)).is_err() {
                            break;
                        }
                    }
                });
            }
            drop(send);
            let (mut early, mut next) = (BTreeMap::new(), 0);
            for (number, job, done) in results {
                early.insert(number, (job, done));
                while let Some((job, done)) = early.remove(&next) {
                    take(job, done?)?;
                    next += 1;
                }
            }
            Ok(())
        })
    }
}

/// Lets the workers end when it is dropped: always, or when a thread panics.
struct End<'a, I: Iterator> {
    jobs: &'a Jobs<I>,
    always: bool,
}

impl<I: Iterator> Drop for End<'_, I> {
    fn drop(&mut self) {
        if self.always || thread::panicking() {
            self.jobs.left.lock().unwrap_or_else(PoisonError::into_inner).over = true;
            self.jobs.freed.notify_all();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::time::Duration;

    /// Runs numbers below `n`, the earlier of each four the slower. Gives what was taken, and how it ended.
    fn run(n: u32, workers: usize, bad: Option<u32>, stop: Option<u32>) -> (Vec<u32>, Result<(), String>) {
        let jobs = Jobs::new(0..n, workers);
        let (mut taken, under_way, heard) = (Vec::new(), AtomicUsize::new(0), AtomicUsize::new(0));
        let ended = jobs.run(
            |_| {
                heard.fetch_add(1, Ordering::Relaxed);
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
        assert!(ended.is_err() || heard.into_inner() == n as usize);
        (taken, ended)
    }

    #[test]
    fn results_come_in_order() {
        for (n, workers) in [(0, 1), (1, 3), (5, 1), (200, 4)] {
            assert_eq!(run(n, workers, None, None), ((0..n).collect(), Ok(())));
        }
    }

    #[test]
    fn the_first_error_ends_it_after_what_is_before() {
        assert_eq!(run(100, 4, Some(41), None), ((0..41).collect(), Err("41 is bad".into())));
        assert_eq!(run(100, 4, None, Some(7)), ((0..8).collect(), Err("enough".into())));
    }

    #[test]
    fn buffers_that_are_not_given_back_hold_the_workers_up() {
        let jobs = Jobs::new(0..100, 2);
        let begun = AtomicUsize::new(0);
        let (send, kept) = mpsc::channel();
        thread::scope(|scope| {
            let (jobs, begun) = (&jobs, &begun);
            scope.spawn(move || {
                thread::sleep(Duration::from_millis(20));
                assert!(begun.load(Ordering::Relaxed) <= 2 * PER_WORKER + 1);
                for buffer in &kept {
                    jobs.free(buffer);
                }
            });
            let work = |_: &i32, (): &mut (), _: &mut Vec<u8>| {
                begun.fetch_add(1, Ordering::Relaxed);
                Ok::<(), ()>(())
            };
            jobs.run(|_| (), work, |_, buffer| send.send(buffer).map_err(drop)).unwrap();
            drop(send);
        });
        assert_eq!(begun.into_inner(), 100);
    }

    #[test]
    #[should_panic(expected = "a scoped thread panicked")]
    fn a_worker_that_panics_leaves_nobody_waiting() {
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
