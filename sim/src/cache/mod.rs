//! Replays of recorded routing through the runtime's cache: results of policies, their lower bound, and the
//! choice of one for a bundle.

pub mod belady;
mod choose;
mod error;
mod grid;
mod levels;
mod pin;
mod replay;
mod runs;
pub mod synthetic;
mod trace;

pub use belady::optimum;
pub use choose::{Choice, MARGIN, Pin, Reason, choose};
pub use error::TraceError;
pub use grid::grid;
pub use levels::{Level, Levels, Moved};
pub use pin::{SHARES, hottest, hottest_share, uses};
pub use replay::{CacheCounters, Replay, replay, replay_pinned};
pub use runs::Row;
pub use trace::{Step, Trace};
