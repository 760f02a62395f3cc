//! `q4o`: INT4 with one scale for each output channel, and INT8 for the input channels that INT4 serves worst.
//!
//! Units with static graphs take no groups of input channels, only a scale for each output channel, where
//! INT4 loses accuracy. PowerInfer-2 (§6, §7.6) keeps outlier weights in INT8, after AWQ, whose salient
//! weights are those of the input channels with the largest activations, and MixQ. So outliers are columns of
//! `W[N, K]`, chosen by what they contribute: a unit multiplies by two plain matrices, one of each width, the
//! second one with a few gathered inputs, and adds. The stored numbers are decided here, once, for every unit:
//! [`super::pack()`] brings the same numbers to the order of the CPU's kernels.

use super::Weighting;
use super::channel::{Channel, Width, best_scale};
#[cfg(doc)]
use moec_ir::types::{Format, LARGEST};
use std::ops::Range;

/// Rows that are read together.
const AT_ONCE: usize = 32;

/// Step of 16 levels with the least mean square error for normal numbers, over their standard deviation (Max,
/// Quantizing for Minimum Distortion, 1960, table I).
const NORMAL_STEP: f32 = 0.3352;

/// A matrix in `q4o`. Number `(r, c)` is its code times the scale of the row, which is exact in f32.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Q4o {
    /// Output channels.
    pub rows: usize,
    /// Input channels.
    pub cols: usize,
    /// Columns that are stored as INT8, in ascending order; all others are INT4.
    pub outliers: Vec<u32>,
    /// Codes in −8 ..= 7, `[rows, cols]`; 0 in the columns of outliers.
    pub int4: Vec<i8>,
    /// Scale of each row of these, finite and positive; 16 significant bits.
    pub scale: Vec<f32>,
    /// Codes in −127 ..= 127 of the outliers, `[rows, outliers]`.
    pub int8: Vec<i8>,
    /// Scale of each row of these.
    pub int8_scale: Vec<f32>,
}

impl Q4o {
    /// The numbers that are stored, row-major `[rows, cols]`.
    pub fn dequantise(&self) -> Vec<f32> {
        let width = self.cols.max(1);
        let rows = self.int4.chunks_exact(width).zip(&self.scale);
        let mut out: Vec<f32> = rows.flat_map(|(q, s)| q.iter().map(move |&q| f32::from(q) * s)).collect();
        let wide = self.int8.chunks_exact(self.outliers.len().max(1)).zip(&self.int8_scale);
        for (row, (codes, scale)) in out.chunks_exact_mut(width).zip(wide) {
            for (&column, &q) in self.outliers.iter().zip(codes) {
                row[column as usize] = f32::from(q) * scale;
            }
        }
        out
    }

    /// Bits per number, scales included. Of a matrix of outliers alone there are no others.
    pub fn bits(&self) -> f64 {
        let widths = [
            (4 * self.int4.len() + 32 * self.scale.len(), self.outliers.len() < self.cols),
            (8 * self.int8.len() + 32 * self.int8_scale.len(), !self.outliers.is_empty()),
        ];
        let bits: usize = widths.into_iter().filter(|(_, stored)| *stored).map(|(bits, _)| bits).sum();
        bits as f64 / (self.rows * self.cols).max(1) as f64
    }
}

/// Rounds a matrix of `rows` × `cols` numbers to `q4o`, with at most `outliers` of its columns in INT8:
/// [`Format::outliers`] is their number in bundles. `read(rows, out)` fills `out`, row-major with full columns,
/// with a range of rows; it is called twice for each, a few rows at a time. Numbers are at most [`LARGEST`] in
/// magnitude. Feedback is that of all columns.
///
/// # Errors
/// Errors of `read`.
pub fn quantise_q4o<E>(
    [rows, cols]: [usize; 2],
    outliers: usize,
    weighting: Weighting<'_>,
    mut read: impl FnMut(Range<usize>, &mut [f32]) -> Result<(), E>,
) -> Result<Q4o, E> {
    let outliers = choose([rows, cols], outliers, weighting, &mut read)?;
    let feedback = weighting.feedback.and_then(|f| f.without(&outliers));
    let weighting = Weighting { outliers: Some(&outliers), feedback: feedback.as_ref(), ..weighting };
    let mut all = Q4o { rows, cols, ..Q4o::default() };
    let mut numbers = Vec::new();
    for range in runs(rows) {
        numbers.resize(range.len() * cols, 0.0);
        read(range, &mut numbers)?;
        for Row { int4, int8 } in round(cols, &numbers, weighting) {
            all.scale.push(int4.scale);
            all.int8_scale.push(int8.scale);
            all.int4.extend(int4.codes);
            all.int8.extend(int8.codes);
        }
    }
    Ok(Q4o { outliers, ..all })
}

/// Ranges of rows that are read together.
fn runs(rows: usize) -> impl Iterator<Item = Range<usize>> {
    (0..rows).step_by(AT_ONCE).map(move |r| r..(r + AT_ONCE).min(rows))
}

/// The columns of a matrix that are stored as INT8, in ascending order: at most as many as requested, those
/// whose errors in INT4 contribute most to the outputs, of equal ones the first. Errors are those of the step
/// that suits normal numbers: beyond its range outliers are cut off, and so have the largest. Of numbers that
/// were read back from INT4 and INT8 these are the columns that INT4 does not hold.
///
/// # Errors
/// Errors of `read`.
pub(super) fn choose<E>(
    [rows, cols]: [usize; 2],
    outliers: usize,
    weighting: Weighting<'_>,
    read: &mut impl FnMut(Range<usize>, &mut [f32]) -> Result<(), E>,
) -> Result<Vec<u32>, E> {
    if outliers == 0 || cols == 0 {
        return Ok(Vec::new());
    }
    let (mut numbers, mut errors) = (Vec::new(), vec![0.0; cols]);
    let mut missed = weighting.stored.then(|| vec![false; cols]);
    for range in runs(rows) {
        numbers.resize(range.len() * cols, 0.0);
        read(range, &mut numbers)?;
        for x in numbers.chunks_exact(cols) {
            let squares: f64 = x.iter().map(|x| f64::from(*x).powi(2)).sum();
            let step = (squares / cols as f64).sqrt() as f32 * NORMAL_STEP;
            if step >= f32::MIN_POSITIVE {
                let found = Channel::with_scale(Width::Int4, x, step);
                for ((sum, x), y) in errors.iter_mut().zip(x).zip(found.values()) {
                    *sum += f64::from(x - y).powi(2);
                }
            }
            missed = missed.and_then(|all| not_held(x, outliers, all));
        }
    }
    if let Some(missed) = missed.filter(|m| m.iter().filter(|m| **m).count() <= outliers) {
        return Ok((0..).zip(missed).filter(|(_, missed)| *missed).map(|(c, _)| c).collect());
    }
    if let Some(importance) = weighting.importance {
        errors.iter_mut().zip(importance).for_each(|(e, &w)| *e *= f64::from(w));
    }
    let mut found: Vec<(f64, u32)> = errors.into_iter().zip(0..).collect();
    found.sort_by(|a, b| b.0.total_cmp(&a.0).then(a.1.cmp(&b.1)));
    found.truncate(outliers);
    let mut found: Vec<u32> = found.into_iter().map(|(_, column)| column).collect();
    found.sort_unstable();
    Ok(found)
}

/// Marks the numbers of a row that are not codes of INT4 at the scale of the others, of which at most
/// `outliers` may not be; `None` if no scale holds so many.
fn not_held(x: &[f32], outliers: usize, mut all: Vec<bool>) -> Option<Vec<bool>> {
    let nonzero = x.iter().copied().filter(|x| *x != 0.0);
    // The scale is a number that is not an outlier, over its code.
    let scales = nonzero.take(outliers + 1).flat_map(|x| (1..=8).rev().map(move |c| x.abs() / c as f32));
    let held = |scale: f32| {
        let found = Channel::with_scale(Width::Int4, x, scale);
        let missed: Vec<bool> = found.values().zip(x).map(|(y, x)| y != *x).collect();
        (missed.iter().filter(|m| **m).count() <= outliers).then_some(missed)
    };
    let missed = match scales.filter(|s| *s >= f32::MIN_POSITIVE).find_map(held) {
        Some(missed) => missed,
        None if x.iter().filter(|x| **x != 0.0).count() <= outliers => x.iter().map(|x| *x != 0.0).collect(),
        None => return None,
    };
    all.iter_mut().zip(missed).for_each(|(all, missed)| *all |= missed);
    Some(all)
}

/// A rounded row.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Row {
    /// All columns, those of outliers with codes 0.
    pub(super) int4: Channel,
    /// The outliers.
    pub(super) int8: Channel,
}

impl Row {
    /// The numbers that are stored; `outliers` are the columns of [`Self::int8`].
    pub(super) fn values(&self, outliers: &[u32]) -> Vec<f32> {
        let mut all: Vec<f32> = self.int4.values().collect();
        for (&column, x) in outliers.iter().zip(self.int8.values()) {
            if let Some(number) = all.get_mut(column as usize) {
                *number += x;
            }
        }
        all
    }
}

/// The numbers of a row without outliers, and those of the outliers.
pub(super) fn split(x: &[f32], outliers: &[u32]) -> [Vec<f32>; 2] {
    let own = outliers.iter().filter_map(|&c| x.get(c as usize).copied()).collect();
    let mut rest = Vec::with_capacity(x.len());
    let mut from = 0;
    for &column in outliers {
        rest.extend_from_slice(x.get(from..column as usize).unwrap_or_default());
        from = column as usize + 1;
    }
    rest.extend_from_slice(x.get(from..).unwrap_or_default());
    [rest, own]
}

/// Puts codes of 0 in the columns of outliers.
fn spread(mut codes: Vec<i8>, outliers: &[u32]) -> Vec<i8> {
    for &column in outliers {
        codes.insert((column as usize).min(codes.len()), 0);
    }
    codes
}

/// Rounds whole rows of `cols` numbers, whose outliers `weighting` names; its feedback is that of the other
/// columns.
pub(super) fn round(cols: usize, rows: &[f32], weighting: Weighting<'_>) -> Vec<Row> {
    let Weighting { importance, stored, .. } = weighting;
    let outliers = weighting.outliers.unwrap_or_default();
    let [rest_weights, own_weights] = match importance {
        Some(w) => split(w, outliers).map(Some),
        None => [None, None],
    };
    let parts: Vec<[Vec<f32>; 2]> = rows.chunks(cols.max(1)).map(|x| split(x, outliers)).collect();
    let feedback = weighting.feedback.filter(|f| !stored && f.cols() + outliers.len() == cols);
    let mut fed = feedback.into_iter().flat_map(|f| {
        let scale = |[x, _]: &[Vec<f32>; 2]| best_scale(Width::Int4, x, rest_weights.as_deref());
        let scales: Vec<f32> = parts.iter().map(scale).collect();
        let codes =
            f.round_at(&parts.iter().flat_map(|[x, _]| x.iter().copied()).collect::<Vec<_>>(), &scales);
        let rows = codes.chunks(f.cols().max(1)).map(<[i8]>::to_vec).collect::<Vec<_>>();
        scales.into_iter().zip(rows).map(|(scale, codes)| Channel { scale, codes })
    });
    let one = |width, x: &[f32], weights: Option<&[f32]>| {
        let again = stored.then(|| Channel::recover(width, x)).flatten();
        again.unwrap_or_else(|| Channel::nearest(width, x, weights))
    };
    let row = |[rest, own]: &[Vec<f32>; 2]| {
        let int4 = fed.next().unwrap_or_else(|| one(Width::Int4, rest, rest_weights.as_deref()));
        let codes = spread(int4.codes, outliers);
        let int8 = one(Width::Int8, own, own_weights.as_deref());
        Row { int4: Channel { codes, ..int4 }, int8 }
    };
    parts.iter().map(row).collect()
}
