//! Modelled units: durations under virtual time.

use crate::offload::flash::{Clock, Reader};
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

/// Modelled units: a device that experts come from, and one that computes, whose lanes work together as one.
pub trait Units: Sync + fmt::Debug {
    /// The device that experts come from, made of what reads their bytes, if anything does, and the clock whose time it lets
    /// pass.
    fn device(&self, bytes: Option<Box<dyn Reader>>) -> (Box<dyn Reader>, Arc<dyn Clock>);

    /// Time from the last expert of the layer before to the moment when a layer asks for its own, in a call of so many rows.
    /// For the first layer: from the last expert of the call before.
    fn between(&self, layer: usize, rows: usize) -> Duration;

    /// Time to compute a part (0: gate and up; 1: down) of an expert of a layer for so many rows, which may be a mean.
    fn expert(&self, layer: usize, part: usize, rows: f64) -> Duration;
}

/// Rows that each of the active experts of a call has on average.
pub fn rows_each(rows: usize, k: usize, active: usize) -> f64 {
    (rows * k) as f64 / active.max(1) as f64
}
