//! What simulations and tests put around a run.

use super::decider::{Decision, Event};
use crate::error::Result;
use crate::exec::unit::LayerPart;
use crate::offload::disk::{self, Buffers, Disk, ExtentTable};
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

/// A laboratory around a run: another disk, with a time of its own, and a view of what is requested and decided. Nothing that ships implements
/// it.
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

    /// A layer is about to request its experts, in a call of so many rows.
    fn requested(&self, _layer: usize, _rows: usize) {}

    /// A part of an expert was computed.
    fn computed(&self, _layer_part: LayerPart) {}

    /// The decider is told an event.
    fn heard(&self, _now: Duration, _event: &Event<'_>) {}

    /// The decider has decided, and it is about to be carried out.
    fn decided(&self, _decision: &Decision) {}

    /// Where neurons are read: these experts of a layer, in a call of so many rows, need these units of them.
    fn needs(&self, _layer: usize, _rows: usize, _needed: &mut dyn Iterator<Item = (u32, &[u32])>) {}
}
