//! Experts in frames of a GPU that all layers share, kept by a cache (HybriMoE, §IV).
//!
//! * [`CachedDispatcher`] says who computes a layer's experts, by [`timelines`](super::timelines), who is brought into which frame, and when.
//! * [`prefetch`] weighs experts of the next layers by what the simulated layer gains from having them on the GPU (§IV-C).

pub mod dispatcher;
pub mod prefetch;
#[cfg(test)]
mod tests;

pub use dispatcher::CachedDispatcher;
