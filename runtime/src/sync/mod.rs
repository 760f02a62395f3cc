//! Synchronisation of threads.

pub mod barrier;
pub(crate) mod events;
pub mod pool;
pub(crate) mod progress;
