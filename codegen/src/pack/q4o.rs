//! `q4o`: INT4 with one scale for each output channel, and INT8 for the channels that INT4 serves worst.
//!
//! Units with static graphs take no groups of input channels, only a scale for each output channel, where
//! INT4 loses accuracy. PowerInfer-2 (§6, §7.6) keeps outliers in INT8, after AWQ and MixQ. Here an outlier
//! is a whole output channel, a row of `W[N, K]`. So a unit multiplies by two plain matrices, one of each
//! width, and concatenates their results. The stored numbers are decided here, once, for every unit:
//! [`super::pack()`] brings the same numbers to the order of the CPU's kernels.

use super::Weighting;
use super::channel::{Channel, Width, best_scale};
#[cfg(doc)]
#[cfg(doc)]
use moec_ir::types::{Format, LARGEST};
use std::cmp::Ordering;
use std::ops::Range;

/// Rows that are read together.
const AT_ONCE: usize = 32;

/// A matrix in `q4o`. Number `(r, c)` is `scale[r]` times its code, which is exact in f32.
#[derive(Clone, Debug, PartialEq)]
pub struct Q4o {
    /// Output channels.
    pub rows: usize,
    /// Input channels.
    pub cols: usize,
    /// Scale of each row, finite and positive; 16 significant bits.
    pub scale: Vec<f32>,
    /// Rows that are stored as INT8, in ascending order; all others are INT4.
    pub outliers: Vec<u32>,
    /// Codes in −8 ..= 7 of the rows that are no outliers, in order: `[rows − outliers, cols]`.
    pub int4: Vec<i8>,
    /// Codes in −127 ..= 127 of the outliers, in order: `[outliers, cols]`.
    pub int8: Vec<i8>,
}

impl Q4o {
    /// The numbers that are stored, row-major `[rows, cols]`.
    pub fn dequantise(&self) -> Vec<f32> {
        let width = self.cols.max(1);
        let (mut int4, mut int8) = (self.int4.chunks_exact(width), self.int8.chunks_exact(width));
        let mut outliers = self.outliers.iter().copied().peekable();
        let mut out = Vec::with_capacity(self.rows * self.cols);
        for (row, scale) in self.scale.iter().enumerate() {
            let is_outlier = outliers.next_if(|&o| o as usize == row).is_some();
            let codes = if is_outlier { int8.next() } else { int4.next() };
            out.extend(codes.unwrap_or_default().iter().map(|&q| f32::from(q) * scale));
        }
        out
    }

    /// Bits per number, scales included.
    pub fn bits(&self) -> f64 {
        let bits = 4 * self.int4.len() + 8 * self.int8.len() + 32 * self.scale.len();
        bits as f64 / (self.rows * self.cols).max(1) as f64
    }
}

/// Rounds a matrix of `rows` × `cols` numbers to `q4o`, with `outliers` of its rows in INT8: those that lose
/// most in INT4. [`Format::outliers`] is their number in bundles. `read(rows, out)` fills `out`, row-major
/// with full columns, with a range of rows; it is called twice for each, a few rows at a time. Numbers are at
/// most [`LARGEST`] in magnitude.
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
    let mut all = Q4o { rows, cols, scale: Vec::new(), outliers, int4: Vec::new(), int8: Vec::new() };
    let mut numbers = Vec::new();
    for range in runs(rows) {
        numbers.resize(range.len() * cols, 0.0);
        read(range.clone(), &mut numbers)?;
        let channels = round(cols, &numbers, |i| width(&all.outliers, range.start + i), weighting);
        for (row, channel) in range.zip(channels) {
            all.scale.push(channel.scale);
            let codes = if width(&all.outliers, row) == Width::Int8 { &mut all.int8 } else { &mut all.int4 };
            codes.extend(channel.codes);
        }
    }
    Ok(all)
}

/// Width of a row's codes, if these rows are outliers.
pub(super) fn width(outliers: &[u32], row: usize) -> Width {
    let found = u32::try_from(row).is_ok_and(|row| outliers.binary_search(&row).is_ok());
    if found { Width::Int8 } else { Width::Int4 }
}

/// Ranges of rows that are read together.
fn runs(rows: usize) -> impl Iterator<Item = Range<usize>> {
    (0..rows).step_by(AT_ONCE).map(move |r| r..(r + AT_ONCE).min(rows))
}

/// The rows of a matrix that lose most in INT4, in ascending order: as many as requested, of equal ones the
/// first. Of numbers that were read back from INT4 and INT8 these are the rows that INT4 does not hold.
///
/// # Errors
/// Errors of `read`.
pub(super) fn choose<E>(
    [rows, cols]: [usize; 2],
    outliers: usize,
    weighting: Weighting<'_>,
    read: &mut impl FnMut(Range<usize>, &mut [f32]) -> Result<(), E>,
) -> Result<Vec<u32>, E> {
    if outliers == 0 || outliers >= rows {
        return Ok((0..rows.min(outliers) as u32).collect());
    }
    let (mut numbers, mut errors) = (Vec::new(), Vec::with_capacity(rows));
    for range in runs(rows) {
        numbers.resize(range.len() * cols, 0.0);
        read(range.clone(), &mut numbers)?;
        for (row, x) in range.zip(numbers.chunks(cols.max(1))) {
            let error = if weighting.stored && Channel::recover(Width::Int4, x).is_some() {
                0.0
            } else {
                Channel::nearest(Width::Int4, x, weighting.importance).error(x, weighting.importance)
            };
            errors.push((error, row as u32));
        }
    }
    errors.sort_by(|a, b| b.0.partial_cmp(&a.0).unwrap_or(Ordering::Equal).then(a.1.cmp(&b.1)));
    errors.truncate(outliers);
    let mut found: Vec<u32> = errors.into_iter().map(|(_, row)| row).collect();
    found.sort_unstable();
    Ok(found)
}

/// Rounds whole rows of `cols` numbers; `width(i)` is that of row `i` of them.
pub(super) fn round(
    cols: usize,
    rows: &[f32],
    width: impl Fn(usize) -> Width,
    weighting: Weighting<'_>,
) -> Vec<Channel> {
    let Weighting { importance, stored, .. } = weighting;
    let rows = || rows.chunks(cols.max(1)).enumerate();
    let feedback = weighting.feedback.filter(|f| !stored && f.cols() == cols);
    let fed = |i: usize| feedback.is_some() && width(i) == Width::Int4;
    // Those that feedback rounds go side by side.
    let side: Vec<(usize, &[f32])> = rows().filter(|(i, _)| fed(*i)).collect();
    let scales: Vec<f32> = side.iter().map(|(_, x)| best_scale(Width::Int4, x, importance)).collect();
    let codes = feedback.map_or_else(Vec::new, |f| {
        f.round_at(&side.iter().flat_map(|(_, x)| x.iter().copied()).collect::<Vec<_>>(), &scales)
    });
    let mut done = scales.into_iter().zip(codes.chunks(cols.max(1)));
    let one = |(i, x): (usize, &[f32])| {
        let again = stored.then(|| Channel::recover(width(i), x)).flatten();
        let mut by_feedback = || done.next().map(|(scale, codes)| Channel { scale, codes: codes.to_vec() });
        let ready = if fed(i) { by_feedback() } else { again };
        ready.unwrap_or_else(|| Channel::nearest(width(i), x, importance))
    };
    rows().map(one).collect()
}
