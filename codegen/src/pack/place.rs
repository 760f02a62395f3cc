//! Rows of ungrouped formats, copied to their places in a panel whatever their values.

use super::Geometry;
use super::vectors::{Work, widest};
use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};
use moec_ir::bundle::{Bundle, Part};
use moec_ir::plan::Layout;
use moec_ir::types::Format;
use std::ops::Range;

/// Cells of a row that are placed before the next row's: the lines that they go to stay in the first-level
/// cache.
const TILE: usize = 16;

/// Rounds numbers to a format without groups, little-endian, as many as both sides hold.
pub(super) fn narrow(format: Format, values: &[f32], out: &mut [u8]) {
    match format {
        Format::F32 => {
            for (b, x) in out.as_chunks_mut().0.iter_mut().zip(values) {
                *b = x.to_le_bytes();
            }
        }
        Format::Bf16 => {
            for (b, x) in out.as_chunks_mut().0.iter_mut().zip(values) {
                *b = bf16::from_f32(*x).to_le_bytes();
            }
        }
        Format::F16 => {
            let mut block = [f16::ZERO; 128];
            for (out, values) in out.chunks_mut(256).zip(values.chunks(128)) {
                block[..values.len()].convert_from_f32_slice(values);
                for (b, h) in out.as_chunks_mut().0.iter_mut().zip(&block) {
                    *b = h.to_le_bytes();
                }
            }
        }
        _ => {}
    }
}

/// Places rows of stored numbers, row-major, in the bytes of their panel, which are zero until then. `ranges`
/// are [`Geometry::panel_rows`].
pub(super) fn place(g: &Geometry, ranges: &[(Range<usize>, usize)], rows: &[u8], panel: &mut [u8]) {
    if let Some(bundle) = g.bundle() {
        return part_by_part(g, bundle, rows, panel);
    }
    let nr = match g.layout {
        // They are stored as they came.
        Layout::Rows | Layout::Neurons { .. } | Layout::Gates | Layout::UpDown | Layout::Bundles => {
            let n = rows.len().min(panel.len());
            return panel[..n].copy_from_slice(&rows[..n]);
        }
        Layout::Panels { nr } | Layout::GluPanels { nr } => nr as usize,
    };
    let row_bytes = g.format.row_bytes(g.cols);
    let mut rows = rows;
    let mut first = 0;
    for (range, columns) in ranges {
        let (mine, rest) = rows.split_at_checked(range.len() * row_bytes).unwrap_or((rows, &[]));
        match g.format {
            Format::F16 => {
                widest(Transposition::<2> { rows: mine, row_bytes, nr, first, panel: &mut *panel });
            }
            _ => widest(Transposition::<4> { rows: mine, row_bytes, nr, first, panel: &mut *panel }),
        }
        rows = rest;
        first += columns;
    }
}

/// Rows of neurons to their parts.
fn part_by_part(g: &Geometry, bundle: Bundle, rows: &[u8], panel: &mut [u8]) {
    let bytes = g.format.row_bytes(g.part_cols()).max(1);
    let parts = g.parts().max(1);
    let available = rows.len() / (parts * bytes);
    let on_disk = g.on_disk();
    for (i, part) in rows.chunks_exact(bytes).enumerate() {
        let (row, part_of) = (i / parts, i % parts);
        // Formats without groups have no scales.
        let at = match (on_disk.map(|n| (n.at(row, available), n.gates)), g.layout) {
            (Some(([_, gate], true)), _) if part_of == 0 => gate,
            (Some(([up_down, _], gates)), _) => {
                up_down + (part_of - usize::from(gates)) * bundle.up_down_part_bytes()
            }
            (None, Layout::Neurons { .. }) => bundle.at(Part::OF_ROW[part_of], row, available),
            (None, _) => row * g.row_bytes(),
        };
        if let Some(to) = panel.get_mut(at..at + bytes) {
            to.copy_from_slice(part);
        }
    }
}

/// Rows become columns of a panel of `nr`, from column `first` on, in cells of `N` bytes: a number, or a pair
/// of bf16.
struct Transposition<'a, const N: usize> {
    rows: &'a [u8],
    row_bytes: usize,
    nr: usize,
    first: usize,
    panel: &'a mut [u8],
}

impl<const N: usize> Work for Transposition<'_, N> {
    type Output = ();

    #[allow(clippy::inline_always, reason = "the caller vectorises it only inline")]
    #[inline(always)]
    fn run(self) {
        let Self { rows, row_bytes, nr, first, panel } = self;
        let cells = panel.as_chunks_mut::<N>().0;
        for from in (0..row_bytes.div_ceil(N)).step_by(TILE) {
            for (r, row) in rows.chunks_exact(row_bytes.max(1)).enumerate() {
                let (row, rest) = row.as_chunks::<N>();
                let to = (from + TILE).min(row.len());
                let Some(column) = cells.get_mut(from * nr + first + r..) else { continue };
                for (cell, x) in column.iter_mut().step_by(nr.max(1)).zip(&row[from.min(to)..to]) {
                    *cell = *x;
                }
                // Half a pair; its other half is zero.
                if !rest.is_empty()
                    && to == row.len()
                    && let Some(cell) = column.get_mut((to - from.min(to)) * nr)
                {
                    cell[..rest.len()].copy_from_slice(rest);
                }
            }
        }
    }
}
