//! Reading any rectangle of a weight expression without holding the whole.

use crate::expr::error;
use crate::infer::TypeError;
use crate::types::{FINE_STORED, Format};
use crate::weights::{Axis, Elementwise, Leaf, Source, WeightExpr};
use std::error::Error;
use std::ops::Range;

/// A failure while reading a weight.
pub type ReadError = Box<dyn Error + Send + Sync>;

/// Widest step for which a strided slice reads the covering rectangle instead of index by index.
const COVER_STEP: usize = 4;

/// Type that rectangles are read as.
trait Reader {
    /// A number as it is read.
    type Number: Copy + Default;
    /// Whether there is anything to compute with.
    const COMPUTES: bool;
    /// Reads a rectangle of a leaf; `false` if it cannot be read so.
    fn leaf(
        &self,
        leaf: &Leaf,
        matrix: usize,
        rows: Range<usize>,
        cols: Range<usize>,
        out: &mut [Self::Number],
    ) -> Result<bool, ReadError>;
    /// Takes numbers that are known.
    fn constant(_values: &[f32], _out: &mut [Self::Number]) {}
    /// Multiplies a row by factors.
    fn scale(_row: &mut [Self::Number], _by: &[Self::Number]) {}
    /// Puts numbers through a function.
    fn map(_map: Elementwise, _numbers: &mut [Self::Number]) {}
}

/// As f32.
struct Decoded<'a>(&'a dyn Source);

impl Reader for Decoded<'_> {
    type Number = f32;
    const COMPUTES: bool = true;

    fn leaf(
        &self,
        leaf: &Leaf,
        matrix: usize,
        rows: Range<usize>,
        cols: Range<usize>,
        out: &mut [f32],
    ) -> Result<bool, ReadError> {
        self.0.read(leaf, matrix, rows, cols, out).map(|()| true)
    }

    fn constant(values: &[f32], out: &mut [f32]) {
        out.copy_from_slice(values);
    }

    fn scale(row: &mut [f32], by: &[f32]) {
        for (x, f) in row.iter_mut().zip(by) {
            *x *= f;
        }
    }

    fn map(map: Elementwise, numbers: &mut [f32]) {
        for x in numbers {
            *x = map.of(*x);
        }
    }
}

/// As they are stored, `N` bytes each.
struct Stored<'a, const N: usize>(&'a dyn Source, Format);

impl<const N: usize> Reader for Stored<'_, N>
where
    [u8; N]: Default,
{
    type Number = [u8; N];
    const COMPUTES: bool = false;

    fn leaf(
        &self,
        leaf: &Leaf,
        matrix: usize,
        rows: Range<usize>,
        cols: Range<usize>,
        out: &mut [[u8; N]],
    ) -> Result<bool, ReadError> {
        self.0.stored(leaf, self.1, matrix, rows, cols, out.as_flattened_mut())
    }
}

/// Not at all, but soon.
struct Expected<'a>(&'a dyn Source);

impl Reader for Expected<'_> {
    type Number = ();
    const COMPUTES: bool = true;

    fn leaf(
        &self,
        leaf: &Leaf,
        matrix: usize,
        rows: Range<usize>,
        cols: Range<usize>,
        _out: &mut [()],
    ) -> Result<bool, ReadError> {
        self.0.will_read(leaf, matrix, rows, cols);
        Ok(true)
    }
}

impl WeightExpr {
    /// Reads the rectangle `[matrix, rows, cols]` into `out`, row-major, as f32. Expressions of fewer than
    /// three axes have `matrix` 0, and a vector has the single row 0.
    ///
    /// Only the rectangles of the leaves that this needs are read, and temporaries are of the order of
    /// the rectangle requested. A full-width strip of rows costs one read per leaf that it touches.
    ///
    /// # Errors
    /// A rectangle out of bounds, an `out` of another size, an ill-formed expression, or a failure of the
    /// source.
    pub fn read(
        &self,
        matrix: usize,
        rows: Range<usize>,
        cols: Range<usize>,
        source: &dyn Source,
        out: &mut [f32],
    ) -> Result<(), ReadError> {
        self.walk(matrix, rows, cols, &Decoded(source), out).map(drop)
    }

    /// Copies the rectangle into `out`, row-major, as the checkpoint stores it: numbers of `format`, as
    /// [`Source::stored`] has them. `false` where it stores others, where the expression computes, and where
    /// a number is not finite; `out` then holds anything, and [`Self::read`] gives the numbers. What this
    /// gives is what `read` gives, rounded to `format`.
    ///
    /// # Errors
    /// As [`Self::read`].
    pub fn read_stored(
        &self,
        format: Format,
        matrix: usize,
        rows: Range<usize>,
        cols: Range<usize>,
        source: &dyn Source,
        out: &mut [u8],
    ) -> Result<bool, ReadError> {
        match format.stored_bytes() {
            FINE_STORED => self.walk(matrix, rows, cols, &Stored::<FINE_STORED>(source, format), whole(out)),
            4 => self.walk(matrix, rows, cols, &Stored::<4>(source, format), whole(out)),
            3 => self.walk(matrix, rows, cols, &Stored::<3>(source, format), whole(out)),
            2 => self.walk(matrix, rows, cols, &Stored::<2>(source, format), whole(out)),
            _ => Ok(false),
        }
    }

    /// Notifies the source that the rectangle will be read soon.
    pub fn will_read(&self, matrix: usize, rows: Range<usize>, cols: Range<usize>, source: &dyn Source) {
        let numbers = rows.len().saturating_mul(cols.len());
        // The reason that it cannot be read is given when it is read.
        drop(self.walk(matrix, rows, cols, &Expected(source), &mut vec![(); numbers]));
    }

    /// Walks down to the leaves of a rectangle. `false`: the reader cannot.
    fn walk<R: Reader>(
        &self,
        matrix: usize,
        rows: Range<usize>,
        cols: Range<usize>,
        reader: &R,
        out: &mut [R::Number],
    ) -> Result<bool, ReadError> {
        let dims = self.dims();
        let inside = matrix < dims.matrices
            && rows.start <= rows.end
            && rows.end <= dims.rows
            && cols.start <= cols.end
            && cols.end <= dims.cols;
        if !inside || rows.len().checked_mul(cols.len()) != Some(out.len()) {
            let message = format!(
                "rectangle {matrix}, {rows:?}, {cols:?} into {} numbers, of {}×{}×{}",
                out.len(),
                dims.matrices,
                dims.rows,
                dims.cols
            );
            return Err(error(self.name(), message).into());
        }
        if out.is_empty() {
            return Ok(true);
        }
        match self {
            Self::Leaf(leaf) => reader.leaf(leaf, matrix, rows, cols, out),
            Self::Const(_) | Self::ScaleCols { .. } | Self::ScaleMatrices { .. } | Self::Map { .. }
                if !R::COMPUTES =>
            {
                Ok(false)
            }
            Self::Const(values) => {
                R::constant(&values[cols], out);
                Ok(true)
            }
            Self::Transpose(of) => {
                let (height, width) = (rows.len(), cols.len());
                let mut part = vec![R::Number::default(); out.len()];
                if !of.walk(matrix, cols, rows, reader, &mut part)? {
                    return Ok(false);
                }
                for (r, row) in out.chunks_exact_mut(width).enumerate() {
                    for (c, x) in row.iter_mut().enumerate() {
                        *x = part[c * height + r];
                    }
                }
                Ok(true)
            }
            Self::Slice { axis, start, step, of, .. } => {
                let slice = Strided { start: *start, step: *step, of };
                match axis {
                    Axis::Rows => slice.rows(matrix, rows, cols, reader, out),
                    Axis::Cols => slice.cols(matrix, rows, cols, reader, out),
                }
            }
            Self::Concat { axis: Axis::Rows, of } => {
                let (mut first, mut rest) = (0, out);
                for part in of {
                    let end = first + part.dims().rows;
                    let (lo, hi) = (rows.start.max(first), rows.end.min(end));
                    if lo < hi {
                        let (mine, others) = rest.split_at_mut((hi - lo) * cols.len());
                        if !part.walk(matrix, lo - first..hi - first, cols.clone(), reader, mine)? {
                            return Ok(false);
                        }
                        rest = others;
                    }
                    first = end;
                }
                Ok(true)
            }
            Self::Concat { axis: Axis::Cols, of } => {
                let mut first = 0;
                for part in of {
                    let end = first + part.dims().cols;
                    let (lo, hi) = (cols.start.max(first), cols.end.min(end));
                    if lo == cols.start && hi == cols.end {
                        return part.walk(matrix, rows, lo - first..hi - first, reader, out);
                    }
                    if lo < hi {
                        let mut strip = vec![R::Number::default(); rows.len() * (hi - lo)];
                        if !part.walk(matrix, rows.clone(), lo - first..hi - first, reader, &mut strip)? {
                            return Ok(false);
                        }
                        let at = lo - cols.start;
                        for (row, part) in out.chunks_exact_mut(cols.len()).zip(strip.chunks_exact(hi - lo)) {
                            row[at..at + hi - lo].copy_from_slice(part);
                        }
                    }
                    first = end;
                }
                Ok(true)
            }
            Self::Stack(of) if dims.rank == 2 => {
                for (part, row) in of[rows].iter().zip(out.chunks_exact_mut(cols.len())) {
                    if !part.walk(0, 0..1, cols.clone(), reader, row)? {
                        return Ok(false);
                    }
                }
                Ok(true)
            }
            Self::Stack(of) => of[matrix].walk(0, rows, cols, reader, out),
            Self::Split { of, .. } => {
                let first = matrix * dims.rows;
                of.walk(0, first + rows.start..first + rows.end, cols, reader, out)
            }
            Self::Arrange { order, of } => {
                let order = order
                    .get(matrix.saturating_mul(dims.rows)..)
                    .and_then(|o| o.get(rows))
                    .unwrap_or_default();
                let (width, mut rest) = (cols.len(), out);
                // Rows that follow each other are read together.
                for run in order.chunk_by(|a, b| a.checked_add(1) == Some(*b)) {
                    let first = run.first().map_or(0, |&r| r as usize);
                    let (mine, others) = rest.split_at_mut(run.len() * width);
                    if !of.walk(matrix, first..first + run.len(), cols.clone(), reader, mine)? {
                        return Ok(false);
                    }
                    rest = others;
                }
                if rest.is_empty() {
                    Ok(true)
                } else {
                    Err(error(self.name(), "an order of too few rows").into())
                }
            }
            Self::Join(of) => {
                let (each, width) = (of.dims().rows.max(1), cols.len());
                let mut from = rows.start;
                while from < rows.end {
                    let (head, first) = (from / each, from % each);
                    let len = (each - first).min(rows.end - from);
                    let at = (from - rows.start) * width;
                    let part = &mut out[at..at + len * width];
                    if !of.walk(head, first..first + len, cols.clone(), reader, part)? {
                        return Ok(false);
                    }
                    from += len;
                }
                Ok(true)
            }
            Self::ScaleMatrices { of, by } => {
                let mut factor = [R::Number::default()];
                let all = by.walk(0, 0..1, matrix..matrix + 1, reader, &mut factor)?
                    && of.walk(matrix, rows, cols, reader, out)?;
                let factors = vec![factor[0]; out.len()];
                R::scale(out, &factors);
                Ok(all)
            }
            Self::Repeat { each, of } => {
                let each = (*each).max(1);
                let (first, last) = (cols.start / each, (cols.end - 1) / each);
                let mut numbers = vec![R::Number::default(); last + 1 - first];
                let all = of.walk(0, 0..1, first..last + 1, reader, &mut numbers)?;
                out.iter_mut().zip(cols).for_each(|(x, c)| *x = numbers[c / each - first]);
                Ok(all)
            }
            Self::Map { map, of } => {
                let all = of.walk(matrix, rows, cols, reader, out)?;
                R::map(*map, out);
                Ok(all)
            }
            Self::ScaleCols { of, by } => {
                let mut factors = vec![R::Number::default(); cols.len()];
                let all = by.walk(0, 0..1, cols.clone(), reader, &mut factors)?
                    && of.walk(matrix, rows, cols, reader, out)?;
                out.chunks_exact_mut(factors.len()).for_each(|row| R::scale(row, &factors));
                Ok(all)
            }
        }
    }
}

/// Bytes as numbers of `N`; none of them where there is a rest.
fn whole<const N: usize>(bytes: &mut [u8]) -> &mut [[u8; N]] {
    match bytes.as_chunks_mut() {
        (numbers, []) => numbers,
        _ => &mut [],
    }
}

/// The indices `start`, `start + step`, … of one axis of an expression.
struct Strided<'a> {
    start: usize,
    step: usize,
    of: &'a WeightExpr,
}

impl Strided<'_> {
    /// The covering range of the child for a nonempty range of the slice.
    fn cover(&self, range: &Range<usize>) -> Option<Range<usize>> {
        let index = |i: usize| i.checked_mul(self.step)?.checked_add(self.start);
        Some(index(range.start)?..index(range.end - 1)?.checked_add(1)?)
    }

    fn covered(&self, range: &Range<usize>) -> Result<Range<usize>, TypeError> {
        self.cover(range).ok_or_else(|| error("slice", "index overflows"))
    }

    fn rows<R: Reader>(
        &self,
        matrix: usize,
        rows: Range<usize>,
        cols: Range<usize>,
        reader: &R,
        out: &mut [R::Number],
    ) -> Result<bool, ReadError> {
        let cover = self.covered(&rows)?;
        let width = cols.len();
        if self.step == 1 {
            return self.of.walk(matrix, cover, cols, reader, out);
        }
        if self.step > COVER_STEP {
            for (row, r) in out.chunks_exact_mut(width).zip(cover.step_by(self.step)) {
                if !self.of.walk(matrix, r..r + 1, cols.clone(), reader, row)? {
                    return Ok(false);
                }
            }
            return Ok(true);
        }
        let mut all = vec![R::Number::default(); cover.len() * width];
        if !self.of.walk(matrix, cover, cols, reader, &mut all)? {
            return Ok(false);
        }
        for (row, from) in out.chunks_exact_mut(width).zip(all.chunks_exact(width).step_by(self.step.max(1)))
        {
            row.copy_from_slice(from);
        }
        Ok(true)
    }

    fn cols<R: Reader>(
        &self,
        matrix: usize,
        rows: Range<usize>,
        cols: Range<usize>,
        reader: &R,
        out: &mut [R::Number],
    ) -> Result<bool, ReadError> {
        let cover = self.covered(&cols)?;
        let width = cols.len();
        if self.step == 1 {
            return self.of.walk(matrix, rows, cover, reader, out);
        }
        if self.step > COVER_STEP {
            let mut column = vec![R::Number::default(); rows.len()];
            for (i, c) in cover.step_by(self.step).enumerate() {
                if !self.of.walk(matrix, rows.clone(), c..c + 1, reader, &mut column)? {
                    return Ok(false);
                }
                for (row, x) in out.chunks_exact_mut(width).zip(&column) {
                    row[i] = *x;
                }
            }
            return Ok(true);
        }
        let mut all = vec![R::Number::default(); rows.len() * cover.len()];
        if !self.of.walk(matrix, rows, cover.clone(), reader, &mut all)? {
            return Ok(false);
        }
        for (row, from) in out.chunks_exact_mut(width).zip(all.chunks_exact(cover.len())) {
            for (x, y) in row.iter_mut().zip(from.iter().step_by(self.step.max(1))) {
                *x = *y;
            }
        }
        Ok(true)
    }
}
