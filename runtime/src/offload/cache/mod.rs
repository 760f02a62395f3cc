//! The cache of experts that do not fit into memory: residency, eviction and prefetching.
//!
//! * [`ExpertIndex`] lists the cacheable experts; [`Cache`] keeps count of what is resident and queries a
//!   [`Policy`] for victims. [`POLICIES`] is the table of policies with their parameters; a [`Setting`] is
//!   one of them with values. [`Ranking`] turns a router's logits into the scores that policies read.
//! * Some experts may be pinned ([`Cache::with_pinned`]), which never go.
//! * A cache need not begin empty: [`Cache::warm`] takes what recorded routing used most.
//! * [`prefetch`] estimates the gain of reading an expert that may be requested soon.
//!
//! Nothing here reads, waits or looks at a clock, and nothing allocates per token. The store that moves bytes
//! follows the [`Event`]s of [`Cache::step`], and a replay makes the same decisions without one.

mod error;
pub(crate) mod evicted;
mod experts;
mod heap;
mod lfu;
pub(crate) mod list;
mod lru;
mod mrs;
pub(crate) mod odds;
mod page_cache;
mod policy;
pub mod prefetch;
mod ranking;
mod resident;
mod setting;
mod table;
mod warm;

pub use error::CacheError;
pub use evicted::EvictedExpertCounts;
pub use experts::{CachedLayer, ExpertIndex, Key};
pub use policy::{Id, Pins, Policy};
pub use ranking::Ranking;
pub use resident::{Cache, Event};
pub use setting::Setting;
pub use table::{POLICIES, Parameter, PolicyInfo, Scope};
