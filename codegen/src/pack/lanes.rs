//! Rows that are rounded side by side.

use super::quantise::SMALLEST;
use half::bf16;
use moec_ir::types::LARGEST;

/// Rows that are rounded side by side.
pub(super) const LANES: usize = 16;
pub(super) type Lanes = [f32; LANES];

/// A scale as it is stored; 0 where that would leave the range of bf16.
#[allow(clippy::inline_always, reason = "the caller vectorises it only inline")]
#[inline(always)]
pub(super) fn stored(scale: f32) -> f32 {
    let scale = bf16::from_f32(scale).to_f32();
    if (SMALLEST..=LARGEST).contains(&scale.abs()) { scale } else { 0.0 }
}
