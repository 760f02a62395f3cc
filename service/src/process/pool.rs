//! Processes that wait for work of one kind, and go back when it is done.

use super::{End, PATIENCE, Process};
use crate::error::{Error, Result};
use std::io::{self, ErrorKind};
use std::sync::{Arc, Mutex, PoisonError};

/// Reply of a worker to a request: the result, or the reason that there is none.
pub(crate) type Reply = std::result::Result<Vec<u8>, String>;

/// Processes of one job that have nothing to do. As many are started as are taken at a time: the caller bounds their
/// number.
#[derive(Debug)]
pub(crate) struct Pool {
    job: &'static str,
    /// Opening that a process is sent before its first request, which it answers with one reply; nothing: it needs none.
    opening: Vec<Arc<[u8]>>,
    idle: Mutex<Vec<Idle>>,
}

/// A process, and what has passed between it and this one.
#[derive(Debug)]
struct Idle {
    process: Process,
    /// Whether it has had the opening messages.
    is_open: bool,
    /// Replies that it still sends and that are not read.
    owed: usize,
}

impl Pool {
    /// Processes for a job of [`worker`](crate::worker)'s table.
    pub(crate) fn new(job: &'static str, opening: Vec<Arc<[u8]>>) -> Arc<Self> {
        Arc::new(Self { job, opening, idle: Mutex::default() })
    }

    /// A process that has nothing to do, or a new one.
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
            None => Idle { process: Process::start(self.job)?, is_open: self.opening.is_empty(), owed: 0 },
        };
        Ok(Worker { taken: Some(taken), pool: Arc::clone(self) })
    }

    /// Number of idle processes.
    #[cfg(test)]
    pub(crate) fn idle(&self) -> usize {
        self.idle.lock().unwrap_or_else(PoisonError::into_inner).len()
    }
}

/// A process of a pool. It goes back with the value, unless it has ended: a process that exceeds a limit is ended by the
/// operating system, and from then on every request fails.
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
    pub(crate) fn end(&self) -> Result<End> {
        self.taken.as_ref().ok_or_else(|| self.ended(&ErrorKind::BrokenPipe.into()))?.process.end()
    }

    /// Gives it the opening messages, if it has not had them, and reads what it still had to say to others.
    ///
    /// # Errors
    /// What it says of the opening messages; it has ended.
    pub(crate) fn open(&mut self) -> Result<()> {
        let opening = self.pool.opening.clone();
        let opened = self.with(|idle| {
            let link = &mut idle.process.link;
            if !std::mem::replace(&mut idle.is_open, true) {
                opening.iter().try_for_each(|message| link.send(message))?;
                return Ok(link.replied(2 * PATIENCE)?.map(drop));
            }
            for _ in 0..std::mem::take(&mut idle.owed) {
                // Work that was given up has no use for it, be it an error or not.
                let _ = link.replied(PATIENCE)?;
            }
            Ok(Ok(()))
        });
        match opened {
            Ok(Ok(())) => Ok(()),
            // It has ended by itself, or will.
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
        self.with(|idle| idle.process.link.replied(PATIENCE))
    }

    /// Says that so many replies are not going to be read.
    pub(crate) fn owes(&mut self, replies: usize) {
        if let Some(idle) = &mut self.taken {
            idle.owed = replies;
        }
    }

    /// Does something with the process. Where that fails, the process has ended or is ended.
    fn with<T>(&mut self, what: impl FnOnce(&mut Idle) -> io::Result<T>) -> io::Result<T> {
        let mut idle = self.taken.take().ok_or(ErrorKind::BrokenPipe)?;
        let done = what(&mut idle)?;
        self.taken = Some(idle);
        Ok(done)
    }

    fn ended(&self, e: &io::Error) -> Error {
        Error::new(format!("the process that works on {} has ended: {e}", self.pool.job))
    }

    /// The number of its process.
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
