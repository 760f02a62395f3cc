//! Rows and dispatch tables in the memory of a paused run.

use moec_ir::op::DispatchLayout;
use moec_runtime::StepView;
use std::borrow::Cow;

/// Numbers in memory: rows of `cols` numbers with a distance of `stride`.
#[derive(Clone, Copy, Debug)]
pub(super) struct StridedRows {
    pub(super) buffer: u32,
    pub(super) column: usize,
    pub(super) cols: usize,
    pub(super) stride: usize,
}

/// A dispatch table in memory.
#[derive(Clone, Copy, Debug)]
pub(super) struct Table {
    pub(super) rows: StridedRows,
    pub(super) layout: DispatchLayout,
}

pub(super) fn number(b: &[u8]) -> f32 {
    f32::from_le_bytes([b[0], b[1], b[2], b[3]])
}

pub(super) fn word(b: &[u8]) -> i32 {
    i32::from_le_bytes([b[0], b[1], b[2], b[3]])
}

/// Rows of a paused run.
pub(super) struct RowsView<'v> {
    bytes: Cow<'v, [u8]>,
    at: StridedRows,
}

impl StridedRows {
    pub(super) fn view<'v>(self, view: &'v StepView<'_>) -> Option<RowsView<'v>> {
        Some(RowsView { bytes: view.buffer(self.buffer)?, at: self })
    }
}

impl RowsView<'_> {
    pub(super) fn row(&self, i: usize) -> Option<&[u8]> {
        let first = i.checked_mul(self.at.stride)?.checked_add(self.at.column)?.checked_mul(4)?;
        self.bytes.get(first..first.checked_add(self.at.cols * 4)?)
    }
}

/// A dispatch table of a paused run.
pub(super) struct TableView<'v> {
    bytes: Cow<'v, [u8]>,
    pub(super) layout: DispatchLayout,
}

impl Table {
    pub(super) fn view<'v>(self, view: &'v StepView<'_>) -> Option<TableView<'v>> {
        Some(TableView { bytes: view.buffer(self.rows.buffer)?, layout: self.layout })
    }
}

impl TableView<'_> {
    pub(super) fn word(&self, i: usize) -> Option<usize> {
        usize::try_from(word(self.bytes.get(i * 4..i * 4 + 4)?)).ok()
    }

    /// Returns every active expert with its slots.
    pub(super) fn each(&self, mut f: impl FnMut(usize, std::ops::Range<usize>) -> Option<()>) -> Option<()> {
        for active in 0..self.word(0)? {
            let start = self.word(self.layout.start() + active)?;
            let end = self.word(self.layout.start() + active + 1)?;
            f(self.word(self.layout.expert() + active)?, start..end)?;
        }
        Some(())
    }
}
