//! The cache of experts that do not fit into memory: which stay, which go, which are read ahead.
//!
//! * [`ExpertIndex`] says what there is to cache; [`Cache`] keeps count of what is resident and asks a [`Policy`] for
//!   victims. [`POLICIES`] is the table of policies with their parameters; a [`Setting`] is one of them with
//!   values. [`Ranking`] turns a router's logits into the scores that policies read.
//! * A [`Trace`] is recorded routing, token by token. [`replay()`] runs it through a setting, [`optimum`] gives the
//!   bound that no policy passes, [`choose()`] picks the setting that a bundle ships with.
//! * Some experts may be pinned ([`Cache::with_pinned`]): the hottest of a trace ([`hottest()`]), which never go. `choose` says
//!   whether that pays.
//! * A cache need not begin empty: [`Cache::warm`] takes what recorded routing used most.
//! * [`prefetch`] weighs experts that may be wanted soon.
//! * [`synthetic`] makes traces with a given popularity, for tests and benchmarks.
//!
//! Nothing here reads, waits or looks at a clock, and nothing on the way of a token allocates: the store that
//! moves bytes follows the [`Event`]s of [`Cache::step`], and a replay makes the same decisions without one.

pub(crate) mod belady;
mod choose;
mod error;
mod experts;
mod heap;
mod lfu;
pub(crate) mod list;
mod lru;
mod mrs;
pub(crate) mod odds;
mod page_cache;
mod pin;
mod policy;
pub mod prefetch;
mod ranking;
mod replay;
mod resident;
mod runs;
mod setting;
pub mod synthetic;
mod table;
mod trace;
mod warm;

pub use belady::optimum;
pub use choose::{Choice, MARGIN, Pin, Reason, choose};
pub use error::CacheError;
pub use experts::{CachedLayer, ExpertIndex, Key};
pub use pin::{SHARES, hottest, hottest_share, uses};
pub use policy::{Id, Pins, Policy};
pub use ranking::Ranking;
pub use replay::{Replay, Tally, replay, replay_pinned};
pub use resident::{Cache, Event};
pub use runs::Row;
pub use setting::{Setting, grid};
pub use table::{POLICIES, Parameter, PolicyInfo, Scope};
pub use trace::{Step, Trace};
