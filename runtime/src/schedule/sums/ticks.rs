//! Time in whole numbers.
//!
//! Whole numbers add and subtract without error: incremental sums equal recomputed ones, in any order, on any
//! machine.

use crate::schedule::scheduled::{MOST_EXPERTS, MOST_MEMORIES};

/// Picoseconds.
pub(crate) type Ticks = i64;

/// Four seconds: treated as infinite.
pub(crate) const NEVER: Ticks = 1 << 42;
/// Even if every memory has all experts and is read for all of them, the sum over memories does not overflow.
const _: () = assert!((NEVER + 1) as u64 <= (1 << 62) / (2 * MOST_EXPERTS as u64 * MOST_MEMORIES as u64));
/// Cost of an expert on a unit that may not compute it. It is above [`NEVER`], so that an expert that no unit
/// can compute in time still goes to an allowed one.
pub(crate) const FORBIDDEN: Ticks = NEVER + 1;

/// Picoseconds of microseconds; NaN and too large times become [`NEVER`].
pub(crate) fn ticks(us: f64) -> Ticks {
    let ps = us * 1e6;
    if ps < NEVER as f64 { ps.max(0.0).round() as Ticks } else { NEVER }
}

/// Microseconds of picoseconds.
pub(crate) fn us(ticks: Ticks) -> f64 {
    ticks as f64 / 1e6
}
