//! Matrices whose rows have a scale each, in the order of [`Layout`]: panels of nibbles with their columns'
//! scales, and the rows of wider codes after the last panel.

use super::channel::{Channel, Width};
use super::{Geometry, Weighting, feedback, q4o};
#[cfg(doc)]
use moec_ir::plan::Layout;
use moec_ir::types::{Format, GROUP};
use std::convert::Infallible;
use std::ops::Range;

/// Two codes that are 0.
const ZEROS: u8 = 0x88;

/// Share of a row's energy that feedback may cost. With one scale for a whole row, the largest numbers are
/// cut off where their inputs are small. Another row would cost all of its energy and more.
const LOST: f64 = 0.5;

/// Codes that are stored together: an input of the dot-product instructions.
const QUAD: usize = 4;

/// Bytes of a matrix of such a format.
#[derive(Clone, Copy)]
struct ColumnLayout {
    /// Columns of a panel.
    nr: usize,
    panels: usize,
    /// Bytes of a group of a panel, of its codes, and of a panel.
    group: usize,
    codes: usize,
    panel: usize,
    /// Outliers, and the bytes of each one's codes.
    outliers: usize,
    row: usize,
}

impl ColumnLayout {
    fn of(g: &Geometry) -> Self {
        let (nr, groups) = (g.nr(), g.cols.div_ceil(GROUP));
        let group = nr * GROUP / 2;
        let codes = groups * group;
        Self {
            nr,
            panels: g.panels(),
            group,
            codes,
            panel: codes + 4 * nr,
            outliers: g.format.outliers(g.rows),
            row: groups * GROUP,
        }
    }

    /// First byte of the table of outliers, of their columns, and of their codes.
    const fn table(&self) -> [usize; 3] {
        let starts = self.panels * self.panel;
        let columns = starts + 4 * (self.panels + 1);
        [starts, columns, columns + 4 * self.outliers]
    }

    /// Byte of a panel that holds code `i` of a column, and whether in the upper nibble.
    const fn nibble(&self, column: usize, i: usize) -> (usize, bool) {
        let (group, i) = (i / GROUP, i % GROUP);
        let quad = i % (GROUP / 2) / QUAD;
        (group * self.group + (quad * self.nr + column) * QUAD + i % QUAD, i >= GROUP / 2)
    }
}

/// Packs panels of a matrix after what `out` holds. `read` fills its second argument with rows of the matrix,
/// whose outliers `weighting` names.
pub(super) fn pack_panels<E>(
    g: &Geometry,
    panels: Range<usize>,
    weighting: Weighting<'_>,
    mut read: impl FnMut(Range<usize>, &mut [f32]) -> Result<(), E>,
    out: &mut Vec<u8>,
) -> Result<(), E> {
    let (layout, outliers) = (ColumnLayout::of(g), weighting.outliers.unwrap_or_default());
    let mut numbers = Vec::new();
    for p in panels {
        let (mut ids, mut first) = (Vec::new(), 0);
        numbers.clear();
        for (range, columns) in g.panel_rows(p) {
            let from = numbers.len();
            numbers.resize(from + range.len() * g.cols, 0.0);
            read(range.clone(), numbers.get_mut(from..).unwrap_or_default())?;
            ids.extend(range.enumerate().map(|(i, row)| (row, first + i)));
            first += columns;
        }
        let width = |i: usize| ids.get(i).map_or(Width::Int4, |(row, _)| q4o::width(outliers, *row));
        let channels = q4o::round(g.cols, &numbers, width, weighting);
        let start = out.len();
        out.resize(start + layout.codes, ZEROS);
        out.resize(start + layout.panel, 0);
        let panel = out.get_mut(start..).unwrap_or_default();
        for (channel, &(row, column)) in channels.iter().zip(&ids) {
            let at = layout.codes + 4 * column;
            if let Some(cell) = panel.get_mut(at..at + 4) {
                cell.copy_from_slice(&channel.scale.to_le_bytes());
            }
            if q4o::width(outliers, row) == Width::Int8 {
                continue;
            }
            for (i, &code) in channel.codes.iter().enumerate() {
                let (at, upper) = layout.nibble(column, i);
                let Some(cell) = panel.get_mut(at) else { continue };
                let code = code.cast_unsigned().wrapping_add(8) & 15;
                *cell = if upper { *cell & 15 | code << 4 } else { *cell & 0xf0 | code };
            }
        }
    }
    Ok(())
}

/// Packs the outliers of a matrix after what `out` holds; `read` is that of [`pack_panels`].
pub(super) fn pack_outliers<E>(
    g: &Geometry,
    weighting: Weighting<'_>,
    mut read: impl FnMut(Range<usize>, &mut [f32]) -> Result<(), E>,
    out: &mut Vec<u8>,
) -> Result<(), E> {
    let (layout, start) = (ColumnLayout::of(g), out.len());
    let outliers = weighting.outliers.unwrap_or_default();
    let mut order: Vec<_> = outliers.iter().map(|&row| (g.column_of(row as usize), row as usize)).collect();
    order.sort_unstable();
    for panel in 0..=layout.panels {
        let before = order.partition_point(|((p, _), _)| *p < panel);
        out.extend((before as u32).to_le_bytes());
    }
    out.extend(order.iter().flat_map(|((_, column), _)| (*column as u32).to_le_bytes()));
    let mut numbers = vec![0.0; g.cols];
    for (_, row) in order {
        read(row..row + 1, &mut numbers)?;
        for channel in q4o::round(g.cols, &numbers, |_| Width::Int8, weighting) {
            let end = out.len() + layout.row;
            out.extend(channel.codes.into_iter().map(i8::cast_unsigned));
            out.resize(end, 0);
        }
    }
    out.resize(start + g.outlier_bytes(), 0);
    Ok(())
}

/// Column of a row of `matrix`, read back; `None` if the bytes end before it, or their table is invalid.
fn channel(g: &Geometry, matrix: &[u8], row: usize) -> Option<(Width, Channel)> {
    let layout = ColumnLayout::of(g);
    let (p, column) = g.column_of(row);
    let panel = matrix.get(p.checked_mul(layout.panel)?..)?;
    let scale = f32::from_le_bytes(*panel.get(layout.codes + 4 * column..)?.first_chunk()?);
    let [starts, columns, codes] = layout.table();
    let word = |at: usize| Some(u32::from_le_bytes(*matrix.get(at..)?.first_chunk()?) as usize);
    if layout.outliers > 0 {
        let (first, end) = (word(starts + 4 * p)?, word(starts + 4 * (p + 1))?);
        for i in first..end.min(layout.outliers) {
            if word(columns + 4 * i)? == column {
                let found = matrix.get(codes + i * layout.row..)?.get(..g.cols)?;
                let codes = found.iter().map(|b| b.cast_signed()).collect();
                return Some((Width::Int8, Channel { scale, codes }));
            }
        }
    }
    let code = |i: usize| {
        let (at, upper) = layout.nibble(column, i);
        let byte = *panel.get(at)?;
        Some((if upper { byte >> 4 } else { byte & 15 }).cast_signed() - 8)
    };
    Some((Width::Int4, Channel { scale, codes: (0..g.cols).map(code).collect::<Option<_>>()? }))
}

/// Reads rows of a matrix back, row-major; `None` where its bytes end before them.
pub(super) fn unpack(g: &Geometry, matrix: &[u8], rows: Range<usize>, out: &mut [f32]) -> Option<()> {
    for (row, out) in rows.zip(out.chunks_exact_mut(g.cols.max(1))) {
        let (_, channel) = channel(g, matrix, row)?;
        out.iter_mut().zip(channel.values()).for_each(|(to, x)| *to = x);
    }
    Some(())
}

/// As [`super::round_as_packed`], of a matrix; `None` where its bytes end before it does.
pub(super) fn round_as_packed(
    g: &Geometry,
    matrix: &[u8],
    rows: Range<usize>,
    fed: bool,
    values: &mut [f32],
) -> Option<()> {
    for (row, x) in rows.zip(values.chunks_exact_mut(g.cols.max(1))) {
        let (width, mut stored) = channel(g, matrix, row)?;
        // With an invalid scale, nothing equals what is stored.
        if !(stored.scale.is_finite() && stored.scale > 0.0) {
            continue;
        }
        let by_feedback = fed && width == Width::Int4;
        if !(by_feedback && feedback::is_plausible(x, &stored.values().collect::<Vec<_>>(), LOST)) {
            stored = Channel::with_scale(width, x, stored.scale);
        }
        x.iter_mut().zip(stored.values()).for_each(|(to, x)| *to = x);
    }
    Some(())
}

/// Rounds a matrix to such a format, all errors mattering the same.
pub(super) fn round_matrix(format: Format, cols: usize, values: &mut [f32]) {
    let width = cols.max(1);
    let (rows, exact) = (values.len() / width, values.to_vec());
    let read = |rows: Range<usize>, out: &mut [f32]| {
        out.copy_from_slice(&exact[rows.start * width..rows.end * width]);
        Ok::<(), Infallible>(())
    };
    let Ok(found) = q4o::quantise_q4o([rows, width], format.outliers(rows), Weighting::default(), read);
    values.copy_from_slice(&found.dequantise());
}
