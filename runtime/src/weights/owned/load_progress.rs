//! Load progress: threads wait here for weights that are still being read.
//!
//! Pieces are read in a fixed order. Progress is the number of loaded pieces from the front; a segment needs
//! such a number, too. So a step checks with one atomic load, and once all pieces are loaded an engine does
//! not check at all.

use crate::error::{Error, Result};
use crate::offload::disk::ReadError;
use std::io;
use std::path::PathBuf;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Reason that weights cannot be loaded. All waiting threads get it.
#[derive(Clone, Debug)]
pub(super) enum LoadFailure {
    /// A piece cannot be read.
    Read(ReadError),
    /// A file is not the one that the build wrote.
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

impl LoadFailure {
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
    /// Number of pieces from the front of the order that may be used.
    loaded: AtomicUsize,
    order: Vec<u32>,
    needs: Vec<usize>,
    state: Mutex<State>,
    changed: Condvar,
    start: Instant,
}

#[derive(Debug)]
struct State {
    /// By piece: whether it was read.
    read: Vec<bool>,
    /// By piece: whether its file is verified or needs no check. Only then it may be used.
    verified: Vec<bool>,
    failure: Option<LoadFailure>,
    stop: bool,
    took: Option<Duration>,
}

impl LoadProgress {
    /// Progress without any loaded piece. `pieces` is the number of all pieces; `order` lists those to load.
    /// `needs` has the number of these by segment. `unverified` pieces may not be used before
    /// [`LoadProgress::set_verified`].
    pub(super) fn new(
        pieces: usize,
        order: Vec<u32>,
        needs: Vec<usize>,
        unverified: impl Iterator<Item = usize>,
    ) -> Self {
        let mut verified = vec![true; pieces];
        unverified.for_each(|piece| verified[piece] = false);
        let state = State { read: vec![false; pieces], verified, failure: None, stop: false, took: None };
        let (loaded, changed) = (AtomicUsize::new(0), Condvar::new());
        Self { loaded, order, needs, state: Mutex::new(state), changed, start: Instant::now() }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Number of pieces that must be loaded before a segment is read, for [`LoadProgress::wait`].
    pub fn needs(&self, segment: u32) -> usize {
        self.needs.get(segment as usize).copied().unwrap_or(0)
    }

    /// Whether all pieces are loaded.
    pub fn is_complete(&self) -> bool {
        self.loaded.load(Ordering::Acquire) >= self.order.len()
    }

    /// Waits until `pieces` pieces are loaded. Their content is then visible to the caller.
    ///
    /// # Errors
    /// A piece cannot be loaded: [`Error::Read`] if it cannot be read, [`Error::BadFile`] if its file is
    /// another one. Later calls for as many pieces return the same error.
    pub fn wait(&self, pieces: usize) -> Result<()> {
        // Acquire: pairs with the store in `advance`.
        if self.loaded.load(Ordering::Acquire) >= pieces {
            return Ok(());
        }
        let mut state = self.lock();
        while self.loaded.load(Ordering::Acquire) < pieces {
            if let Some(failure) = &state.failure {
                return Err(failure.error());
            }
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        Ok(())
    }

    /// Waits until all pieces are loaded.
    ///
    /// # Errors
    /// As [`LoadProgress::wait`].
    pub fn wait_all(&self) -> Result<()> {
        self.wait(self.order.len())
    }

    /// Checks that no read has failed so far.
    ///
    /// # Errors
    /// As [`LoadProgress::wait`], without waiting.
    pub fn check(&self) -> Result<()> {
        self.lock().failure.as_ref().map_or(Ok(()), |failure| Err(failure.error()))
    }

    /// Time from the start until the last piece was loaded; `None` before that.
    pub fn took(&self) -> Option<Duration> {
        self.lock().took
    }

    /// Order in which pieces are read.
    pub(super) fn order(&self) -> &[u32] {
        &self.order
    }

    /// Records that a piece was read.
    pub(super) fn read(&self, piece: usize) {
        let mut state = self.lock();
        state.read[piece] = true;
        self.advance(state);
    }

    /// Records that pieces are those that the build wrote.
    pub(super) fn set_verified(&self, pieces: impl Iterator<Item = usize>) {
        let mut state = self.lock();
        pieces.for_each(|piece| state.verified[piece] = true);
        self.advance(state);
    }

    /// Publishes the loaded pieces. Nothing is published after a failure, so that all threads of a call see
    /// the same.
    fn advance(&self, mut state: MutexGuard<'_, State>) {
        if state.failure.is_none() {
            let first = self.loaded.load(Ordering::Relaxed);
            let ready = |&&piece: &&u32| state.read[piece as usize] && state.verified[piece as usize];
            let loaded = first + self.order[first..].iter().take_while(ready).count();
            if loaded == self.order.len() && state.took.is_none() {
                state.took = Some(self.start.elapsed());
            }
            // Release: a thread that sees the number sees the bytes, which were read before.
            self.loaded.store(loaded, Ordering::Release);
        }
        drop(state);
        self.changed.notify_all();
    }

    /// Ends the loading with a failure. Only the first reason counts.
    pub(super) fn fail(&self, failure: LoadFailure) {
        self.lock().failure.get_or_insert(failure);
        self.changed.notify_all();
    }

    /// Waits until a piece was read. False if it will not be read, or is no longer needed.
    pub(super) fn was_read(&self, piece: usize) -> bool {
        let mut state = self.lock();
        while !state.read[piece] {
            if state.stop || state.failure.is_some() {
                return false;
            }
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        !state.stop
    }

    /// Ends the loading: no more pieces are needed.
    pub(super) fn stop(&self) {
        self.lock().stop = true;
        self.changed.notify_all();
    }

    /// Whether to continue reading.
    pub(super) fn should_continue(&self) -> bool {
        let state = self.lock();
        !state.stop && state.failure.is_none()
    }
}
