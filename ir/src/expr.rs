//! Shapes of weight expressions.

use crate::infer::TypeError;
use crate::weights::{Axis, Leaf, WeightExpr};

pub(crate) fn error(at: &str, message: impl Into<String>) -> TypeError {
    TypeError::new(at, message)
}

/// Extents of an expression that is taken to be well-formed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Dims {
    pub(crate) rank: usize,
    pub(crate) matrices: usize,
    pub(crate) rows: usize,
    pub(crate) cols: usize,
}

impl WeightExpr {
    /// The mnemonic of the text form, for messages.
    pub(crate) const fn name(&self) -> &'static str {
        match self {
            Self::Leaf(_) => "leaf",
            Self::Const(_) => "const",
            Self::Transpose(_) => "transpose",
            Self::Slice { .. } => "slice",
            Self::Concat { .. } => "concat",
            Self::Stack(_) => "stack",
            Self::Split { .. } => "split",
            Self::Join(_) => "join",
            Self::Map { .. } => "map",
            Self::ScaleMatrices { .. } => "scale_matrices",
            Self::Repeat { .. } => "repeat",
            Self::Arrange { .. } => "arrange",
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
            Self::Join(of) => match of.shape()?.as_slice() {
                &[heads, rows, cols] => {
                    let all = heads.checked_mul(rows).ok_or_else(|| error(at, "size overflows"))?;
                    vec![all, cols]
                }
                shape => return Err(error(at, format!("{shape:?} has no heads"))),
            },
            Self::Map { of, .. } => of.shape()?,
            Self::ScaleMatrices { of, by } => match (of.shape()?.as_slice(), by.shape()?.as_slice()) {
                (shape @ [matrices, ..], [factors]) if shape.len() == 3 && matrices == factors => {
                    shape.to_vec()
                }
                (shape, factors) => return Err(error(at, format!("{shape:?} by {factors:?}"))),
            },
            Self::Repeat { each, of } => match of.shape()?.as_slice() {
                &[n] => vec![n.checked_mul(*each).ok_or_else(|| error(at, "size overflows"))?],
                shape => return Err(error(at, format!("of {shape:?}, which is not a vector"))),
            },
            Self::Arrange { order, of } => {
                let shape = of.shape()?;
                let ([rows, _] | [_, rows, _]) = *shape.as_slice() else {
                    return Err(error(at, "rows of a vector"));
                };
                let all: usize = shape[..shape.len() - 1].iter().product();
                let each_once = order.chunks(rows).all(|order| {
                    let mut seen = vec![false; rows];
                    order
                        .iter()
                        .all(|&r| seen.get_mut(r as usize).is_some_and(|seen| !std::mem::replace(seen, true)))
                });
                if order.len() != all || !each_once {
                    return Err(error(
                        at,
                        format!("an order of {} rows does not fit {shape:?}", order.len()),
                    ));
                }
                shape
            }
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
                    Self::Transpose(of)
                    | Self::Slice { of, .. }
                    | Self::Split { of, .. }
                    | Self::Join(of)
                    | Self::Repeat { of, .. }
                    | Self::Map { of, .. }
                    | Self::Arrange { of, .. } => todo.push(of),
                    Self::Concat { of, .. } | Self::Stack(of) => todo.extend(of.iter().rev()),
                    Self::ScaleCols { of, by } | Self::ScaleMatrices { of, by } => {
                        todo.extend([&**by, &**of]);
                    }
                }
            }
        })
    }

    /// Whether it gives numbers of its leaves as they are, in any order; with `whole_rows`, whole rows of them.
    pub fn moves(&self, whole_rows: bool) -> bool {
        let all = |of: &[Self]| of.iter().all(|of| of.moves(whole_rows));
        match self {
            Self::Leaf(_) => true,
            Self::Const(_)
            | Self::Repeat { .. }
            | Self::Map { .. }
            | Self::ScaleCols { .. }
            | Self::ScaleMatrices { .. } => false,
            Self::Transpose(of) => !whole_rows && of.moves(false),
            Self::Slice { axis, of, .. } => (!whole_rows || *axis == Axis::Rows) && of.moves(whole_rows),
            Self::Concat { axis, of } => (!whole_rows || *axis == Axis::Rows) && all(of),
            Self::Stack(of) => all(of),
            Self::Split { of, .. } | Self::Join(of) | Self::Arrange { of, .. } => of.moves(whole_rows),
        }
    }

    /// Extents without the checks of [`Self::shape`]; wrong for ill-formed expressions, never panicking.
    pub(crate) fn dims(&self) -> Dims {
        match self {
            Self::Leaf(leaf) => {
                let axis = |i: usize| leaf.shape.iter().rev().nth(i).copied().unwrap_or(1);
                Dims { rank: leaf.shape.len(), matrices: axis(2), rows: axis(1), cols: axis(0) }
            }
            Self::Const(values) => Dims { rank: 1, matrices: 1, rows: 1, cols: values.len() },
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
                .unwrap_or(Dims { rank: 1, matrices: 1, rows: 1, cols: 0 }),
            Self::Stack(of) => {
                let d = of.first().map_or(Dims { rank: 1, matrices: 1, rows: 1, cols: 0 }, Self::dims);
                if d.rank <= 1 {
                    Dims { rank: 2, matrices: 1, rows: of.len(), cols: d.cols }
                } else {
                    Dims { rank: 3, matrices: of.len(), ..d }
                }
            }
            Self::Split { heads, of } => {
                let d = of.dims();
                Dims { rank: 3, matrices: *heads, rows: d.rows / (*heads).max(1), cols: d.cols }
            }
            Self::Join(of) => {
                let d = of.dims();
                Dims { rank: 2, matrices: 1, rows: d.matrices.saturating_mul(d.rows), cols: d.cols }
            }
            Self::Repeat { each, of } => {
                let d = of.dims();
                Dims { cols: d.cols.saturating_mul(*each), ..d }
            }
            Self::ScaleCols { of, .. }
            | Self::ScaleMatrices { of, .. }
            | Self::Arrange { of, .. }
            | Self::Map { of, .. } => of.dims(),
        }
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
