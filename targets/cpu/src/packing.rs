//! Packed weights: from expressions over checkpoint tensors to segments, and back.

use crate::feedback::Shared;
use moec_codegen::pack::{self, Feedback, Geometry, Rows, Weighting, feedback};
pub use moec_codegen::pack::{Block, Scratch};
use moec_ir::plan::{Layout, Segment};
use moec_ir::types::GROUP;
use moec_ir::{Format, Source, Weight};
use std::error::Error;
use std::fmt;
use std::io;
use std::ops::Range;
use std::sync::Arc;

/// Reason that a weight could not be packed.
#[derive(Debug, thiserror::Error)]
pub enum PackError {
    /// Its tensors could not be read.
    #[error("{0}")]
    Read(Box<dyn Error + Send + Sync>),
    /// A number is outside of the format's range.
    #[error("weight `{name}` holds {value:e}, which is past what {format} can hold")]
    Range {
        /// Weight.
        name: String,
        /// Format.
        format: Format,
        /// Number.
        value: f32,
    },
    /// Its numbers are not groups of a format with scales of two levels, to which nothing is rounded.
    #[error(
        "weight `{name}` cannot be stored in {format}: it is not, or not in whole groups, what the checkpoint has"
    )]
    Cut {
        /// Weight.
        name: String,
        /// Format.
        format: Format,
    },
    /// The importance of its channels is not what packing takes.
    #[error("the importance of matrix {matrix} of weight `{name}` is not {cols} finite numbers from 0 on")]
    Importance {
        /// Weight.
        name: String,
        /// Matrix.
        matrix: usize,
        /// Input channels.
        cols: usize,
    },
    /// Its segment has another form than weights have.
    #[error(transparent)]
    Form(#[from] io::Error),
}

/// Importance of the errors of weights for each input channel, for example the mean square of the channel.
/// Grouped formats choose scales and codes by it.
pub trait WeightImportance: fmt::Debug + Sync {
    /// Importance of the input channels (columns) of matrix `matrix` (0 except for experts and heads) of a
    /// weight, by its name in the Graph: one number per channel, finite and not negative; only the
    /// proportions count. `None`: all channels of that matrix count the same.
    fn importance(&self, weight: &str, matrix: usize) -> Option<&[f32]>;

    /// For matrix `matrix` of a weight: the feedback between errors of its columns, if known. Every call
    /// computes it again.
    fn feedback(&self, weight: &str, matrix: usize) -> Option<Arc<Feedback>>;

    /// The same for a table that is read by rows: how errors in a row's channels cancel each other in the
    /// readers of the row.
    fn table(&self, _weight: &str) -> Option<Arc<Feedback>> {
        None
    }

    /// Whether weights are those of packed segments, and are packed as they were.
    fn stored(&self) -> bool {
        false
    }
}

/// Weights that are read back from packed segments.
#[derive(Clone, Copy, Debug)]
pub struct Stored;

impl WeightImportance for Stored {
    fn importance(&self, _: &str, _: usize) -> Option<&[f32]> {
        None
    }

    fn feedback(&self, _: &str, _: usize) -> Option<Arc<Feedback>> {
        None
    }

    fn stored(&self) -> bool {
        true
    }
}

/// Extents of a weight as `[matrices, rows, cols]`.
fn extents(shape: &[usize]) -> Option<[usize; 3]> {
    match *shape {
        [c] => Some([1, 1, c]),
        [r, c] => Some([1, r, c]),
        [l, r, c] => Some([l, r, c]),
        _ => None,
    }
}

/// Bytes of a packed weight; `None` where they are past what 64 bits hold.
pub fn packed_bytes(layout: Layout, format: Format, shape: &[usize]) -> Option<u64> {
    let [matrices, rows, cols] = extents(shape)?;
    // Padding adds less than a panel per matrix and a group per row.
    let bound = (matrices as u128) * (rows as u128 + 4096) * (cols as u128 + GROUP as u128) * 4;
    (bound < u128::from(u64::MAX)).then(|| pack::packed_bytes(layout, format, matrices, rows, cols))
}

fn geometry(segment: &Segment) -> Option<Geometry> {
    let shape: Vec<usize> = segment.shape.iter().map(|&d| d as usize).collect();
    let [matrices, rows, cols] = extents(&shape)?;
    Some(Geometry { layout: segment.layout, format: segment.format, matrices, rows, cols })
}

/// Matrices of a weight while they are packed into a segment, block by block. Several threads may pack blocks
/// at a time.
pub struct Packer<'a> {
    geometry: Geometry,
    /// Number of its first matrix in the weight.
    first: usize,
    weight: &'a Weight,
    source: &'a dyn Source,
    importance: Option<&'a dyn WeightImportance>,
    /// Values that the blocks of a matrix share.
    shared: Shared,
}

impl<'a> Packer<'a> {
    /// Matrices `matrices` of a weight, for its segment. `importance` tells grouped formats which errors
    /// matter; `None`: all the same.
    ///
    /// # Errors
    /// A weight of four axes, or an importance that is not one of its columns.
    pub fn new(
        segment: &Segment,
        weight: &'a Weight,
        source: &'a dyn Source,
        importance: Option<&'a dyn WeightImportance>,
        matrices: Range<usize>,
    ) -> Result<Self, PackError> {
        let g = geometry(segment).ok_or_else(|| io::Error::other("a weight of four axes"))?;
        let geometry = Geometry { matrices: matrices.len(), ..g };
        let shared = Shared::new(geometry.blocks_of_one());
        let packer = Self { geometry, first: matrices.start, weight, source, importance, shared };
        let usable = |w: &[f32]| w.len() == g.cols && w.iter().all(|w| w.is_finite() && *w >= 0.0);
        if let Some(matrix) =
            (0..matrices.len()).find(|&matrix| packer.matter(matrix).is_some_and(|w| !usable(w)))
        {
            let name = weight.name.clone();
            return Err(PackError::Importance { name, matrix: matrices.start + matrix, cols: g.cols });
        }
        Ok(packer)
    }

    /// Importance applies to the input of a matrix; a table that is read by rows has none.
    fn matter(&self, matrix: usize) -> Option<&'a [f32]> {
        self.importance
            .filter(|_| !self.by_rows())
            .and_then(|i| i.importance(&self.weight.name, self.first + matrix))
    }

    /// Whether the weight is read by rows: a table, or the bundles of neurons.
    fn by_rows(&self) -> bool {
        self.geometry.layout.is_by_rows()
    }

    fn feedback(&self, by: &dyn WeightImportance, matrix: usize) -> Option<Arc<Feedback>> {
        let name = &self.weight.name;
        if self.by_rows() { by.table(name) } else { by.feedback(name, self.first + matrix) }
    }

    /// The blocks, in the order of their bytes.
    pub fn blocks(&self) -> impl Iterator<Item = Block> + use<> {
        self.geometry.blocks()
    }

    /// Number of blocks of a matrix.
    pub fn blocks_of_one(&self) -> usize {
        self.geometry.blocks_of_one()
    }

    /// Notifies the source that a block will be packed soon.
    pub fn expect(&self, block: &Block) {
        let Self { weight, source, .. } = *self;
        for rows in self.geometry.rows_of(block) {
            weight.expr.will_read(self.first + block.matrix, rows, 0..self.geometry.cols, source);
        }
    }

    /// Packs a block after what `out` holds.
    ///
    /// # Errors
    /// [`PackError::Read`] and [`PackError::Range`].
    pub fn pack(&self, block: &Block, scratch: &mut Scratch, out: &mut Vec<u8>) -> Result<(), PackError> {
        let stored = self.importance.is_some_and(WeightImportance::stored);
        let weighting = Weighting { stored, ..Weighting::of(self.matter(block.matrix)) };
        let outliers = self.outliers(block.matrix, weighting)?;
        let by = self.importance.filter(|_| feedback::uses_feedback(self.geometry.format) && !stored);
        let factors = |i| {
            let all = self.feedback(i, block.matrix)?;
            match outliers.as_deref() {
                Some(outliers) => all.without(outliers).map(Arc::new),
                None => Some(all),
            }
        };
        let shared = by.and_then(|i| self.shared.of(block.matrix, || factors(i)));
        let weighting = Weighting { feedback: shared.as_deref(), outliers: outliers.as_deref(), ..weighting };
        let packed = pack::pack_block(&self.geometry, block, weighting, &mut &*self, scratch, out);
        self.shared.done(block.matrix);
        packed
    }
}

impl Packer<'_> {
    /// The outliers of a matrix, if its format has any.
    fn outliers(&self, matrix: usize, weighting: Weighting<'_>) -> Result<Option<Arc<[u32]>>, PackError> {
        let g = &self.geometry;
        if g.format.outliers(g.cols) == 0 {
            return Ok(None);
        }
        let choose = || pack::outliers(g, matrix, weighting, &mut &*self);
        match self.shared.outliers(matrix, || choose().ok().map(Arc::from)) {
            Some(found) => Ok(Some(found)),
            // Every block gets the error with which choosing them failed.
            None => choose().map(|found| Some(Arc::from(found))),
        }
    }
}

impl Rows<PackError> for &Packer<'_> {
    fn read(&mut self, matrix: usize, rows: Range<usize>, out: &mut [f32]) -> Result<(), PackError> {
        let Packer { geometry: g, weight, source, .. } = **self;
        weight.expr.read(self.first + matrix, rows, 0..g.cols, source, out).map_err(PackError::Read)?;
        match pack::first_overflow(g.format, out) {
            Some(value) => Err(PackError::Range { name: weight.name.clone(), format: g.format, value }),
            None => Ok(()),
        }
    }

    fn stored(&mut self, matrix: usize, rows: Range<usize>, out: &mut [u8]) -> Result<bool, PackError> {
        let Packer { geometry: g, weight, source, .. } = **self;
        let read = weight.expr.read_stored(g.format, self.first + matrix, rows, 0..g.cols, source, out);
        let read = read.map_err(PackError::Read)?;
        if g.format.has_fine_scales()
            && !(read && pack::are_fine_groups(g.format, g.cols / g.layout.parts(), out))
        {
            return Err(PackError::Cut { name: weight.name.clone(), format: g.format });
        }
        Ok(read)
    }
}

/// Groups of rows of `cols` numbers in a grouped format, as packing rounds them: scale and codes. The scale
/// is a number of [`Format::scales`].
///
/// # Errors
/// The first number that is past what the format holds.
pub fn groups(
    format: Format,
    rows: &[f32],
    cols: usize,
    weighting: Weighting<'_>,
) -> Result<impl Iterator<Item = (f32, [i8; GROUP])>, f32> {
    match pack::first_overflow(format, rows) {
        Some(x) => Err(x),
        None => Ok(pack::groups(format, rows, cols, weighting).into_iter().map(|g| (g.scale, g.codes))),
    }
}

/// One matrix of a segment, as a weight of its own, and its bytes.
fn matrix_at<'p>(
    segment: &Segment,
    g: Geometry,
    packed: &'p [u8],
    matrix: usize,
) -> io::Result<(Geometry, &'p [u8])> {
    if matrix >= g.matrices {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    let at = usize::try_from(segment.pitch).ok().and_then(|pitch| pitch.checked_mul(matrix));
    let bytes = at.and_then(|at| packed.get(at..)).ok_or(io::ErrorKind::UnexpectedEof)?;
    Ok((Geometry { matrices: 1, ..g }, bytes))
}

/// Reads a rectangle of a packed weight back as f32. `packed` is the whole segment, from its first matrix on.
///
/// # Errors
/// A segment that is too short, or a rectangle outside of it.
pub fn unpack(
    segment: &Segment,
    packed: &[u8],
    matrix: usize,
    rows: Range<usize>,
    cols: Range<usize>,
    out: &mut [f32],
) -> io::Result<()> {
    let g = geometry(segment).ok_or(io::ErrorKind::InvalidInput)?;
    let (g, packed) = matrix_at(segment, g, packed, matrix)?;
    if cols == (0..g.cols) {
        return pack::unpack_rows(&g, packed, 0, rows, out);
    }
    let mut row = vec![0.0; g.cols];
    for (r, out) in rows.zip(out.chunks_exact_mut(cols.len().max(1))) {
        pack::unpack_rows(&g, packed, 0, r..r + 1, &mut row)?;
        out.copy_from_slice(row.get(cols.clone()).ok_or(io::ErrorKind::InvalidInput)?);
    }
    Ok(())
}

/// Reads a rectangle as [`unpack`] does, of a format with scales of two levels, as a checkpoint has it
/// ([`moec_ir::Source::stored`]).
///
/// # Errors
/// As [`unpack`].
pub fn unpack_stored(
    segment: &Segment,
    packed: &[u8],
    matrix: usize,
    rows: Range<usize>,
    cols: Range<usize>,
    out: &mut [u8],
) -> io::Result<()> {
    let g = geometry(segment).ok_or(io::ErrorKind::InvalidInput)?;
    let (g, packed) = matrix_at(segment, g, packed, matrix)?;
    let size = g.format.stored_bytes();
    let mut row = vec![0; g.cols * size];
    for (r, out) in rows.zip(out.chunks_exact_mut((cols.len() * size).max(1))) {
        pack::unpack_stored(&g, packed, 0, r..r + 1, &mut row)?;
        let part = row.get(cols.start * size..cols.end * size).ok_or(io::ErrorKind::InvalidInput)?;
        out.copy_from_slice(part);
    }
    Ok(())
}

/// Rounds a whole weight as it was rounded when it was packed into `segment`, whose bytes are `packed`.
/// Grouped formats keep the scales that were chosen then, and their codes if these were rounded with feedback
/// (`fed`).
///
/// # Errors
/// A segment that is too short, or numbers that are not the whole of it.
pub fn round_as_packed(segment: &Segment, packed: &[u8], fed: bool, values: &mut [f32]) -> io::Result<()> {
    let g = geometry(segment).ok_or(io::ErrorKind::InvalidInput)?;
    let numbers = g.rows * g.cols;
    if values.len() != g.matrices * numbers {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    for (matrix, values) in values.chunks_exact_mut(numbers.max(1)).enumerate() {
        let (g, packed) = matrix_at(segment, g, packed, matrix)?;
        pack::round_as_packed(&g, packed, 0, 0..g.rows, fed, values)?;
    }
    Ok(())
}
