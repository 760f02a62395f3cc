//! Processes for grammars of answers, and the requests that use them.

use super::error::{Answer, ApiError};
use crate::grammar::Grammar;
use crate::grammar::remote::{Workers, constraints};
use axum::http::StatusCode;
use moec_runtime::Constraint;
use std::sync::Arc;
use tokio::sync::Semaphore;

/// Processes for grammars. Each serves one request at a time, and there are no more than slots: with
/// [`worker::MEMORY`] for each, this bounds the memory of all grammars.
///
/// [`worker::MEMORY`]: crate::grammar::worker
pub(super) struct Constraints {
    workers: Workers,
    /// A permit for each process.
    running: Arc<Semaphore>,
    /// A permit for each request that has a process or waits for one.
    accepted: Arc<Semaphore>,
}

impl Constraints {
    /// Creates them for `slots` sequences at a time and a queue of `queue` sequences.
    pub(super) fn new(workers: Workers, slots: usize, queue: usize) -> Self {
        let accepted = slots.saturating_add(queue).min(Semaphore::MAX_PERMITS);
        Self {
            workers,
            running: Arc::new(Semaphore::new(slots.min(Semaphore::MAX_PERMITS))),
            accepted: Arc::new(Semaphore::new(accepted)),
        }
    }

    /// A constraint for each of `n` answers. If the future is dropped, compilation ends, too.
    ///
    /// # Errors
    /// A grammar that cannot be used, or exceeds its limits; too many wait.
    pub(super) async fn make(&self, grammar: Grammar, n: usize) -> Answer<Vec<Box<dyn Constraint>>> {
        let accepted = Arc::clone(&self.accepted).try_acquire_owned().map_err(|_| {
            let message = "too many requests with a grammar are waiting";
            ApiError::new(StatusCode::TOO_MANY_REQUESTS, message).code("queue_full")
        })?;
        let running = Arc::clone(&self.running).acquire_owned().await.map_err(|e| failed(&e))?;
        let worker = self.workers.take().map_err(|e| failed(&e))?;
        let end = worker.end().map_err(|e| failed(&e))?;
        let make = move || constraints(worker, &grammar, n, (running, accepted));
        let made = tokio::task::spawn_blocking(make).await.map_err(|e| failed(&e))?;
        end.keep();
        Ok(made?)
    }
}

fn failed(e: &dyn std::error::Error) -> ApiError {
    ApiError::new(StatusCode::INTERNAL_SERVER_ERROR, e.to_string())
}
