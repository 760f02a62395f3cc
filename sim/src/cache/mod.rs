//! Replays of recorded routing through the runtime's cache: how a policy does, the bound that none passes, and which one to ship.

pub mod belady;
mod choose;
mod pin;
mod replay;
mod runs;
pub mod synthetic;

pub use belady::optimum;
pub use choose::{Choice, MARGIN, Pin, Reason, choose};
pub use pin::{SHARES, hottest, hottest_share, uses};
pub use replay::{Replay, Tally, replay, replay_pinned};
pub use runs::Row;
