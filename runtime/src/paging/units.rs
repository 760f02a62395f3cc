//! What units are taken to do, where they are modelled: under virtual time.

use crate::flash::Link;
use std::fmt;
use std::time::Duration;

/// Modelled units: a link from flash, and one that computes, whose lanes work together as one.
pub trait Units: Sync + fmt::Debug {
    /// The link that experts come over.
    fn link(&self) -> Link;

    /// Time from the last expert of the layer before to the moment when a layer asks for its own, in a call of so many rows.
    /// For the first layer: from the last expert of the call before.
    fn between(&self, layer: usize, rows: usize) -> Duration;

    /// Time to compute a part (0: gate and up; 1: down) of an expert of a layer for so many rows, which may be a mean.
    fn expert(&self, layer: usize, part: usize, rows: f64) -> Duration;
}

/// Rows that each of the active experts of a call has on average.
pub(super) fn rows_each(rows: usize, k: usize, active: usize) -> f64 {
    (rows * k) as f64 / active.max(1) as f64
}
