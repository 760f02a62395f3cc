//! Matrices whose rows have a scale each, in the order of [`Layout`]: panels of nibbles with their columns'
//! scales and the wider codes of outliers, and the table of these after the last panel.

use super::channel::{Channel, Width};
use super::q4o::{self, Row};
use super::{Geometry, Weighting, feedback};
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
    outliers: usize,
}

impl ColumnLayout {
    fn of(g: &Geometry) -> Self {
        let (nr, groups) = (g.nr(), g.cols.div_ceil(GROUP));
        let group = nr * GROUP / 2;
        Self {
            nr,
            panels: g.panels(),
            group,
            codes: groups * group,
            panel: nr * g.row_bytes(),
            outliers: g.format.outliers(g.cols),
        }
    }

    /// Byte of a panel with the scale of a column; with the code of an outlier of a column, and of the scale
    /// of these.
    const fn scale(&self, column: usize) -> usize {
        self.codes + 4 * column
    }

    const fn outlier(&self, i: usize, column: usize) -> usize {
        self.codes + 4 * self.nr + i * self.nr + column
    }

    const fn outlier_scale(&self, column: usize) -> usize {
        self.outlier(self.outliers, 0) + 4 * column
    }

    /// Byte of a panel that holds code `i` of a column, and whether in the upper nibble.
    const fn nibble(&self, column: usize, i: usize) -> (usize, bool) {
        let (group, i) = (i / GROUP, i % GROUP);
        let quad = i % (GROUP / 2) / QUAD;
        (group * self.group + (quad * self.nr + column) * QUAD + i % QUAD, i >= GROUP / 2)
    }

    /// Puts a row into a column of a panel.
    fn put(&self, panel: &mut [u8], column: usize, row: &Row) {
        let mut put = |at: usize, bytes: &[u8]| {
            if let Some(cells) = panel.get_mut(at..at + bytes.len()) {
                cells.copy_from_slice(bytes);
            }
        };
        put(self.scale(column), &row.int4.scale.to_le_bytes());
        if self.outliers > 0 {
            put(self.outlier_scale(column), &row.int8.scale.to_le_bytes());
        }
        for (i, code) in row.int8.codes.iter().enumerate() {
            put(self.outlier(i, column), &[code.cast_unsigned()]);
        }
        for (i, &code) in row.int4.codes.iter().enumerate() {
            let (at, upper) = self.nibble(column, i);
            let Some(cell) = panel.get_mut(at) else { continue };
            let code = code.cast_unsigned().wrapping_add(8) & 15;
            *cell = if upper { *cell & 15 | code << 4 } else { *cell & 0xf0 | code };
        }
    }

    /// The row in a column of a panel of `cols` input channels; `None` if the bytes end before it.
    fn get(&self, panel: &[u8], column: usize, cols: usize) -> Option<Row> {
        let scale = |at: usize| Some(f32::from_le_bytes(*panel.get(at..)?.first_chunk()?));
        let code = |i: usize| {
            let (at, upper) = self.nibble(column, i);
            let byte = *panel.get(at)?;
            Some((if upper { byte >> 4 } else { byte & 15 }).cast_signed() - 8)
        };
        let wide = |i: usize| panel.get(self.outlier(i, column)).map(|b| b.cast_signed());
        let int4 =
            Channel { scale: scale(self.scale(column))?, codes: (0..cols).map(code).collect::<Option<_>>()? };
        let int8 = match self.outliers {
            0 => Channel { scale: 1.0, codes: Vec::new() },
            n => Channel {
                scale: scale(self.outlier_scale(column))?,
                codes: (0..n).map(wide).collect::<Option<_>>()?,
            },
        };
        Some(Row { int4, int8 })
    }

    /// The table of a matrix's outliers; `None` if the bytes end before it.
    fn table(&self, matrix: &[u8]) -> Option<Vec<u32>> {
        let words = matrix.get(self.panels * self.panel..)?.as_chunks::<4>().0;
        words.get(..self.outliers).map(|words| words.iter().map(|w| u32::from_le_bytes(*w)).collect())
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
    let layout = ColumnLayout::of(g);
    let mut numbers = Vec::new();
    for p in panels {
        let (mut columns, mut first) = (Vec::new(), 0);
        numbers.clear();
        for (range, count) in g.panel_rows(p) {
            let from = numbers.len();
            numbers.resize(from + range.len() * g.cols, 0.0);
            columns.extend(first..first + range.len());
            read(range, numbers.get_mut(from..).unwrap_or_default())?;
            first += count;
        }
        let start = out.len();
        out.resize(start + layout.codes, ZEROS);
        out.resize(start + layout.panel, 0);
        let panel = out.get_mut(start..).unwrap_or_default();
        for (row, column) in q4o::round(g.cols, &numbers, weighting).iter().zip(columns) {
            layout.put(panel, column, row);
        }
    }
    Ok(())
}

/// Appends the table of a matrix's outliers.
pub(super) fn pack_table(g: &Geometry, weighting: Weighting<'_>, out: &mut Vec<u8>) {
    let end = out.len() + g.outlier_table_bytes();
    let own = weighting.outliers.unwrap_or_default().iter().copied();
    let all = own.chain(std::iter::repeat(u32::MAX)).take(g.format.outliers(g.cols));
    out.extend(all.flat_map(u32::to_le_bytes));
    out.resize(end, 0);
}

/// Reads rows of a matrix back, row-major; `None` where its bytes end before them.
pub(super) fn unpack(g: &Geometry, matrix: &[u8], rows: Range<usize>, out: &mut [f32]) -> Option<()> {
    let layout = ColumnLayout::of(g);
    let outliers = layout.table(matrix)?;
    for (row, out) in rows.zip(out.chunks_exact_mut(g.cols.max(1))) {
        let (p, column) = g.column_of(row);
        let stored = layout.get(matrix.get(p.checked_mul(layout.panel)?..)?, column, g.cols)?;
        out.copy_from_slice(&stored.values(&outliers));
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
    let layout = ColumnLayout::of(g);
    let outliers = layout.table(matrix)?;
    for (row, x) in rows.zip(values.chunks_exact_mut(g.cols.max(1))) {
        let (p, column) = g.column_of(row);
        let mut stored = layout.get(matrix.get(p.checked_mul(layout.panel)?..)?, column, g.cols)?;
        // With an invalid scale, nothing equals what is stored.
        let valid = |c: &Channel| c.scale.is_finite() && c.scale > 0.0;
        if !(valid(&stored.int4) && valid(&stored.int8)) {
            continue;
        }
        if !(fed && feedback::is_plausible(x, &stored.values(&outliers), LOST)) {
            let mut rest = x.to_vec();
            let wide = outliers.iter().map(|&c| rest.get_mut(c as usize).map_or(0.0, std::mem::take));
            let wide: Vec<f32> = wide.collect();
            stored.int8 = Channel::with_scale(Width::Int8, &wide, stored.int8.scale);
            stored.int4 = Channel::with_scale(Width::Int4, &rest, stored.int4.scale);
        }
        x.copy_from_slice(&stored.values(&outliers));
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
    let Ok(found) = q4o::quantise_q4o([rows, width], format.outliers(width), Weighting::default(), read);
    values.copy_from_slice(&found.dequantise());
}
