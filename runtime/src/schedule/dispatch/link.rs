//! Transfers to the memory of a unit: one queue in the order of submission, beside all steps.
//!
//! In a call one thread serves the link. The dispatcher gives it jobs, and steps that read what was brought wait for a job's
//! ticket. Outside of a call no thread serves it: a job is done at once.

use crate::exec::beside::forget;
use crate::exec::unit::Unit;
use crate::offload::cache::Key;
use crate::offload::paging::Above;
use crate::platform::memory::Addr;
use std::collections::VecDeque;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

/// A matrix on its way.
#[derive(Clone, Copy, Debug)]
pub(super) struct Way {
    /// In the CPU's memory.
    pub(super) from: Addr,
    /// In the unit's.
    pub(super) to: Addr,
    /// Entry of the unit's table that then names it.
    pub(super) entry: Addr,
    pub(super) bytes: usize,
}

/// All matrices of an expert.
#[derive(Debug)]
pub(super) struct Job {
    pub(super) ways: Vec<Way>,
    /// Whether its pages are given back then: a budget has no room for them.
    pub(super) forgets: bool,
}

impl Job {
    /// # Safety
    /// As [`Link::push`].
    unsafe fn run(&self, unit: &dyn Unit) {
        for way in &self.ways {
            let slot = Addr::read_only((&raw const way.to).cast());
            // SAFETY: the caller's promise: the table names the place once its bytes are there.
            unsafe {
                unit.copy(way.from, way.to, way.bytes);
                unit.copy(slot, way.entry, size_of::<Addr>());
            }
            if self.forgets {
                forget(way.from, way.bytes);
            }
        }
    }
}

#[derive(Debug, Default)]
struct State {
    queue: VecDeque<Job>,
    /// Jobs that were told, and those that are done.
    told: u64,
    done: u64,
    served: bool,
}

/// The link to a unit's memory.
#[derive(Debug, Default)]
pub(crate) struct Link {
    state: Mutex<State>,
    wake: Condvar,
    /// Experts that have left the host's memory since the last query.
    gone: Mutex<Vec<Key>>,
}

impl Link {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A call begins: from now on jobs wait for [`Self::serve`].
    pub(crate) fn open(&self) {
        self.lock().served = true;
    }

    /// No more jobs come in this call.
    pub(crate) fn close(&self) {
        self.lock().served = false;
        self.wake.notify_all();
    }

    /// Does what is told until the link is closed and nothing is left.
    ///
    /// # Safety
    /// As [`Self::push`], of all jobs.
    pub(crate) unsafe fn serve(&self, unit: &dyn Unit) {
        let mut state = self.lock();
        loop {
            let Some(job) = state.queue.pop_front() else {
                if !state.served {
                    return;
                }
                state = self.wake.wait(state).unwrap_or_else(PoisonError::into_inner);
                continue;
            };
            drop(state);
            // SAFETY: the caller's promise.
            unsafe { job.run(unit) };
            state = self.lock();
            state.done += 1;
            self.wake.notify_all();
        }
    }

    /// Tells it a job; gives its ticket.
    ///
    /// # Safety
    /// All places have their bytes until the job is done; nothing reads where it writes before its ticket is over.
    pub(super) unsafe fn push(&self, job: Job, unit: &dyn Unit) -> u64 {
        let mut state = self.lock();
        state.told += 1;
        let ticket = state.told;
        if state.served {
            state.queue.push_back(job);
            self.wake.notify_all();
        } else {
            state.done += 1;
            drop(state);
            // SAFETY: the caller's promise.
            unsafe { job.run(unit) };
        }
        ticket
    }

    /// Returns when a job is done, and all before it.
    pub(super) fn wait(&self, ticket: u64) {
        let mut state = self.lock();
        while state.done < ticket {
            state = self.wake.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// The ticket of the last job.
    pub(super) fn last(&self) -> u64 {
        self.lock().told
    }

    /// Writes the experts that have left since the last call into `to`.
    pub(super) fn take_gone(&self, to: &mut Vec<Key>) {
        to.append(&mut self.gone.lock().unwrap_or_else(PoisonError::into_inner));
    }
}

impl Above for Link {
    fn left(&self, key: Key) {
        self.gone.lock().unwrap_or_else(PoisonError::into_inner).push(key);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::exec::unit::{Lane, Launch};
    use moec_ir::plan::Builtin;

    struct Copies;

    impl Unit for Copies {
        fn name(&self) -> &'static str {
            "copies"
        }

        fn executes(&self, _: Builtin) -> bool {
            false
        }

        unsafe fn submit(&self, _: &Launch<'_>, _: Lane) {}
    }

    /// A thread that waits for a ticket sees its bytes, and the table names them; without a serving thread a job is done at once.
    #[test]
    fn what_is_told_is_done_in_order() {
        const JOBS: usize = 500;
        let link = Link::default();
        let from: Vec<u64> = (0..JOBS as u64).map(|i| i * 7 + 1).collect();
        let mut to = vec![0_u64; JOBS];
        let mut table = vec![Addr::read_only(std::ptr::null()); JOBS];
        let (to_at, table_at) = (to.as_mut_ptr(), table.as_mut_ptr());
        let job = |i: usize| Job {
            ways: vec![Way {
                from: Addr::read_only(from[i..].as_ptr().cast()),
                to: Addr::read_only(to_at.wrapping_add(i).cast()),
                entry: Addr::read_only(table_at.wrapping_add(i).cast()),
                bytes: 8,
            }],
            forgets: false,
        };
        // SAFETY: every job has places of its own, which are read below when its ticket is over.
        unsafe {
            assert_eq!(link.push(job(0), &Copies), 1);
            link.wait(1);
            link.open();
            std::thread::scope(|scope| {
                scope.spawn(|| link.serve(&Copies));
                for (i, sent) in from.iter().enumerate().skip(1) {
                    let ticket = link.push(job(i), &Copies);
                    if i % 17 == 0 {
                        link.wait(ticket);
                        assert_eq!(to_at.add(i).read(), *sent);
                    }
                }
                link.close();
            });
        }
        assert_eq!(link.last(), JOBS as u64);
        assert_eq!(to, from);
        assert!(table.iter().zip(&to).all(|(at, place)| at.ptr().addr() == (&raw const *place).addr()));
    }
}
