//! Weight packing: logical rows of f32 to the exact order and format that kernels read, and back.
//!
//! Packing streams: it asks for the rows of one panel at a time and writes that panel, so memory stays
//! at one panel whatever the size of the weight.

use half::{bf16, f16};
use moec_ir::plan::Layout;
use moec_ir::types::Format;
use std::io::{self, Write};
use std::ops::Range;

/// Extents and storage of a packed weight `[lead, rows, cols]`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Geometry {
    /// Order of the numbers.
    pub layout: Layout,
    /// Number format.
    pub format: Format,
    /// Matrices (experts, heads); 1 for a plain matrix.
    pub lead: usize,
    /// Rows (output channels) of a matrix.
    pub rows: usize,
    /// Columns (input channels) of a matrix.
    pub cols: usize,
}

/// Rows of a matrix that are read together when the layout is [`Layout::Rows`].
const ROWS_AT_ONCE: usize = 16;

/// Bytes of a packed weight: `lead` matrices of `rows` × `cols`, the padding of last panels included.
pub const fn packed_bytes(layout: Layout, format: Format, lead: usize, rows: usize, cols: usize) -> u64 {
    Geometry { layout, format, lead, rows, cols }.bytes()
}

impl Geometry {
    /// Bytes in all.
    pub const fn bytes(&self) -> u64 {
        self.lead as u64 * self.matrix_bytes()
    }

    /// Bytes of one matrix.
    pub const fn matrix_bytes(&self) -> u64 {
        let stored_rows = match self.layout {
            Layout::Rows => self.rows,
            Layout::Panels { nr } => self.rows.div_ceil(nr as usize) * nr as usize,
            Layout::GluPanels { nr } => (self.rows / 2).div_ceil(nr as usize / 2) * nr as usize,
        };
        stored_rows as u64 * self.cols as u64 * self.format.bytes(1) as u64
    }

    /// Ranges of rows that panel `p` holds, in the order of its columns: two for a gated panel.
    fn panel_rows(&self, p: usize) -> Vec<Range<usize>> {
        let cut = |start: usize, len: usize, end: usize| start.min(end)..(start + len).min(end);
        match self.layout {
            Layout::Rows => vec![cut(p * ROWS_AT_ONCE, ROWS_AT_ONCE, self.rows)],
            Layout::Panels { nr } => vec![cut(p * nr as usize, nr as usize, self.rows)],
            Layout::GluPanels { nr } => {
                let (half, inter) = (nr as usize / 2, self.rows / 2);
                let gate = cut(p * half, half, inter);
                let up = gate.start + inter..gate.end + inter;
                vec![gate, up]
            }
        }
    }

    fn panels(&self) -> usize {
        match self.layout {
            Layout::Rows => self.rows.div_ceil(ROWS_AT_ONCE),
            Layout::Panels { nr } => self.rows.div_ceil(nr as usize),
            Layout::GluPanels { nr } => (self.rows / 2).div_ceil(nr as usize / 2),
        }
    }

    /// Element index of `(row, 0)` in its matrix, and the distance from column to column.
    fn locate(&self, row: usize) -> (usize, usize) {
        match self.layout {
            Layout::Rows => (row * self.cols, 1),
            Layout::Panels { nr } => {
                let nr = nr as usize;
                (row / nr * nr * self.cols + row % nr, nr)
            }
            Layout::GluPanels { nr } => {
                let (nr, half, inter) = (nr as usize, nr as usize / 2, self.rows / 2);
                let (column, first) = if row < inter { (row, 0) } else { (row - inter, half) };
                (column / half * nr * self.cols + first + column % half, nr)
            }
        }
    }
}

/// Packs a weight.
///
/// `read(lead, rows, out)` fills `out`, row-major with full columns, with those rows of that matrix.
/// Numbers are rounded to the nearest, ties to even. Padding is zero. Returns the bytes written, which
/// are [`Geometry::bytes`].
///
/// # Errors
/// Those of `read` and of the writer.
pub fn pack<E: From<io::Error>>(
    geometry: &Geometry,
    mut read: impl FnMut(usize, Range<usize>, &mut [f32]) -> Result<(), E>,
    out: &mut impl Write,
) -> Result<u64, E> {
    let g = geometry;
    let mut rows = Vec::new();
    let mut bytes = Vec::new();
    for lead in 0..g.lead {
        for p in 0..g.panels() {
            rows.clear();
            bytes.clear();
            let ranges = g.panel_rows(p);
            for range in ranges.iter().cloned() {
                let start = rows.len();
                rows.resize(start + range.len() * g.cols, 0.0);
                read(lead, range, &mut rows[start..])?;
            }
            match g.layout {
                Layout::Rows => encode(g.format, &rows, &mut bytes),
                Layout::Panels { nr } => {
                    interleave(g, nr as usize, &[nr as usize], &ranges, &rows, &mut bytes);
                }
                Layout::GluPanels { nr } => {
                    let half = nr as usize / 2;
                    interleave(g, nr as usize, &[half, half], &ranges, &rows, &mut bytes);
                }
            }
            out.write_all(&bytes)?;
        }
    }
    Ok(g.bytes())
}

/// One panel: column `k` of every row, for each `k`, with `widths` columns per range, padded by zeros.
fn interleave(
    g: &Geometry,
    nr: usize,
    widths: &[usize],
    ranges: &[Range<usize>],
    rows: &[f32],
    bytes: &mut Vec<u8>,
) {
    let size = g.format.bytes(1);
    bytes.resize(nr * g.cols * size, 0);
    let (mut column, mut row) = (0, 0);
    for (range, &width) in ranges.iter().zip(widths) {
        for j in 0..range.len() {
            let values = &rows[(row + j) * g.cols..][..g.cols];
            let first = (column + j) * size;
            let cells = bytes.get_mut(first..).unwrap_or_default().chunks_mut(nr * size);
            for (cell, &x) in cells.zip(values) {
                put(g.format, x, cell);
            }
        }
        row += range.len();
        column += width;
    }
}

fn put(format: Format, x: f32, cell: &mut [u8]) {
    match format {
        Format::F32 => cell[..4].copy_from_slice(&x.to_le_bytes()),
        Format::Bf16 => cell[..2].copy_from_slice(&bf16::from_f32(x).to_le_bytes()),
        _ => cell[..2].copy_from_slice(&f16::from_f32(x).to_le_bytes()),
    }
}

fn get(format: Format, cell: &[u8]) -> f32 {
    match (format, cell) {
        (Format::F32, &[a, b, c, d, ..]) => f32::from_le_bytes([a, b, c, d]),
        (Format::Bf16, &[a, b, ..]) => bf16::from_le_bytes([a, b]).to_f32(),
        (Format::F16, &[a, b, ..]) => f16::from_le_bytes([a, b]).to_f32(),
        _ => 0.0,
    }
}

fn encode(format: Format, values: &[f32], bytes: &mut Vec<u8>) {
    let size = format.bytes(1);
    bytes.resize(values.len() * size, 0);
    for (cell, &x) in bytes.chunks_mut(size).zip(values) {
        put(format, x, cell);
    }
}

/// Value that a number has after it was stored in `format`.
pub fn round(format: Format, x: f32) -> f32 {
    match format {
        Format::F32 => x,
        Format::Bf16 => bf16::from_f32(x).to_f32(),
        _ => f16::from_f32(x).to_f32(),
    }
}

/// Reads rows `rows` of matrix `lead` back from a packed weight into `out`, row-major `[rows, cols]`.
///
/// # Errors
/// `UnexpectedEof` if `packed` is shorter than the geometry says, `InvalidInput` if the rows or `out` do
/// not fit it.
pub fn unpack_rows(
    geometry: &Geometry,
    packed: &[u8],
    lead: usize,
    rows: Range<usize>,
    out: &mut [f32],
) -> io::Result<()> {
    let g = geometry;
    if lead >= g.lead || rows.end > g.rows || out.len() != rows.len() * g.cols {
        return Err(io::Error::new(
            io::ErrorKind::InvalidInput,
            format!("rows {rows:?} of matrix {lead} into {} numbers do not fit {g:?}", out.len()),
        ));
    }
    let size = g.format.bytes(1);
    let start = lead * g.matrix_bytes() as usize;
    for (row, out) in rows.zip(out.chunks_exact_mut(g.cols.max(1))) {
        let (first, step) = g.locate(row);
        let end = first + g.cols.saturating_sub(1) * step + 1;
        let cells =
            packed.get(start + first * size..start + end * size).ok_or(io::ErrorKind::UnexpectedEof)?;
        for (x, cell) in out.iter_mut().zip(cells.chunks(step * size)) {
            *x = get(g.format, cell);
        }
    }
    Ok(())
}

/// Packs a weight that is at hand as f32, row-major `[lead, rows, cols]`.
///
/// # Errors
/// `UnexpectedEof` if `values` are too few.
pub fn pack_slice(geometry: &Geometry, values: &[f32]) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::with_capacity(geometry.bytes() as usize);
    let cols = geometry.cols;
    let read = |lead: usize, rows: Range<usize>, out: &mut [f32]| {
        let start = (lead * geometry.rows + rows.start) * cols;
        let from = values.get(start..start + out.len()).ok_or(io::ErrorKind::UnexpectedEof)?;
        out.copy_from_slice(from);
        Ok::<(), io::Error>(())
    };
    pack(geometry, read, &mut bytes)?;
    Ok(bytes)
}
