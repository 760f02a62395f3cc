//! Transfers to the memory of a unit, or inside of it: one queue for each unit in the order of submission, in
//! parallel to all steps.
//!
//! In a call one thread serves the queue. The dispatcher gives it jobs, and steps that read transferred
//! weights wait for the job's ticket. Outside of a call no thread serves the queue: a job is done at once.

use crate::error::{Error, Result};
use crate::exec::accelerators::forget;
use crate::exec::unit::ComputeUnit;
use crate::offload::cache::Key;
use crate::offload::paging::EvictionListener;
use crate::platform::memory::Addr;
use std::collections::VecDeque;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Transfer of one matrix.
#[derive(Clone, Copy, Debug)]
pub(super) struct MatrixTransfer {
    /// Address in the CPU's memory.
    pub(super) from: Addr,
    /// Address in the unit's memory.
    pub(super) to: Addr,
    /// Entry of the unit's table that is set to the new address.
    pub(super) entry: Addr,
    pub(super) bytes: usize,
}

/// Transfer of an expert.
#[derive(Debug)]
pub(super) enum Job {
    /// Copies all its matrices to the unit's memory.
    Copy {
        /// Its matrices.
        transfers: Vec<MatrixTransfer>,
        /// Whether its pages are released afterwards: a budget has no room for them.
        forgets: bool,
    },
    /// Moves it inside of the unit's memory ([`ComputeUnit::relocate`]).
    Relocate {
        /// Its NDP command streams.
        set: u32,
        /// Expert.
        expert: u32,
        /// Destination.
        to: Option<u32>,
    },
}

impl Job {
    /// Does the transfer; the table of a copied expert is updated.
    ///
    /// # Safety
    /// As [`TransferQueue::push`].
    unsafe fn run(&self, unit: &dyn ComputeUnit) -> Result<()> {
        let (transfers, forgets) = match self {
            Self::Copy { transfers, forgets } => (transfers, *forgets),
            &Self::Relocate { set, expert, to } => return unit.relocate(set, expert, to),
        };
        for transfer in transfers {
            let slot = Addr::read_only((&raw const transfer.to).cast());
            // SAFETY: guaranteed by the caller; the table names the address once its bytes are there.
            unsafe {
                unit.copy(transfer.from, transfer.to, transfer.bytes);
                unit.copy(slot, transfer.entry, size_of::<Addr>());
            }
            if forgets {
                forget(transfer.from, transfer.bytes);
            }
        }
        Ok(())
    }
}

#[derive(Debug, Default)]
struct State {
    queue: VecDeque<Job>,
    /// Number of submitted jobs, and number of those that are done.
    submitted: u64,
    done: u64,
    served: bool,
    /// Whether jobs are timed, and the times since the last query.
    timed: bool,
    times: Vec<Duration>,
    /// The first failure that was not reported.
    failure: Option<Error>,
}

impl State {
    fn fail(&mut self, result: Result<()>) {
        if let Err(e) = result {
            self.failure.get_or_insert(e);
        }
    }
}

/// Queue of transfers to a unit's memory, or inside of it.
#[derive(Debug, Default)]
pub(crate) struct TransferQueue {
    state: Mutex<State>,
    wake: Condvar,
    /// Experts that have left the host's memory since the last query.
    evicted: Mutex<Vec<Key>>,
}

impl TransferQueue {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Begins a call: from now on jobs wait for [`Self::serve`].
    pub(crate) fn open(&self) {
        self.lock().served = true;
    }

    /// Ends the jobs of this call.
    pub(crate) fn close(&self) {
        self.lock().served = false;
        self.wake.notify_all();
    }

    /// Executes jobs until the queue is closed and empty.
    ///
    /// # Safety
    /// As [`Self::push`], for all jobs.
    pub(crate) unsafe fn serve(&self, unit: &dyn ComputeUnit) {
        let mut state = self.lock();
        loop {
            let Some(job) = state.queue.pop_front() else {
                if !state.served {
                    return;
                }
                state = self.wake.wait(state).unwrap_or_else(PoisonError::into_inner);
                continue;
            };
            let begin = state.timed.then(Instant::now);
            drop(state);
            // SAFETY: guaranteed by the caller.
            let result = unsafe { job.run(unit) };
            state = self.lock();
            state.fail(result);
            state.times.extend(begin.map(|begin| begin.elapsed()));
            state.done += 1;
            self.wake.notify_all();
        }
    }

    /// Submits a job; returns its ticket.
    ///
    /// # Safety
    /// All addresses are valid until the job is done; nothing reads its destinations before its ticket is
    /// done.
    pub(super) unsafe fn push(&self, job: Job, unit: &dyn ComputeUnit) -> u64 {
        let mut state = self.lock();
        state.submitted += 1;
        let ticket = state.submitted;
        if state.served {
            state.queue.push_back(job);
            self.wake.notify_all();
        } else {
            state.done += 1;
            drop(state);
            // SAFETY: guaranteed by the caller.
            let result = unsafe { job.run(unit) };
            self.lock().fail(result);
        }
        ticket
    }

    /// Reports the first failure since the last query.
    ///
    /// # Errors
    /// That failure.
    pub(super) fn check(&self) -> Result<()> {
        self.lock().failure.take().map_or(Ok(()), Err)
    }

    /// Waits until a job, and all before it, are done. Returns the last ticket that is.
    pub(super) fn wait(&self, ticket: u64) -> u64 {
        let mut state = self.lock();
        while state.done < ticket {
            state = self.wake.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        state.done
    }

    /// The ticket of the last job that is done.
    pub(super) fn done(&self) -> u64 {
        self.lock().done
    }

    /// Times jobs from now on.
    pub(super) fn begin_timing(&self) {
        self.lock().timed = true;
    }

    /// Times of jobs since the last query.
    pub(super) fn take_times(&self) -> Vec<Duration> {
        std::mem::take(&mut self.lock().times)
    }

    /// The ticket of the last job.
    pub(super) fn last(&self) -> u64 {
        self.lock().submitted
    }

    /// Writes the experts that have left the host's memory since the last call into `to`.
    pub(super) fn take_evicted(&self, to: &mut Vec<Key>) {
        to.append(&mut self.evicted.lock().unwrap_or_else(PoisonError::into_inner));
    }
}

impl EvictionListener for TransferQueue {
    fn left(&self, key: Key) {
        self.evicted.lock().unwrap_or_else(PoisonError::into_inner).push(key);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::exec::unit::{Launch, PoolThread};
    use moec_ir::plan::Builtin;

    struct Copies;

    impl ComputeUnit for Copies {
        fn name(&self) -> &'static str {
            "copies"
        }

        fn executes(&self, _: Builtin) -> bool {
            false
        }

        unsafe fn submit(&self, _: &Launch<'_>, _: PoolThread) {}
    }

    /// A thread that waits for a ticket sees its bytes, and the table names their address. Without a serving
    /// thread a job is done at once.
    #[test]
    fn jobs_are_executed_in_order() {
        const JOBS: usize = 500;
        let queue = TransferQueue::default();
        let from: Vec<u64> = (0..JOBS as u64).map(|i| i * 7 + 1).collect();
        let mut to = vec![0_u64; JOBS];
        let mut table = vec![Addr::read_only(std::ptr::null()); JOBS];
        let (to_at, table_at) = (to.as_mut_ptr(), table.as_mut_ptr());
        let job = |i: usize| Job::Copy {
            transfers: vec![MatrixTransfer {
                from: Addr::read_only(from[i..].as_ptr().cast()),
                to: Addr::read_only(to_at.wrapping_add(i).cast()),
                entry: Addr::read_only(table_at.wrapping_add(i).cast()),
                bytes: 8,
            }],
            forgets: false,
        };
        // SAFETY: every job has addresses of its own, which are read below when its ticket is done.
        unsafe {
            assert_eq!(queue.push(job(0), &Copies), 1);
            queue.wait(1);
            queue.open();
            std::thread::scope(|scope| {
                scope.spawn(|| queue.serve(&Copies));
                for (i, sent) in from.iter().enumerate().skip(1) {
                    let ticket = queue.push(job(i), &Copies);
                    if i % 17 == 0 {
                        queue.wait(ticket);
                        assert_eq!(to_at.add(i).read(), *sent);
                    }
                }
                queue.close();
            });
        }
        assert_eq!(queue.last(), JOBS as u64);
        assert_eq!(to, from);
        assert!(table.iter().zip(&to).all(|(at, place)| at.ptr().addr() == (&raw const *place).addr()));
    }
}
