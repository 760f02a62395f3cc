//! Weight packing: logical rows of f32 to the exact order and format that kernels read, and back.
//!
//! Packing streams: it requests the rows of one panel at a time, and gives the bytes of a block of panels, so
//! memory does not grow with the weight. Blocks are independent: a caller with threads packs many at a time.
//! The orders are those of [`Layout`].
#![expect(
    clippy::cast_possible_truncation,
    reason = "codes are rounded and clamped to their format; sizes are those of mapped weights"
)]

mod blocks;
pub mod channel;
mod columns;
mod descent;
mod e2m1;
pub mod feedback;
mod fine;
mod gate_bound;
mod group;
mod lanes;
mod order;
mod patterns;
mod place;
pub mod q4o;
mod quads;
pub mod quantise;
mod scale;
mod strip;
mod vectors;
mod weighting;

pub use blocks::{Block, Rows, Scratch, groups, outliers, pack, pack_block};
pub use feedback::Feedback;
pub use fine::are_fine_groups;
use half::{bf16, f16};
use moec_ir::bundle::{BLOCK, Bundle, DiskNeurons, PARTS, Part};
use moec_ir::plan::Layout;
use moec_ir::types::{FINE_GROUP, Format, GROUP};
use order::PackedRow;
pub use q4o::{Q4o, quantise_q4o};
use quantise::Group;
use std::io;
use std::ops::Range;
pub use weighting::{Importance, Weighting};

/// Extents and storage of a packed weight `[matrices, rows, cols]`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Geometry {
    /// Order of the numbers.
    pub layout: Layout,
    /// Number format.
    pub format: Format,
    /// Matrices (experts, heads); 1 for a plain matrix.
    pub matrices: usize,
    /// Rows (output channels) of a matrix.
    pub rows: usize,
    /// Columns (input channels) of a matrix.
    pub cols: usize,
}

/// Rows of a matrix that are read together when they are by themselves ([`Layout::is_by_rows`]).
const ROWS_AT_ONCE: usize = 16;

/// Bytes of a packed weight: `matrices` matrices of `rows` × `cols`, all padding included.
pub fn packed_bytes(layout: Layout, format: Format, matrices: usize, rows: usize, cols: usize) -> u64 {
    Geometry { layout, format, matrices, rows, cols }.bytes()
}

impl Geometry {
    /// Bytes in all.
    pub fn bytes(&self) -> u64 {
        self.matrices as u64 * self.matrix_bytes()
    }

    /// Bytes of one matrix; 0 where the layout does not fit it.
    pub fn matrix_bytes(&self) -> u64 {
        self.layout.matrix_bytes(self.format, self.rows as u64, self.cols).unwrap_or(0)
    }

    /// Bytes of the table of a matrix's outliers, after its panels.
    const fn outlier_table_bytes(&self) -> usize {
        Layout::outlier_table_bytes(self.format, self.cols) as usize
    }

    /// Bytes of a stored row.
    const fn row_bytes(&self) -> usize {
        self.layout.row_bytes(self.format, self.cols)
    }

    /// Rows that panel `p` holds, by column, in ranges: two of them in a gated panel. Every range comes with
    /// the columns that are there for it.
    fn panel_rows(&self, p: usize) -> Vec<(Range<usize>, usize)> {
        let cut = |start: usize, len: usize, end: usize| (start.min(end)..(start + len).min(end), len);
        match self.layout {
            Layout::Rows | Layout::Neurons { .. } | Layout::Gates | Layout::UpDown | Layout::Bundles => {
                let (rows, _) = cut(p * self.at_once(), self.at_once(), self.rows);
                // The last unit of neurons is padded.
                let columns = if self.layout == Layout::Bundles { self.at_once() } else { rows.len() };
                vec![(rows, columns)]
            }
            Layout::Panels { nr } => vec![cut(p * nr as usize, nr as usize, self.rows)],
            Layout::GluPanels { nr } => {
                let (half, inter) = (nr as usize / 2, self.rows / 2);
                let (gate, _) = cut(p * half, half, inter);
                let up = gate.start + inter..gate.end + inter;
                vec![(gate, half), (up, half)]
            }
        }
    }

    fn panels(&self) -> usize {
        match self.layout {
            Layout::Rows | Layout::Neurons { .. } | Layout::Gates | Layout::UpDown | Layout::Bundles => {
                self.rows.div_ceil(self.at_once())
            }
            Layout::Panels { nr } => self.rows.div_ceil(nr as usize),
            Layout::GluPanels { nr } => (self.rows / 2).div_ceil(nr as usize / 2),
        }
    }

    /// Stored rows of a panel. Split scales come after all rows of a matrix.
    fn at_once(&self) -> usize {
        match self.layout {
            Layout::UpDown if self.bundle().is_some_and(Bundle::has_split_scales) => self.rows.max(1),
            Layout::Rows | Layout::Gates | Layout::UpDown => ROWS_AT_ONCE,
            Layout::Neurons { .. } => BLOCK,
            Layout::Bundles => self.on_disk().map_or(1, DiskNeurons::together),
            Layout::Panels { nr } | Layout::GluPanels { nr } => nr as usize,
        }
    }

    /// The bundle of a layout of neurons, whole or in part.
    fn bundle(&self) -> Option<Bundle> {
        let bundle = |gate_bound| Some(Bundle { format: self.format, hidden: self.part_cols(), gate_bound });
        match self.layout {
            Layout::Neurons { gate_bound } => bundle(gate_bound),
            Layout::Gates | Layout::UpDown | Layout::Bundles => bundle(false),
            Layout::Rows | Layout::Panels { .. } | Layout::GluPanels { .. } => None,
        }
    }

    /// Neurons on disk, in the layouts of these.
    const fn on_disk(&self) -> Option<DiskNeurons> {
        self.layout.on_disk(self.format, self.cols)
    }

    /// Parts of a row, each of which is stored as a row of its own.
    const fn parts(&self) -> usize {
        self.layout.parts()
    }

    /// Numbers of a part.
    fn part_cols(&self) -> usize {
        self.cols / self.parts()
    }

    /// Columns of a panel; 0 in rows.
    const fn nr(&self) -> usize {
        match self.layout {
            Layout::Rows | Layout::Neurons { .. } | Layout::Gates | Layout::UpDown | Layout::Bundles => 0,
            Layout::Panels { nr } | Layout::GluPanels { nr } => nr as usize,
        }
    }

    /// Panel and column of a row.
    fn column_of(&self, row: usize) -> (usize, usize) {
        match self.layout {
            Layout::Rows | Layout::Neurons { .. } | Layout::Gates | Layout::UpDown | Layout::Bundles => {
                (row, 0)
            }
            Layout::Panels { nr } => (row / nr as usize, row % nr as usize),
            Layout::GluPanels { nr } => {
                let (half, inter) = (nr as usize / 2, self.rows / 2);
                let (column, first) = if row < inter { (row, 0) } else { (row - inter, half) };
                (column / half, first + column % half)
            }
        }
    }

    /// Place of a part of a row, counted over all rows before it: the first byte of its panel in its matrix,
    /// and its place in there.
    fn locate(&self, row: usize) -> (usize, PackedRow) {
        let ((panel, column), nr) = (self.column_of(row), self.nr());
        if nr == 0 {
            return self.lane(row, self.rows);
        }
        (panel * nr * self.row_bytes(), PackedRow::of_panel(self.format, nr, self.cols, column))
    }

    /// Place of column `column` in a panel of this layout, and its first byte in the panel: rows that are by
    /// themselves follow each other, and of neurons each part counts, in a panel or matrix of `rows`.
    fn lane(&self, column: usize, rows: usize) -> (usize, PackedRow) {
        match self.layout {
            Layout::Rows => (column * self.row_bytes(), PackedRow::of_row(self.format, self.cols)),
            Layout::Neurons { .. } => {
                let (row, part) = (column / PARTS, Part::OF_ROW[column % PARTS]);
                let at = self.bundle().map_or(0, |b| b.at(part, row, rows));
                (at, PackedRow::of_row(self.format, self.part_cols()))
            }
            Layout::Gates => (column * self.row_bytes(), PackedRow::of_row(self.format, self.part_cols())),
            Layout::UpDown | Layout::Bundles => {
                let (row, part) = (column / self.parts(), column % self.parts());
                let lane = PackedRow::of_row(self.format, self.part_cols());
                let Some(neurons) = self.on_disk() else { return (0, lane) };
                let (b, [up_down, gate]) = (neurons.bundle, neurons.at(row, rows));
                // Parts of up and down: those after a gate, if there is one.
                let Some(second) = part.checked_sub(usize::from(neurons.gates)) else {
                    return (gate, lane);
                };
                let at = up_down + second * b.up_down_part_bytes();
                if !b.has_split_scales() {
                    return (at, lane);
                }
                let scales = neurons.scales_at(row, rows) + second * b.up_down_scales_bytes();
                let first = at.min(scales);
                (first, lane.after(at - first).with_scales(scales - first))
            }
            Layout::Panels { nr } | Layout::GluPanels { nr } => {
                (0, PackedRow::of_panel(self.format, nr as usize, self.cols, column))
            }
        }
    }
}

/// Rounds whole rows of `cols` numbers to what a format holds. Where rows have a scale each, they are one
/// matrix.
pub fn round_rows(format: Format, cols: usize, values: &mut [f32]) {
    if format.is_by_channel() {
        return columns::round_matrix(format, cols, values);
    }
    if !format.is_grouped() {
        for x in values {
            *x = round(format, *x);
        }
        return;
    }
    let mut exact = Vec::new();
    for row in values.chunks_mut(cols.max(1)) {
        if format.has_fine_scales() {
            let groups: Vec<_> = fine::quantised(format, row).collect();
            for (to, group) in row.chunks_mut(FINE_GROUP).zip(groups) {
                to.iter_mut().zip(group.values(format)).for_each(|(to, x)| *to = x);
            }
            continue;
        }
        exact.clear();
        exact.extend_from_slice(row);
        order::quantised(format, &exact, None, |g, group| {
            row[g * GROUP..].iter_mut().zip(group.values()).for_each(|(to, x)| *to = x);
        });
    }
}

/// Whether a number does not overflow in a format. Quantised formats hold neither infinities nor NaN.
pub fn is_representable(format: Format, x: f32) -> bool {
    if format.is_quantised() {
        x.abs() <= format.spec().largest
    } else {
        !x.is_finite() || round(format, x).is_finite()
    }
}

/// The first number that a format does not hold.
pub fn first_overflow(format: Format, values: &[f32]) -> Option<f32> {
    // The largest number that any of them holds is seldom reached. As an integer: a loop that vectorises.
    let largest = values.iter().fold(0, |m: i32, x| m.max(x.to_bits().cast_signed() & i32::MAX));
    if largest <= format.spec().largest.to_bits().cast_signed() {
        return None;
    }
    values.iter().copied().find(|x| !is_representable(format, *x))
}

/// Value of a number after it was stored in a format without groups.
fn round(format: Format, x: f32) -> f32 {
    match format {
        Format::Bf16 => bf16::from_f32(x).to_f32(),
        Format::F16 => f16::from_f32(x).to_f32(),
        _ => x,
    }
}

impl Geometry {
    /// The parts of rows.
    fn parts_of(&self, rows: Range<usize>) -> Range<usize> {
        rows.start * self.parts()..rows.end * self.parts()
    }

    /// The bytes of a matrix in a packed weight, if `rows` of it and `numbers` numbers fit each other.
    fn matrix<'p>(
        &self,
        packed: &'p [u8],
        matrix: usize,
        rows: &Range<usize>,
        numbers: usize,
    ) -> io::Result<&'p [u8]> {
        if matrix >= self.matrices || rows.end > self.rows || numbers != rows.len() * self.cols {
            return Err(io::Error::new(
                io::ErrorKind::InvalidInput,
                format!("rows {rows:?} of matrix {matrix} into {numbers} numbers do not fit {self:?}"),
            ));
        }
        let size = self.matrix_bytes() as usize;
        Ok(packed.get(matrix * size..).ok_or(io::ErrorKind::UnexpectedEof)?)
    }
}

/// Reads rows `rows` of matrix `matrix` back from a packed weight into `out`, row-major `[rows, cols]`.
///
/// # Errors
/// `UnexpectedEof` if `packed` is shorter than the geometry says, `InvalidInput` if the rows or `out` do
/// not fit it.
pub fn unpack_rows(
    geometry: &Geometry,
    packed: &[u8],
    matrix: usize,
    rows: Range<usize>,
    out: &mut [f32],
) -> io::Result<()> {
    let g = geometry;
    let packed = g.matrix(packed, matrix, &rows, out.len())?;
    if g.format.is_by_channel() {
        return columns::unpack(g, packed, rows, out).ok_or_else(|| io::ErrorKind::UnexpectedEof.into());
    }
    for (row, out) in g.parts_of(rows).zip(out.chunks_exact_mut(g.part_cols().max(1))) {
        let (panel, lane) = g.locate(row);
        let bytes = packed.get(panel..).ok_or(io::ErrorKind::UnexpectedEof)?;
        lane.get(bytes, out).ok_or(io::ErrorKind::UnexpectedEof)?;
    }
    Ok(())
}

/// Reads rows as [`unpack_rows`] does, of a format with scales of two levels, as a checkpoint has them:
/// [`moec_ir::types::FINE_STORED`] bytes each.
///
/// # Errors
/// As [`unpack_rows`].
pub fn unpack_stored(
    geometry: &Geometry,
    packed: &[u8],
    matrix: usize,
    rows: Range<usize>,
    out: &mut [u8],
) -> io::Result<()> {
    let g = geometry;
    let out = out.as_chunks_mut().0;
    let packed = g.matrix(packed, matrix, &rows, out.len())?;
    for (row, out) in g.parts_of(rows).zip(out.chunks_exact_mut(g.part_cols().max(1))) {
        let (panel, lane) = g.locate(row);
        let bytes = packed.get(panel..).ok_or(io::ErrorKind::UnexpectedEof)?;
        lane.get_stored(g.part_cols(), bytes, out).ok_or(io::ErrorKind::UnexpectedEof)?;
    }
    Ok(())
}

/// Rounds rows `rows` of matrix `matrix` as they were when they were packed: in grouped formats to the
/// nearest codes of the scales that `packed` holds, whatever errors mattered when these were chosen. A group
/// that was stored without a scale must be as good as zero, and stays what it is otherwise. Where weights
/// were `fed`, rounded with [`Feedback`], codes are not the nearest ones: a row takes those that are stored,
/// if they differ from it by no more than rounding can. Numbers with scales of two levels are those of a
/// checkpoint, and stay as they are.
///
/// # Errors
/// As [`unpack_rows`].
pub fn round_as_packed(
    geometry: &Geometry,
    packed: &[u8],
    matrix: usize,
    rows: Range<usize>,
    fed: bool,
    values: &mut [f32],
) -> io::Result<()> {
    let g = geometry;
    if !g.format.is_quantised() {
        round_rows(g.format, g.part_cols(), values);
        return Ok(());
    }
    let packed = g.matrix(packed, matrix, &rows, values.len())?;
    if g.format.has_fine_scales() {
        return Ok(());
    }
    if g.format.is_by_channel() {
        return columns::round_as_packed(g, packed, rows, fed, values)
            .ok_or_else(|| io::ErrorKind::UnexpectedEof.into());
    }
    let mut stored = Vec::new();
    for (row, values) in g.parts_of(rows).zip(values.chunks_exact_mut(g.part_cols().max(1))) {
        let (panel, lane) = g.locate(row);
        let bytes = packed.get(panel..).ok_or(io::ErrorKind::UnexpectedEof)?;
        // Codes of patterns are chosen by the weights of their errors.
        if fed && feedback::uses_feedback(g.format) || g.format.is_by_patterns() {
            stored.resize(values.len(), 0.0);
            lane.get(bytes, &mut stored).ok_or(io::ErrorKind::UnexpectedEof)?;
            if feedback::is_plausible(values, &stored, feedback::share(g.format)) {
                values.copy_from_slice(&stored);
                continue;
            }
        }
        for (i, x) in values.chunks_mut(g.format.group()).enumerate() {
            let scale = lane.group(i * (g.format.group() / GROUP), bytes);
            let scale = scale.ok_or(io::ErrorKind::UnexpectedEof)?.scale;
            let patterns = patterns::Patterns::of(g.format);
            if scale == 0.0 {
                let mut zero = true;
                let mut see = |group: Group| zero &= group == Group::ZERO;
                match &patterns {
                    Some(patterns) => patterns.nearest(x, None, see),
                    None => see(Group::nearest(g.format, &order::zero_padded(x), &[1.0; GROUP])),
                }
                if !zero {
                    continue;
                }
            }
            for x in x.chunks_mut(GROUP) {
                // Zeros after the last number would matter for its pattern.
                let nearest = patterns.map(|patterns| patterns.at(x, scale));
                let padded = || Group::with_scale(g.format, &order::zero_padded(x), scale);
                let stored = nearest.unwrap_or_else(padded).values();
                x.copy_from_slice(&stored[..x.len()]);
            }
        }
    }
    Ok(())
}

/// Packs a weight that is given in f32, row-major `[matrices, rows, cols]`. All errors have the same weight.
///
/// # Errors
/// `UnexpectedEof` if `values` are too few.
pub fn pack_slice(geometry: &Geometry, values: &[f32]) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::with_capacity(geometry.bytes() as usize);
    let cols = geometry.cols;
    let read = |matrix: usize, rows: Range<usize>, out: &mut [f32]| {
        let start = (matrix * geometry.rows + rows.start) * cols;
        let from = values.get(start..start + out.len()).ok_or(io::ErrorKind::UnexpectedEof)?;
        out.copy_from_slice(from);
        Ok::<(), io::Error>(())
    };
    pack(geometry, &|_| Weighting::default(), read, &mut bytes)?;
    Ok(bytes)
}
