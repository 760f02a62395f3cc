//! Simulations, replays and models; nothing of it ships.
//!
//! The policies are the runtime's own ([`moec_runtime::offload::cache`], [`moec_runtime::offload::neurons`],
//! [`moec_runtime::offload::paging`]): passes choose among them by recorded routing ([`cache`], [`resident`],
//! [`neurons::plan`]), and a simulation runs them on modelled units under virtual time ([`paging`],
//! [`disk`]).
//!
//! * [`cache`]: replays of recorded routing, Belady's bound, the choice of a policy, synthetic routing.
//! * [`sample_experts`]: samples how many tokens of a step choose each expert, by shares.
//! * [`resident`]: chooses resident experts under two budgets, the host's memory and the GPU's.
//! * [`neurons`]: layouts of neurons on disk, a pipeline without barriers, shares of hot neurons, synthetic
//!   activations (PowerInfer-2).
//! * [`neuron_store`]: a step over neurons on disk that really reads, for measurements.
//! * [`disk`]: a modelled device, virtual time, a reader that fails as configured, and measurements of a
//!   disk.
//! * [`systems`]: policies of other systems and of moec, as rows that a build names and experiments compare.
//! * [`paging`]: a run that computes nothing and reads nothing.

#![allow(clippy::cast_possible_truncation, reason = "numerics of policies and counters")]

pub mod cache;
pub mod disk;
pub mod neuron_store;
pub mod neurons;
pub mod paging;
pub mod resident;
mod sample;
pub mod systems;

pub use sample::sample_experts;
