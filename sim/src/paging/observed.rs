//! Observation of a run, whose time may be that of modelled units.

use super::{Journal, Units, rows_each};
use crate::disk::VirtualDisk;
use moec_runtime::Result;
use moec_runtime::exec::unit::LayerPart;
use moec_runtime::offload::disk::{Buffers, Disk, ExtentTable, Options};
use moec_runtime::offload::paging::Hooks;
use moec_runtime::offload::paging::decider::{Decision, Event};
use std::fmt;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::Duration;

/// Hooks of one run: record the events and decisions of its decider. With units, time is theirs and not the
/// machine's; the run computes on one thread.
pub struct Observed {
    /// Recorded events and decisions.
    pub journal: Journal,
    units: Option<&'static dyn Units>,
    disk: OnceLock<Arc<VirtualDisk>>,
    /// Rows of an expert of the layer of the last request.
    rows: Mutex<f64>,
}

impl Observed {
    /// Creates hooks with a journal of this many lines.
    pub fn new(lines: usize, units: Option<&'static dyn Units>) -> Self {
        Self { journal: Journal::new(lines), units, disk: OnceLock::new(), rows: Mutex::new(1.0) }
    }

    fn pass(&self, time: impl FnOnce(&dyn Units, f64) -> Duration) {
        if let (Some(units), Some(disk)) = (self.units, self.disk.get()) {
            let rows = *self.rows.lock().unwrap_or_else(PoisonError::into_inner);
            disk.pass(time(units, rows));
        }
    }
}

impl fmt::Debug for Observed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Observed").field("units", &self.units).finish_non_exhaustive()
    }
}

impl Hooks for Observed {
    fn disk(
        &self,
        table: &Arc<ExtentTable>,
        buffers: &Arc<Buffers>,
        options: &Options,
    ) -> Result<Option<Arc<dyn Disk>>> {
        let Some(units) = self.units else { return Ok(None) };
        let disk = VirtualDisk::new(Arc::clone(table), Arc::clone(buffers), options, units.link(), true)?;
        let disk = Arc::clone(self.disk.get_or_init(|| Arc::new(disk)));
        Ok(Some(disk))
    }

    fn requested(&self, layer: usize, rows: usize) {
        self.pass(|units, _| units.between(layer, rows));
    }

    fn computed(&self, layer_part: LayerPart) {
        self.pass(|units, rows| units.expert(layer_part.layer, layer_part.part.index(), rows));
    }

    fn handled(&self, now: Duration, event: &Event<'_>) {
        if let Event::Requested(request) = event {
            let rows = rows_each(request.rows, request.k, request.active.len());
            *self.rows.lock().unwrap_or_else(PoisonError::into_inner) = rows;
        }
        self.journal.handled(now, event);
    }

    fn decided(&self, decision: &Decision) {
        self.journal.decided(decision);
    }
}
