//! Shapes of weight expressions, and reading any rectangle of one without holding the whole.

use crate::infer::TypeError;
use crate::weights::{Axis, Leaf, Source, WeightExpr};
use std::error::Error;
use std::ops::Range;

/// A failure while reading a weight.
pub type ReadError = Box<dyn Error + Send + Sync>;

/// Widest step for which a strided slice reads the covering rectangle instead of index by index.
const COVER_STEP: usize = 4;

fn error(at: &str, message: impl Into<String>) -> TypeError {
    TypeError::new(at, message)
}

/// Extents of an expression that is taken to be well-formed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Dims {
    rank: usize,
    lead: usize,
    rows: usize,
    cols: usize,
}

impl WeightExpr {
    /// The mnemonic of the text form, for messages.
    const fn name(&self) -> &'static str {
        match self {
            Self::Leaf(_) => "leaf",
            Self::Const(_) => "const",
            Self::Transpose(_) => "transpose",
            Self::Slice { .. } => "slice",
            Self::Concat { .. } => "concat",
            Self::Stack(_) => "stack",
            Self::Split { .. } => "split",
            Self::ScaleCols { .. } => "scale_cols",
        }
    }

    /// The shape, outermost axis first, of one to three axes.
    ///
    /// # Errors
    /// Parts that do not fit each other, an axis out of range, an empty part, or a size that overflows.
    pub fn shape(&self) -> Result<Vec<usize>, TypeError> {
        let at = self.name();
        let shape = match self {
            Self::Leaf(leaf) => leaf.shape.clone(),
            Self::Const(values) => vec![values.len()],
            Self::Transpose(of) => {
                let mut shape = of.shape()?;
                let n = shape.len();
                if n < 2 {
                    return Err(error(at, format!("of {shape:?}, which has no rows")));
                }
                shape.swap(n - 1, n - 2);
                shape
            }
            Self::Slice { axis, start, step, len, of } => {
                let mut shape = of.shape()?;
                let extent = axis_mut(&mut shape, *axis).ok_or_else(|| error(at, "rows of a vector"))?;
                let last =
                    len.checked_sub(1).and_then(|n| n.checked_mul(*step)).and_then(|n| n.checked_add(*start));
                if *step == 0 || last.is_none_or(|last| last >= *extent) {
                    return Err(error(at, format!("{len} of {extent} from {start} by {step}")));
                }
                *extent = *len;
                shape
            }
            Self::Concat { axis, of } => {
                let (first, rest) = of.split_first().ok_or_else(|| error(at, "of nothing"))?;
                let mut shape = first.shape()?;
                for part in rest {
                    let mut other = part.shape()?;
                    let whole = format!("{shape:?} and {other:?}");
                    let (Some(extent), Some(more)) =
                        (axis_mut(&mut shape, *axis), axis_mut(&mut other, *axis))
                    else {
                        return Err(error(at, "rows of a vector"));
                    };
                    *extent = extent.checked_add(*more).ok_or_else(|| error(at, "size overflows"))?;
                    *more = *extent;
                    if shape != other {
                        return Err(error(at, format!("parts {whole} do not fit")));
                    }
                }
                if axis_mut(&mut shape, *axis).is_none() {
                    return Err(error(at, "rows of a vector"));
                }
                shape
            }
            Self::Stack(of) => {
                let (first, rest) = of.split_first().ok_or_else(|| error(at, "of nothing"))?;
                let mut shape = first.shape()?;
                for part in rest {
                    let other = part.shape()?;
                    if other != shape {
                        return Err(error(at, format!("parts {shape:?} and {other:?} differ")));
                    }
                }
                shape.insert(0, of.len());
                shape
            }
            Self::Split { heads, of } => match of.shape()?.as_slice() {
                [rows, cols] if *heads > 0 && rows % heads == 0 => {
                    vec![*heads, rows / heads, *cols]
                }
                shape => return Err(error(at, format!("{shape:?} into {heads} heads"))),
            },
            Self::ScaleCols { of, by } => {
                let (shape, factors) = (of.shape()?, by.shape()?);
                if factors.as_slice() != &shape[shape.len() - 1..] {
                    return Err(error(at, format!("{shape:?} by {factors:?}")));
                }
                shape
            }
        };
        let sized = shape.iter().try_fold(4_usize, |n, &d| n.checked_mul(d));
        if !(1..=3).contains(&shape.len()) || shape.contains(&0) || sized.is_none() {
            return Err(error(at, format!("shape {shape:?} is not one to three axes of nonzero extent")));
        }
        Ok(shape)
    }

    /// The checkpoint tensors, in order of appearance; one that is used twice comes twice.
    pub fn leaves(&self) -> impl Iterator<Item = &Leaf> {
        let mut todo = vec![self];
        std::iter::from_fn(move || {
            loop {
                match todo.pop()? {
                    Self::Leaf(leaf) => return Some(leaf),
                    Self::Const(_) => {}
                    Self::Transpose(of) | Self::Slice { of, .. } | Self::Split { of, .. } => {
                        todo.push(of);
                    }
                    Self::Concat { of, .. } | Self::Stack(of) => todo.extend(of.iter().rev()),
                    Self::ScaleCols { of, by } => todo.extend([&**by, &**of]),
                }
            }
        })
    }

    /// Extents without the checks of [`Self::shape`]; wrong for ill-formed expressions, never panicking.
    fn dims(&self) -> Dims {
        match self {
            Self::Leaf(leaf) => {
                let axis = |i: usize| leaf.shape.iter().rev().nth(i).copied().unwrap_or(1);
                Dims { rank: leaf.shape.len(), lead: axis(2), rows: axis(1), cols: axis(0) }
            }
            Self::Const(values) => Dims { rank: 1, lead: 1, rows: 1, cols: values.len() },
            Self::Transpose(of) => {
                let d = of.dims();
                Dims { rows: d.cols, cols: d.rows, ..d }
            }
            Self::Slice { axis: Axis::Rows, len, of, .. } => Dims { rows: *len, ..of.dims() },
            Self::Slice { axis: Axis::Cols, len, of, .. } => Dims { cols: *len, ..of.dims() },
            Self::Concat { axis, of } => of
                .iter()
                .map(Self::dims)
                .reduce(|a, b| match axis {
                    Axis::Rows => Dims { rows: a.rows.saturating_add(b.rows), ..a },
                    Axis::Cols => Dims { cols: a.cols.saturating_add(b.cols), ..a },
                })
                .unwrap_or(Dims { rank: 1, lead: 1, rows: 1, cols: 0 }),
            Self::Stack(of) => {
                let d = of.first().map_or(Dims { rank: 1, lead: 1, rows: 1, cols: 0 }, Self::dims);
                if d.rank <= 1 {
                    Dims { rank: 2, lead: 1, rows: of.len(), cols: d.cols }
                } else {
                    Dims { rank: 3, lead: of.len(), ..d }
                }
            }
            Self::Split { heads, of } => {
                let d = of.dims();
                Dims { rank: 3, lead: *heads, rows: d.rows / (*heads).max(1), cols: d.cols }
            }
            Self::ScaleCols { of, .. } => of.dims(),
        }
    }

    /// Reads the rectangle `[lead, rows, cols]` into `out`, row-major, as f32. Expressions of fewer than
    /// three axes have `lead` 0, and a vector has the single row 0.
    ///
    /// Only the rectangles of the leaves that this needs are read, and temporaries are of the order of
    /// the rectangle asked for. A full-width strip of rows costs one read per leaf that it touches.
    ///
    /// # Errors
    /// A rectangle out of bounds, an `out` of another size, an ill-formed expression, or a failure of the
    /// source.
    pub fn read(
        &self,
        lead: usize,
        rows: Range<usize>,
        cols: Range<usize>,
        source: &dyn Source,
        out: &mut [f32],
    ) -> Result<(), ReadError> {
        let dims = self.dims();
        let inside = lead < dims.lead
            && rows.start <= rows.end
            && rows.end <= dims.rows
            && cols.start <= cols.end
            && cols.end <= dims.cols;
        if !inside || rows.len().checked_mul(cols.len()) != Some(out.len()) {
            let message = format!(
                "rectangle {lead}, {rows:?}, {cols:?} into {} numbers, of {}×{}×{}",
                out.len(),
                dims.lead,
                dims.rows,
                dims.cols
            );
            return Err(error(self.name(), message).into());
        }
        if out.is_empty() {
            return Ok(());
        }
        match self {
            Self::Leaf(leaf) => source.read(leaf, lead, rows, cols, out),
            Self::Const(values) => {
                out.copy_from_slice(&values[cols]);
                Ok(())
            }
            Self::Transpose(of) => {
                let (height, width) = (rows.len(), cols.len());
                let mut part = vec![0.0; out.len()];
                of.read(lead, cols, rows, source, &mut part)?;
                for (r, row) in out.chunks_exact_mut(width).enumerate() {
                    for (c, x) in row.iter_mut().enumerate() {
                        *x = part[c * height + r];
                    }
                }
                Ok(())
            }
            Self::Slice { axis, start, step, of, .. } => {
                let slice = Strided { start: *start, step: *step, of };
                match axis {
                    Axis::Rows => slice.read_rows(lead, rows, cols, source, out),
                    Axis::Cols => slice.read_cols(lead, rows, cols, source, out),
                }
            }
            Self::Concat { axis: Axis::Rows, of } => {
                let (mut first, mut rest) = (0, out);
                for part in of {
                    let end = first + part.dims().rows;
                    let (lo, hi) = (rows.start.max(first), rows.end.min(end));
                    if lo < hi {
                        let (mine, others) = rest.split_at_mut((hi - lo) * cols.len());
                        part.read(lead, lo - first..hi - first, cols.clone(), source, mine)?;
                        rest = others;
                    }
                    first = end;
                }
                Ok(())
            }
            Self::Concat { axis: Axis::Cols, of } => {
                let mut first = 0;
                for part in of {
                    let end = first + part.dims().cols;
                    let (lo, hi) = (cols.start.max(first), cols.end.min(end));
                    if lo == cols.start && hi == cols.end {
                        return part.read(lead, rows, lo - first..hi - first, source, out);
                    }
                    if lo < hi {
                        let mut strip = vec![0.0; rows.len() * (hi - lo)];
                        part.read(lead, rows.clone(), lo - first..hi - first, source, &mut strip)?;
                        let at = lo - cols.start;
                        for (row, part) in out.chunks_exact_mut(cols.len()).zip(strip.chunks_exact(hi - lo)) {
                            row[at..at + hi - lo].copy_from_slice(part);
                        }
                    }
                    first = end;
                }
                Ok(())
            }
            Self::Stack(of) if dims.rank == 2 => {
                for (part, row) in of[rows].iter().zip(out.chunks_exact_mut(cols.len())) {
                    part.read(0, 0..1, cols.clone(), source, row)?;
                }
                Ok(())
            }
            Self::Stack(of) => of[lead].read(0, rows, cols, source, out),
            Self::Split { of, .. } => {
                let first = lead * dims.rows;
                of.read(0, first + rows.start..first + rows.end, cols, source, out)
            }
            Self::ScaleCols { of, by } => {
                let mut factors = vec![0.0; cols.len()];
                by.read(0, 0..1, cols.clone(), source, &mut factors)?;
                of.read(lead, rows, cols, source, out)?;
                for row in out.chunks_exact_mut(factors.len()) {
                    for (x, f) in row.iter_mut().zip(&factors) {
                        *x *= f;
                    }
                }
                Ok(())
            }
        }
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

    fn read_rows(
        &self,
        lead: usize,
        rows: Range<usize>,
        cols: Range<usize>,
        source: &dyn Source,
        out: &mut [f32],
    ) -> Result<(), ReadError> {
        let cover = self.covered(&rows)?;
        let width = cols.len();
        if self.step == 1 {
            return self.of.read(lead, cover, cols, source, out);
        }
        if self.step > COVER_STEP {
            for (row, r) in out.chunks_exact_mut(width).zip(cover.step_by(self.step)) {
                self.of.read(lead, r..r + 1, cols.clone(), source, row)?;
            }
            return Ok(());
        }
        let mut all = vec![0.0; cover.len() * width];
        self.of.read(lead, cover, cols, source, &mut all)?;
        for (row, from) in out.chunks_exact_mut(width).zip(all.chunks_exact(width).step_by(self.step.max(1)))
        {
            row.copy_from_slice(from);
        }
        Ok(())
    }

    fn read_cols(
        &self,
        lead: usize,
        rows: Range<usize>,
        cols: Range<usize>,
        source: &dyn Source,
        out: &mut [f32],
    ) -> Result<(), ReadError> {
        let cover = self.covered(&cols)?;
        let width = cols.len();
        if self.step == 1 {
            return self.of.read(lead, rows, cover, source, out);
        }
        if self.step > COVER_STEP {
            let mut column = vec![0.0; rows.len()];
            for (i, c) in cover.step_by(self.step).enumerate() {
                self.of.read(lead, rows.clone(), c..c + 1, source, &mut column)?;
                for (row, x) in out.chunks_exact_mut(width).zip(&column) {
                    row[i] = *x;
                }
            }
            return Ok(());
        }
        let mut all = vec![0.0; rows.len() * cover.len()];
        self.of.read(lead, rows, cover.clone(), source, &mut all)?;
        for (row, from) in out.chunks_exact_mut(width).zip(all.chunks_exact(cover.len())) {
            for (x, y) in row.iter_mut().zip(from.iter().step_by(self.step.max(1))) {
                *x = *y;
            }
        }
        Ok(())
    }
}

/// The extent of an axis; `None` for the rows of a vector.
fn axis_mut(shape: &mut [usize], axis: Axis) -> Option<&mut usize> {
    let back = match axis {
        Axis::Cols => 1,
        Axis::Rows => 2,
    };
    let at = shape.len().checked_sub(back)?;
    shape.get_mut(at)
}
