//! Weight packing: logical rows of f32 to the exact order and format that kernels read, and back.
//!
//! Packing streams: it asks for the rows of one panel at a time, and gives the bytes of a block of panels, so memory does
//! not grow with the weight. Blocks do not know of each other: whoever has threads packs many at a time. The orders are
//! those of [`Layout`].

mod order;
mod place;
pub mod quantise;
mod vectors;

use half::{bf16, f16};
use moec_ir::plan::Layout;
use moec_ir::types::{Format, GROUP};
use order::Lane;
use quantise::Group;
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

/// How much errors matter: of a matrix, by its number in the weight, one number per column. They are finite
/// and not negative, and only their proportions count. `None`: all the same.
pub type Importance<'a> = dyn Fn(usize) -> Option<&'a [f32]> + 'a;

/// Rows of a matrix that are read together when the layout is [`Layout::Rows`].
const ROWS_AT_ONCE: usize = 16;

/// Numbers of a block, where a panel has no more: half a megabyte of bf16 stays in the second-level cache, and quantising
/// them takes some milliseconds.
const SHARE: usize = 1 << 18;

/// Bytes of a packed weight: `lead` matrices of `rows` × `cols`, all padding included.
pub const fn packed_bytes(layout: Layout, format: Format, lead: usize, rows: usize, cols: usize) -> u64 {
    Geometry { layout, format, lead, rows, cols }.bytes()
}

impl Geometry {
    /// Bytes in all.
    pub const fn bytes(&self) -> u64 {
        self.lead as u64 * self.matrix_bytes()
    }

    /// Bytes of one matrix; 0 where the layout does not fit it.
    pub const fn matrix_bytes(&self) -> u64 {
        match self.layout.stored_rows(self.rows as u64) {
            Some(rows) => rows * self.row_bytes() as u64,
            None => 0,
        }
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
            Layout::Rows => {
                let (rows, _) = cut(p * ROWS_AT_ONCE, ROWS_AT_ONCE, self.rows);
                let there = rows.len();
                vec![(rows, there)]
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
            Layout::Rows => self.rows.div_ceil(ROWS_AT_ONCE),
            Layout::Panels { nr } => self.rows.div_ceil(nr as usize),
            Layout::GluPanels { nr } => (self.rows / 2).div_ceil(nr as usize / 2),
        }
    }

    /// Where a row lies: the first byte of its panel in its matrix, and its place in there.
    fn locate(&self, row: usize) -> (usize, Lane) {
        let (panel, column, nr) = match self.layout {
            Layout::Rows => return (row * self.row_bytes(), Lane::of_row(self.format, self.cols)),
            Layout::Panels { nr } => (row / nr as usize, row % nr as usize, nr as usize),
            Layout::GluPanels { nr } => {
                let (nr, half, inter) = (nr as usize, nr as usize / 2, self.rows / 2);
                let (column, first) = if row < inter { (row, 0) } else { (row - inter, half) };
                (column / half, first + column % half, nr)
            }
        };
        (panel * nr * self.row_bytes(), Lane::of_panel(self.format, nr, column))
    }

    /// Place of column `column` in a panel of this layout, and its first byte in the panel: rows that are by
    /// themselves follow each other.
    fn lane(&self, column: usize) -> (usize, Lane) {
        match self.layout {
            Layout::Rows => (column * self.row_bytes(), Lane::of_row(self.format, self.cols)),
            Layout::Panels { nr } | Layout::GluPanels { nr } => {
                (0, Lane::of_panel(self.format, nr as usize, column))
            }
        }
    }
}

/// A run of panels of one matrix, which are packed together.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Block {
    /// Matrix.
    pub lead: usize,
    /// Size when packed.
    pub bytes: usize,
    panels: Range<usize>,
}

impl Geometry {
    /// The whole weight in the order of its bytes, block by block. Each has as many panels as come near `SHARE`.
    pub fn blocks(&self) -> impl Iterator<Item = Block> + use<> {
        let (g, panels) = (*self, self.panels());
        let rows = match g.layout {
            Layout::Rows => ROWS_AT_ONCE,
            Layout::Panels { nr } | Layout::GluPanels { nr } => nr as usize,
        };
        let step = (SHARE / (rows * g.cols).max(1)).max(1);
        // The last rows that are by themselves may be fewer.
        let start = move |p: usize| (p * rows * g.row_bytes()).min(g.matrix_bytes() as usize);
        let runs = move || (0..panels).step_by(step).map(move |p| p..(p + step).min(panels));
        let block = move |lead, panels: Range<usize>| {
            let bytes = start(panels.end) - start(panels.start);
            Block { lead, bytes, panels }
        };
        (0..g.lead).flat_map(move |lead| runs().map(move |panels| block(lead, panels)))
    }

    /// Ranges of rows that a block asks for, in their order.
    pub fn rows_of(&self, block: &Block) -> impl Iterator<Item = Range<usize>> {
        block.panels.clone().flat_map(|p| self.panel_rows(p)).map(|(rows, _)| rows)
    }
}

/// Where the rows of a weight come from.
pub trait Rows<E> {
    /// Fills `out`, row-major with full columns, with those rows of that matrix.
    ///
    /// # Errors
    /// Whatever keeps them from being read.
    fn read(&mut self, lead: usize, rows: Range<usize>, out: &mut [f32]) -> Result<(), E>;

    /// As [`Rows::read`], but as bytes in the format of the packed weight, little-endian, if they are at hand so: what
    /// `read` gives, rounded. `false`: they are not, and `out` holds anything.
    ///
    /// # Errors
    /// As [`Rows::read`].
    fn stored(&mut self, _lead: usize, _rows: Range<usize>, _out: &mut [u8]) -> Result<bool, E> {
        Ok(false)
    }
}

impl<E, F: FnMut(usize, Range<usize>, &mut [f32]) -> Result<(), E>> Rows<E> for F {
    fn read(&mut self, lead: usize, rows: Range<usize>, out: &mut [f32]) -> Result<(), E> {
        self(lead, rows, out)
    }
}

/// Memory of one panel's rows, to be used again for the next.
#[derive(Debug, Default)]
pub struct Scratch {
    numbers: Vec<f32>,
    stored: Vec<u8>,
}

/// Packs a block behind what `out` holds. The bytes of all blocks, one after the other, are the weight's.
///
/// Numbers are rounded to the nearest, ties to even; those of grouped formats as [`quantise`] says, by
/// `importance`, that of the block's matrix. Padding is zero.
///
/// # Errors
/// Those of `rows`.
pub fn pack_block<E>(
    geometry: &Geometry,
    block: &Block,
    importance: Option<&[f32]>,
    rows: &mut impl Rows<E>,
    scratch: &mut Scratch,
    out: &mut Vec<u8>,
) -> Result<(), E> {
    let g = geometry;
    let size = if g.format.is_grouped() { 0 } else { g.format.row_bytes(1) };
    for p in block.panels.clone() {
        let ranges = g.panel_rows(p);
        let numbers = ranges.iter().map(|(rows, _)| rows.len() * g.cols).sum::<usize>();
        let columns = ranges.iter().map(|(_, columns)| columns).sum::<usize>();
        let start = out.len();
        out.resize(start + columns * g.row_bytes(), 0);
        let panel = out.get_mut(start..).unwrap_or_default();
        scratch.stored.resize(numbers * size, 0);
        if size > 0
            && each(g, &ranges, size, &mut scratch.stored, |range, out| rows.stored(block.lead, range, out))?
        {
            place::place(g, &ranges, &scratch.stored, panel);
            continue;
        }
        scratch.numbers.resize(numbers, 0.0);
        each(g, &ranges, 1, &mut scratch.numbers, |range, out| {
            rows.read(block.lead, range, out).map(|()| true)
        })?;
        if size > 0 {
            place::narrow(g.format, &scratch.numbers, &mut scratch.stored);
            place::place(g, &ranges, &scratch.stored, panel);
        } else {
            vectors::widest(Quantise { g, ranges: &ranges, rows: &scratch.numbers, importance, panel });
        }
    }
    Ok(())
}

/// Gives every range of rows its part of `out`, of so many items per number, until one answers `false`.
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

/// Packs a weight, one panel at a time. `read(lead, rows, out)` is [`Rows::read`]; the rest is as [`pack_block`] has it.
/// Returns the bytes written, which are [`Geometry::bytes`].
///
/// # Errors
/// Those of `read` and of the writer.
pub fn pack<E: From<io::Error>>(
    geometry: &Geometry,
    importance: &Importance<'_>,
    mut read: impl FnMut(usize, Range<usize>, &mut [f32]) -> Result<(), E>,
    out: &mut impl Write,
) -> Result<u64, E> {
    let (mut scratch, mut bytes) = (Scratch::default(), Vec::new());
    for block in geometry.blocks() {
        bytes.clear();
        pack_block(geometry, &block, importance(block.lead), &mut read, &mut scratch, &mut bytes)?;
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
        let mut rows = rows.chunks_exact(g.cols.max(1));
        let mut first = 0;
        for (range, columns) in ranges {
            for column in 0..*columns {
                let (at, lane) = g.lane(first + column);
                let bytes = panel.get_mut(at..).unwrap_or_default();
                match if column < range.len() { rows.next() } else { None } {
                    Some(row) => lane.put(row, importance, bytes),
                    None => lane.pad(g.cols, bytes),
                }
            }
            first += columns;
        }
    }
}

/// Groups of a row in a grouped format, the last one filled up with zeros, rounded as [`pack()`] does.
pub fn groups(format: Format, row: &[f32], importance: Option<&[f32]>) -> impl Iterator<Item = Group> {
    row.chunks(GROUP).enumerate().map(move |(g, x)| order::quantised(format, g, x, importance))
}

/// Rounds whole rows of `cols` numbers to what a format holds.
pub fn round_rows(format: Format, cols: usize, values: &mut [f32]) {
    if !format.is_grouped() {
        for x in values {
            *x = round(format, *x);
        }
        return;
    }
    for row in values.chunks_mut(cols.max(1)) {
        for (g, x) in row.chunks_mut(GROUP).enumerate() {
            let stored = order::quantised(format, g, x, None).values();
            x.copy_from_slice(&stored[..x.len()]);
        }
    }
}

/// Whether a format holds something near a number: neither an infinity nor, if it is grouped, none at all.
pub fn holds(format: Format, x: f32) -> bool {
    if format.is_grouped() {
        x.abs() <= quantise::LARGEST
    } else {
        !x.is_finite() || round(format, x).is_finite()
    }
}

/// The first number that a format does not hold.
pub fn past(format: Format, values: &[f32]) -> Option<f32> {
    // The largest number that any of them holds is seldom reached. As an integer: a loop that vectorises.
    let largest = values.iter().fold(0, |m: i32, x| m.max(x.to_bits().cast_signed() & i32::MAX));
    let safe = if format == Format::F16 { f16::MAX.to_f32() } else { quantise::LARGEST };
    if largest <= safe.to_bits().cast_signed() {
        return None;
    }
    values.iter().copied().find(|x| !holds(format, *x))
}

/// Value that a number has after it was stored in a format whose numbers stand alone.
fn round(format: Format, x: f32) -> f32 {
    match format {
        Format::Bf16 => bf16::from_f32(x).to_f32(),
        Format::F16 => f16::from_f32(x).to_f32(),
        Format::F32 | Format::Q8 | Format::Q4 => x,
    }
}

impl Geometry {
    /// The bytes of a matrix in a packed weight, if `rows` of it and `numbers` numbers fit each other.
    fn matrix<'p>(
        &self,
        packed: &'p [u8],
        lead: usize,
        rows: &Range<usize>,
        numbers: usize,
    ) -> io::Result<&'p [u8]> {
        if lead >= self.lead || rows.end > self.rows || numbers != rows.len() * self.cols {
            return Err(io::Error::new(
                io::ErrorKind::InvalidInput,
                format!("rows {rows:?} of matrix {lead} into {numbers} numbers do not fit {self:?}"),
            ));
        }
        let size = self.matrix_bytes() as usize;
        Ok(packed.get(lead * size..).ok_or(io::ErrorKind::UnexpectedEof)?)
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
    let matrix = g.matrix(packed, lead, &rows, out.len())?;
    for (row, out) in rows.zip(out.chunks_exact_mut(g.cols.max(1))) {
        let (panel, lane) = g.locate(row);
        let bytes = matrix.get(panel..).ok_or(io::ErrorKind::UnexpectedEof)?;
        lane.get(bytes, out).ok_or(io::ErrorKind::UnexpectedEof)?;
    }
    Ok(())
}

/// Rounds rows `rows` of matrix `lead` as they were when they were packed: in grouped formats to the nearest
/// codes of the scales that `packed` holds, whatever errors mattered when these were chosen. A group that was
/// stored without a scale must be as good as zero, and stays what it is otherwise.
///
/// # Errors
/// As [`unpack_rows`].
pub fn round_as_packed(
    geometry: &Geometry,
    packed: &[u8],
    lead: usize,
    rows: Range<usize>,
    values: &mut [f32],
) -> io::Result<()> {
    let g = geometry;
    if !g.format.is_grouped() {
        round_rows(g.format, g.cols, values);
        return Ok(());
    }
    let matrix = g.matrix(packed, lead, &rows, values.len())?;
    for (row, values) in rows.zip(values.chunks_exact_mut(g.cols.max(1))) {
        let (panel, lane) = g.locate(row);
        let bytes = matrix.get(panel..).ok_or(io::ErrorKind::UnexpectedEof)?;
        for (i, x) in values.chunks_mut(GROUP).enumerate() {
            let scale = lane.group(i, bytes).ok_or(io::ErrorKind::UnexpectedEof)?.scale;
            let all = order::filled(x);
            if scale == bf16::ZERO && Group::nearest(g.format, &all, &[1.0; GROUP]) != Group::ZERO {
                continue;
            }
            let stored = Group::with_scale(g.format, &all, scale).values();
            x.copy_from_slice(&stored[..x.len()]);
        }
    }
    Ok(())
}

/// Packs a weight that is at hand as f32, row-major `[lead, rows, cols]`. All errors matter the same.
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
    pack(geometry, &|_| None, read, &mut bytes)?;
    Ok(bytes)
}
