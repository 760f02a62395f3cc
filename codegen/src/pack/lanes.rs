//! Rows that are rounded side by side.

use super::quantise::SMALLEST;
use super::scale::round_scale;
use moec_ir::types::{Format, LARGEST};

/// Rows that are rounded side by side.
pub(super) const LANES: usize = 16;
pub(super) type Lanes = [f32; LANES];

/// A scale with the digits that it is stored with; 0 where that would leave the range of bf16, or
/// where it would be negative and scales have no sign.
#[allow(clippy::inline_always, reason = "the caller vectorises it only inline")]
#[inline(always)]
pub(super) fn stored(format: Format, scale: f32) -> f32 {
    let scale = round_scale(format, scale);
    let size = if format.is_by_patterns() { scale } else { scale.abs() };
    if (SMALLEST..=LARGEST).contains(&size) { scale } else { 0.0 }
}
