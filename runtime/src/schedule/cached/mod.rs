//! Experts in frames of a GPU that all layers share, kept by a cache (HybriMoE, §IV).
//!
//! * [`CachedDispatcher`] assigns a layer's experts to units, by [`timelines`](super::timelines), and chooses
//!   the transfers, their frames and their times.
//! * [`prefetch`] ranks experts of the next layers by the time that the simulated layer saves if they are on
//!   the GPU (§IV-C).

pub mod dispatcher;
pub mod prefetch;
#[cfg(test)]
mod tests;

pub use dispatcher::CachedDispatcher;
