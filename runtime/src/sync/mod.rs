//! How threads wait for each other.

pub mod barrier;
pub(crate) mod events;
pub mod pool;
