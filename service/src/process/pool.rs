//! Pools of processes for one kind of work.

use super::{KillHandle, Process, REPLY_TIMEOUT};
use crate::error::{Error, Result};
use std::io::{self, ErrorKind};
use std::sync::{Arc, Mutex, PoisonError};

/// Reply of a worker to a request: the result, or the reason that there is none.
pub(crate) type Reply = std::result::Result<Vec<u8>, String>;

/// Idle processes of one job. There are as many processes as are taken at a time: the caller bounds their
/// number.
#[derive(Debug)]
pub(crate) struct Pool {
    job: &'static str,
    /// Opening messages that a process is sent before its first request, and answers with one reply; empty:
    /// it needs none.
    opening: Vec<Arc<[u8]>>,
    idle: Mutex<Vec<Idle>>,
}

/// A process, with the state of its connection.
#[derive(Debug)]
struct Idle {
    process: Process,
    /// Whether it has received the opening messages.
    is_open: bool,
    /// Number of replies that it still sends and that were not read.
    unread_replies: usize,
}

impl Pool {
    /// Creates a pool for a job in [`worker`](crate::worker)'s table.
    pub(crate) fn new(job: &'static str, opening: Vec<Arc<[u8]>>) -> Arc<Self> {
        Arc::new(Self { job, opening, idle: Mutex::default() })
    }

    /// Takes an idle process, or starts one.
    ///
    /// # Errors
    /// It cannot be started.
    pub(crate) fn take(self: &Arc<Self>) -> Result<Worker> {
        let mut idle = self.idle.lock().unwrap_or_else(PoisonError::into_inner);
        let alive =
            std::iter::from_fn(|| idle.pop()).find_map(|mut idle| idle.process.is_alive().then_some(idle));
        drop(idle);
        let taken = match alive {
            Some(idle) => idle,
            None => Idle {
                process: Process::start(self.job)?,
                is_open: self.opening.is_empty(),
                unread_replies: 0,
            },
        };
        Ok(Worker { taken: Some(taken), pool: Arc::clone(self) })
    }

    /// Number of idle processes.
    #[cfg(test)]
    pub(crate) fn idle(&self) -> usize {
        self.idle.lock().unwrap_or_else(PoisonError::into_inner).len()
    }
}

/// A process taken from a pool. It returns to the pool when dropped, unless it has ended. The operating
/// system ends a process that exceeds a limit; from then on every request fails.
#[derive(Debug)]
pub(crate) struct Worker {
    taken: Option<Idle>,
    pool: Arc<Pool>,
}

impl Worker {
    /// Handle that ends it.
    ///
    /// # Errors
    /// Too many files are open; it has ended.
    pub(crate) fn end(&self) -> Result<KillHandle> {
        self.taken.as_ref().ok_or_else(|| self.ended(&ErrorKind::BrokenPipe.into()))?.process.end()
    }

    /// Sends the opening messages, if it has not received them, and reads the replies that were left over.
    ///
    /// # Errors
    /// Its error about the opening messages; it has ended.
    pub(crate) fn open(&mut self) -> Result<()> {
        let opening = self.pool.opening.clone();
        let opened = self.with(|idle| {
            let link = &mut idle.process.link;
            if !std::mem::replace(&mut idle.is_open, true) {
                opening.iter().try_for_each(|message| link.send(message))?;
                return Ok(link.receive_reply(2 * REPLY_TIMEOUT)?.map(drop));
            }
            for _ in 0..std::mem::take(&mut idle.unread_replies) {
                // Cancelled work does not need its reply, even if it is an error.
                let _ = link.receive_reply(REPLY_TIMEOUT)?;
            }
            Ok(Ok(()))
        });
        match opened {
            Ok(Ok(())) => Ok(()),
            // It has ended by itself, or will end.
            Ok(Err(why)) => {
                self.taken = None;
                Err(Error::new(why))
            }
            Err(e) => Err(self.ended(&e)),
        }
    }

    /// Sends a request.
    ///
    /// # Errors
    /// It has ended.
    pub(crate) fn send(&mut self, request: &[u8]) -> io::Result<()> {
        self.with(|idle| idle.process.link.send(request))
    }

    /// Waits for the next reply.
    ///
    /// # Errors
    /// It has ended.
    pub(crate) fn reply(&mut self) -> io::Result<Reply> {
        self.with(|idle| idle.process.link.receive_reply(REPLY_TIMEOUT))
    }

    /// Records that this many replies will not be read.
    pub(crate) fn skip_replies(&mut self, replies: usize) {
        if let Some(idle) = &mut self.taken {
            idle.unread_replies = replies;
        }
    }

    /// Runs a function on the process. If it fails, the process has ended or is ended.
    fn with<T>(&mut self, what: impl FnOnce(&mut Idle) -> io::Result<T>) -> io::Result<T> {
        let mut idle = self.taken.take().ok_or(ErrorKind::BrokenPipe)?;
        let done = what(&mut idle)?;
        self.taken = Some(idle);
        Ok(done)
    }

    fn ended(&self, e: &io::Error) -> Error {
        Error::new(format!("the process that works on {} has ended: {e}", self.pool.job))
    }

    /// Its process id.
    #[cfg(test)]
    pub(crate) fn id(&self) -> Option<u32> {
        self.taken.as_ref().map(|idle| idle.process.id())
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        if let Some(idle) = self.taken.take() {
            self.pool.idle.lock().unwrap_or_else(PoisonError::into_inner).push(idle);
        }
    }
}
