//! Load progress: threads wait here for weights that are still being read.
//!
//! Pieces are read in an order of their own. What is there is a number, how many of them from the front; what a segment
//! needs is one, too. So a step checks with one load, and once all are there an engine does not check at all.

use crate::error::{Error, Result};
use crate::offload::disk::ReadError;
use std::io;
use std::path::PathBuf;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Reason that weights do not come. All waiting threads get it.
#[derive(Clone, Debug)]
pub(super) enum Why {
    /// A piece cannot be read.
    Read(ReadError),
    /// A file is not what the build wrote.
    Changed {
        /// The file.
        path: PathBuf,
        /// SHA-256 that the plan names.
        expected: [u8; 32],
        /// SHA-256 of the file.
        found: [u8; 32],
    },
    /// The thread that reads them has ended.
    Ended,
}

impl Why {
    fn error(&self) -> Error {
        match self.clone() {
            Self::Read(e) => Error::Read(Box::new(e)),
            Self::Changed { path, expected, found } => Error::changed(path, &expected, &found),
            Self::Ended => Error::thread(io::Error::other("the one that reads weights has ended")),
        }
    }
}

/// Progress of loading the weights.
#[derive(Debug)]
pub struct LoadProgress {
    /// Pieces from the front of the order that may be used.
    there: AtomicUsize,
    order: Vec<u32>,
    needs: Vec<usize>,
    state: Mutex<State>,
    news: Condvar,
    start: Instant,
}

#[derive(Debug)]
struct State {
    /// By piece: whether it was read.
    read: Vec<bool>,
    /// By piece: whether it may be used once it was read: not before its file is known to be the right one.
    proven: Vec<bool>,
    why: Option<Why>,
    stop: bool,
    took: Option<Duration>,
}

impl LoadProgress {
    /// Nothing is there yet. `pieces` counts all, `order` those that come, `needs` says by segment how many of these, and
    /// `unproven` which of all may not be used before [`LoadProgress::prove`].
    pub(super) fn new(
        pieces: usize,
        order: Vec<u32>,
        needs: Vec<usize>,
        unproven: impl Iterator<Item = usize>,
    ) -> Self {
        let mut proven = vec![true; pieces];
        unproven.for_each(|piece| proven[piece] = false);
        let state = State { read: vec![false; pieces], proven, why: None, stop: false, took: None };
        let (there, news) = (AtomicUsize::new(0), Condvar::new());
        Self { there, order, needs, state: Mutex::new(state), news, start: Instant::now() }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Number of pieces that must be there before a segment is read, for [`LoadProgress::wait`].
    pub fn needs(&self, segment: u32) -> usize {
        self.needs.get(segment as usize).copied().unwrap_or(0)
    }

    /// Whether all are there.
    pub fn is_complete(&self) -> bool {
        self.there.load(Ordering::Acquire) >= self.order.len()
    }

    /// Waits until so many pieces are there. What was read into them is then visible to the caller.
    ///
    /// # Errors
    /// One of them does not come: [`Error::Read`] where it cannot be read, [`Error::BadFile`] where its file is another one.
    /// A thread that waits for as many from then on gets the same.
    pub fn wait(&self, pieces: usize) -> Result<()> {
        // Acquire: pairs with the store in `advance`.
        if self.there.load(Ordering::Acquire) >= pieces {
            return Ok(());
        }
        let mut state = self.lock();
        while self.there.load(Ordering::Acquire) < pieces {
            if let Some(why) = &state.why {
                return Err(why.error());
            }
            state = self.news.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        Ok(())
    }

    /// Waits until all pieces are there.
    ///
    /// # Errors
    /// As [`LoadProgress::wait`].
    pub fn wait_all(&self) -> Result<()> {
        self.wait(self.order.len())
    }

    /// Whether all that is read so far could be read.
    ///
    /// # Errors
    /// As [`LoadProgress::wait`], without waiting.
    pub fn check(&self) -> Result<()> {
        self.lock().why.as_ref().map_or(Ok(()), |why| Err(why.error()))
    }

    /// From the start until the last piece was there; none before.
    pub fn took(&self) -> Option<Duration> {
        self.lock().took
    }

    /// In which order pieces are to be read.
    pub(super) fn order(&self) -> &[u32] {
        &self.order
    }

    /// A piece was read.
    pub(super) fn read(&self, piece: usize) {
        let mut state = self.lock();
        state.read[piece] = true;
        self.advance(state);
    }

    /// Pieces are those that the build wrote.
    pub(super) fn prove(&self, pieces: impl Iterator<Item = usize>) {
        let mut state = self.lock();
        pieces.for_each(|piece| state.proven[piece] = true);
        self.advance(state);
    }

    /// Lets through what is there. Nothing more once something has failed, so that all threads of a call are given the same.
    fn advance(&self, mut state: MutexGuard<'_, State>) {
        if state.why.is_none() {
            let first = self.there.load(Ordering::Relaxed);
            let ready = |&&piece: &&u32| state.read[piece as usize] && state.proven[piece as usize];
            let there = first + self.order[first..].iter().take_while(ready).count();
            if there == self.order.len() && state.took.is_none() {
                state.took = Some(self.start.elapsed());
            }
            // Release: who sees the number sees the bytes, which were read before.
            self.there.store(there, Ordering::Release);
        }
        drop(state);
        self.news.notify_all();
    }

    /// Nothing more comes. The first reason counts.
    pub(super) fn fail(&self, why: Why) {
        self.lock().why.get_or_insert(why);
        self.news.notify_all();
    }

    /// Waits until a piece was read. False if it will not be, or is no longer needed.
    pub(super) fn was_read(&self, piece: usize) -> bool {
        let mut state = self.lock();
        while !state.read[piece] {
            if state.stop || state.why.is_some() {
                return false;
            }
            state = self.news.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        !state.stop
    }

    /// No more pieces are needed.
    pub(super) fn stop(&self) {
        self.lock().stop = true;
        self.news.notify_all();
    }

    /// Whether to go on reading.
    pub(super) fn is_wanted(&self) -> bool {
        let state = self.lock();
        !state.stop && state.why.is_none()
    }
}
