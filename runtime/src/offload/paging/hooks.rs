//! Hooks for simulations and tests of a run.

use super::decider::{Decision, Event};
use crate::error::Result;
use crate::exec::clusters::ClusterPart;
use crate::exec::unit::LayerPart;
use crate::offload::disk::{self, Buffers, Disk, ExtentTable};
use std::fmt;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

/// Hooks around a run: another disk with its own time, and a view of requests and decisions. Only simulations
/// and tests implement them.
pub trait Hooks: Sync + fmt::Debug {
    /// The disk that experts come from; `None`: the machine's.
    ///
    /// # Errors
    /// As [`disk::ThreadedDisk::open`].
    fn disk(
        &self,
        _table: &Arc<ExtentTable>,
        _buffers: &Arc<Buffers>,
        _options: &disk::Options,
    ) -> Result<Option<Arc<dyn Disk>>> {
        Ok(None)
    }

    /// Called before a layer requests its experts, in a call of `rows` rows.
    fn requested(&self, _layer: usize, _rows: usize) {}

    /// Called after a part of an expert was computed.
    fn computed(&self, _layer_part: LayerPart) {}

    /// Called after a part of neighbouring clusters of an expert was computed, if neurons are read one by one.
    fn cluster_computed(&self, _layer: usize, _part: ClusterPart, _expert: u32, _blocks: Range<usize>) {}

    /// Called when the decider gets an event.
    fn handled(&self, _now: Duration, _event: &Event<'_>) {}

    /// Called for each decision before it is carried out.
    fn decided(&self, _decision: &Decision) {}

    /// Called if neurons are read one by one: experts of a layer with the units of them that are needed, in a
    /// call of `rows` rows. Of clusters these are known when all gates of the layer are computed.
    fn needs(&self, _layer: usize, _rows: usize, _needed: &mut dyn Iterator<Item = (u32, &[u32])>) {}
}
