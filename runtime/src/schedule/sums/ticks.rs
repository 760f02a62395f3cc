//! Time in whole numbers.
//!
//! Whole numbers add and subtract without error: what moves keep count of is exactly what a fresh count gives, in any order, on
//! any machine.

use crate::schedule::scheduled::{MOST_EXPERTS, MOST_MEMORIES};

/// Picoseconds.
pub(crate) type Ticks = i64;

/// Four seconds: as good as infinite.
pub(crate) const NEVER: Ticks = 1 << 42;
/// Every memory may have all experts and be read for all, and what sums the memories up does not overflow.
const _: () = assert!((NEVER + 1) as u64 <= (1 << 62) / (2 * MOST_EXPERTS as u64 * MOST_MEMORIES as u64));
/// A unit that may not compute an expert; dearer than [`NEVER`], so that an expert that no unit can
/// compute in time still goes to one that may.
pub(crate) const FORBIDDEN: Ticks = NEVER + 1;

/// Picoseconds of microseconds; what is no number or too large is [`NEVER`].
pub(crate) fn ticks(us: f64) -> Ticks {
    let ps = us * 1e6;
    if ps < NEVER as f64 { ps.max(0.0).round() as Ticks } else { NEVER }
}

/// Microseconds of picoseconds.
pub(crate) fn us(ticks: Ticks) -> f64 {
    ticks as f64 / 1e6
}
