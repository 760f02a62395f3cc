//! Packing a weight block by block.

use super::order::PackedRow;
use super::quantise::Group;
use super::{Geometry, Importance, Weighting, columns, fine, gate_bound, order, place, q4o, vectors};
use moec_ir::types::{FINE_GROUP, Format, GROUP};
use std::io::{self, Write};
use std::ops::Range;

/// Numbers of a block, where a panel has no more: half a megabyte of bf16 stays in the second-level cache,
/// and quantising them takes some milliseconds.
const SHARE: usize = 1 << 18;

/// A run of panels of one matrix, which are packed together; without any, the table of outliers after them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Block {
    /// Matrix.
    pub matrix: usize,
    /// Size when packed.
    pub bytes: usize,
    panels: Range<usize>,
}

impl Geometry {
    /// The whole weight in the order of its bytes, block by block. Each has as many panels as come near
    /// `SHARE`.
    pub fn blocks(&self) -> impl Iterator<Item = Block> + use<> {
        let (g, panels) = (*self, self.panels());
        let rows = g.at_once();
        let step = (SHARE / (rows * g.cols).max(1)).max(1);
        // The last rows that are by themselves may be fewer.
        let table = g.outlier_table_bytes();
        let end = (g.matrix_bytes() as usize).saturating_sub(table);
        let start = move |p: usize| (p * rows * g.row_bytes()).min(end);
        let runs = move || (0..panels).step_by(step).map(move |p| p..(p + step).min(panels));
        let block = move |matrix, panels: Range<usize>| {
            let bytes = start(panels.end) - start(panels.start);
            Block { matrix, bytes, panels }
        };
        let table_block = move |matrix| Block { matrix, bytes: table, panels: panels..panels };
        let whole = move |matrix| {
            let panels = runs().map(move |panels| block(matrix, panels));
            panels.chain((table > 0).then(|| table_block(matrix)))
        };
        (0..g.matrices).flat_map(whole)
    }

    /// Blocks of one matrix.
    pub fn blocks_of_one(&self) -> usize {
        Self { matrices: 1, ..*self }.blocks().count()
    }

    /// Ranges of rows that a block reads, in their order.
    pub fn rows_of(&self, block: &Block) -> impl Iterator<Item = Range<usize>> {
        block.panels.clone().flat_map(|p| self.panel_rows(p)).map(|(rows, _)| rows)
    }
}

/// Source of a weight's rows.
pub trait Rows<E> {
    /// Fills `out`, row-major with full columns, with those rows of that matrix.
    ///
    /// # Errors
    /// Whatever keeps them from being read.
    fn read(&mut self, matrix: usize, rows: Range<usize>, out: &mut [f32]) -> Result<(), E>;

    /// As [`Rows::read`], but as bytes in the format of the packed weight ([`Format::stored_bytes`] each),
    /// little-endian, if they are available in it: the numbers of `read`, rounded. `false`: they are not, and
    /// the content of `out` is undefined.
    ///
    /// # Errors
    /// As [`Rows::read`].
    fn stored(&mut self, _matrix: usize, _rows: Range<usize>, _out: &mut [u8]) -> Result<bool, E> {
        Ok(false)
    }
}

impl<E, F: FnMut(usize, Range<usize>, &mut [f32]) -> Result<(), E>> Rows<E> for F {
    fn read(&mut self, matrix: usize, rows: Range<usize>, out: &mut [f32]) -> Result<(), E> {
        self(matrix, rows, out)
    }
}

/// Memory of one panel's rows, to be used again for the next.
#[derive(Debug, Default)]
pub struct Scratch {
    numbers: Vec<f32>,
    stored: Vec<u8>,
}

/// Packs a block after what `out` holds. The bytes of all blocks, one after the other, are the weight's.
///
/// Numbers are rounded to the nearest, ties to even; those of grouped formats as [`super::quantise`] says, by
/// `weighting`, that of the block's matrix; where rows have a scale each, it names the
/// [`outliers`], and its feedback is that of all other columns ([`super::Feedback::without`]). What is
/// at hand as codes and scales keeps them. Padding is zero.
///
/// # Errors
/// Errors of `rows`.
pub fn pack_block<E>(
    geometry: &Geometry,
    block: &Block,
    weighting: Weighting<'_>,
    rows: &mut impl Rows<E>,
    scratch: &mut Scratch,
    out: &mut Vec<u8>,
) -> Result<(), E> {
    let g = geometry;
    if g.format.is_by_channel() {
        let read = |range: Range<usize>, out: &mut [f32]| rows.read(block.matrix, range, out);
        if block.panels.is_empty() {
            columns::pack_table(g, weighting, out);
            return Ok(());
        }
        return columns::pack_panels(g, block.panels.clone(), weighting, read, out);
    }
    let size = g.format.stored_bytes();
    for p in block.panels.clone() {
        let ranges = g.panel_rows(p);
        let numbers = ranges.iter().map(|(rows, _)| rows.len() * g.cols).sum::<usize>();
        let columns = ranges.iter().map(|(_, columns)| columns).sum::<usize>();
        let start = out.len();
        out.resize(start + columns * g.row_bytes(), 0);
        let panel = out.get_mut(start..).unwrap_or_default();
        scratch.stored.resize(numbers * size, 0);
        if size > 0
            && each(g, &ranges, size, &mut scratch.stored, |range, out| {
                rows.stored(block.matrix, range, out)
            })?
        {
            if !g.format.is_grouped() {
                place::place(g, &ranges, &scratch.stored, panel);
                gate_bound::add(g, &mut scratch.numbers, panel);
                continue;
            }
            if g.format.has_fine_scales() {
                if let Some(groups) = fine::stored_groups(g.format, g.part_cols(), &scratch.stored) {
                    let rows = groups.chunks_exact(g.part_cols().div_ceil(FINE_GROUP).max(1));
                    each_lane(g, &ranges, rows, panel, |lane, row, bytes| {
                        lane.put_fine_groups(g.part_cols(), row, bytes);
                    });
                    continue;
                }
            } else if let Some(groups) = order::stored_groups(g.format, g.part_cols(), &scratch.stored) {
                put_groups(g, &ranges, &groups, panel);
                continue;
            }
        }
        scratch.numbers.resize(numbers, 0.0);
        each(g, &ranges, 1, &mut scratch.numbers, |range, out| {
            rows.read(block.matrix, range, out).map(|()| true)
        })?;
        if g.format.is_grouped() {
            let (rows, importance) = (scratch.numbers.as_slice(), weighting.importance);
            match weighting.rounded(g.format, g.part_cols(), rows) {
                Some(groups) => put_groups(g, &ranges, &groups, panel),
                None => vectors::widest(Quantise { g, ranges: &ranges, rows, importance, panel }),
            }
        } else {
            place::narrow(g.format, &scratch.numbers, &mut scratch.stored);
            place::place(g, &ranges, &scratch.stored, panel);
            gate_bound::add(g, &mut scratch.numbers, panel);
        }
    }
    Ok(())
}

/// The columns of matrix `matrix` that its format stores as INT8, in ascending order: those whose errors in the
/// narrower format contribute most.
///
/// # Errors
/// Errors of `rows`.
pub fn outliers<E>(
    geometry: &Geometry,
    matrix: usize,
    weighting: Weighting<'_>,
    rows: &mut impl Rows<E>,
) -> Result<Vec<u32>, E> {
    let g = geometry;
    let mut read = |range: Range<usize>, out: &mut [f32]| rows.read(matrix, range, out);
    q4o::choose([g.rows, g.cols], g.format.outliers(g.cols), weighting, &mut read)
}

/// Calls a function with every range of rows and its part of `out`, `n` items per number, until one returns
/// `false`.
fn each<T, E>(
    g: &Geometry,
    ranges: &[(Range<usize>, usize)],
    size: usize,
    mut out: &mut [T],
    mut fill: impl FnMut(Range<usize>, &mut [T]) -> Result<bool, E>,
) -> Result<bool, E> {
    for (range, _) in ranges {
        let mine = out.split_off_mut(..range.len() * g.cols * size).unwrap_or_default();
        if !fill(range.clone(), mine)? {
            return Ok(false);
        }
    }
    Ok(true)
}

/// Packs a weight, one panel at a time. `read(matrix, rows, out)` is [`Rows::read`]; the rest is as
/// [`pack_block`] has it. Returns the bytes written, which are [`Geometry::bytes`].
///
/// # Errors
/// Errors of `read` and of the writer.
pub fn pack<E: From<io::Error>>(
    geometry: &Geometry,
    importance: &Importance<'_>,
    mut read: impl FnMut(usize, Range<usize>, &mut [f32]) -> Result<(), E>,
    out: &mut impl Write,
) -> Result<u64, E> {
    let (mut scratch, mut bytes) = (Scratch::default(), Vec::new());
    let (mut known, mut wide, mut left) = (None, Vec::new(), None);
    for block in geometry.blocks() {
        bytes.clear();
        let mut weighting = importance(block.matrix);
        if geometry.format.is_by_channel() {
            if known.replace(block.matrix) != Some(block.matrix) {
                wide = outliers(geometry, block.matrix, weighting, &mut read)?;
                left = weighting.feedback.and_then(|f| f.without(&wide));
            }
            weighting = Weighting { outliers: Some(&wide), feedback: left.as_ref(), ..weighting };
        }
        pack_block(geometry, &block, weighting, &mut read, &mut scratch, &mut bytes)?;
        out.write_all(&bytes)?;
    }
    Ok(geometry.bytes())
}

/// Rounds the rows of a panel to a grouped format, into its bytes.
struct Quantise<'a> {
    g: &'a Geometry,
    ranges: &'a [(Range<usize>, usize)],
    /// Row-major.
    rows: &'a [f32],
    importance: Option<&'a [f32]>,
    panel: &'a mut [u8],
}

impl vectors::Work for Quantise<'_> {
    type Output = ();

    #[allow(clippy::inline_always, reason = "the caller vectorises it only inline")]
    #[inline(always)]
    fn run(self) {
        let Self { g, ranges, rows, importance, panel } = self;
        let rows = rows.chunks_exact(g.part_cols().max(1));
        each_lane(g, ranges, rows, panel, |lane, row, bytes| lane.put(row, importance, bytes));
    }
}

/// Writes the groups of the rows of a panel, which are known already, into its bytes.
fn put_groups(g: &Geometry, ranges: &[(Range<usize>, usize)], groups: &[Group], panel: &mut [u8]) {
    let rows = groups.chunks_exact(g.part_cols().div_ceil(GROUP).max(1));
    each_lane(g, ranges, rows, panel, |lane, row, bytes| lane.put_groups(row, bytes));
}

/// Gives every row of a panel of a grouped format to `put`, with its bytes; rows past the end are padding.
#[allow(clippy::inline_always, reason = "the caller vectorises it only inline")]
#[inline(always)]
fn each_lane<T>(
    g: &Geometry,
    ranges: &[(Range<usize>, usize)],
    mut rows: impl Iterator<Item = T>,
    panel: &mut [u8],
    put: impl Fn(PackedRow, T, &mut [u8]),
) {
    let (parts, mut first) = (g.parts(), 0);
    for (range, columns) in ranges {
        for column in 0..columns * parts {
            let (at, lane) = g.lane(first + column, *columns);
            let bytes = panel.get_mut(at..).unwrap_or_default();
            match if column < range.len() * parts { rows.next() } else { None } {
                Some(row) => put(lane, row, bytes),
                None => lane.pad(g.part_cols(), bytes),
            }
        }
        first += columns * parts;
    }
}

/// Groups of rows of `cols` numbers in a grouped format, the last one of a row filled up with zeros, rounded
/// as [`pack()`] does.
pub fn groups(format: Format, rows: &[f32], cols: usize, weighting: Weighting<'_>) -> Vec<Group> {
    if let Some(groups) = weighting.rounded(format, cols, rows) {
        return groups;
    }
    let mut groups = Vec::with_capacity(rows.len().div_ceil(GROUP));
    for row in rows.chunks(cols.max(1)) {
        order::quantised(format, row, weighting.importance, |_, group| groups.push(group));
    }
    groups
}
