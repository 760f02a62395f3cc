//! Rows of real text that matrices are multiplied by, from which codes of activations take their range.
//!
//! A few hundred rows of each input are kept, in bf16: it covers all activations, and eight bits are accurate
//! enough for a range. The hashes of rows alone determine which are kept, so that the order of texts does not
//! matter.

use super::{MOST, Profile, ProfileFault};
use bincode::{Decode, Encode};
use half::bf16;
use moec_base::error::{Error, Result};
use moec_ir::{Axis, Module, Source, Weight, WeightExpr};
use std::collections::BTreeSet;

/// Limit of the rows that are kept of an input.
pub const ROWS: usize = 256;
/// Rows that are always kept.
const LEAST: usize = 16;
/// Limit of the bytes of all inputs' rows, unless [`LEAST`] rows take more.
const MOST_BYTES: usize = 32 << 20;

/// Rows of one input.
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
pub struct Sample {
    /// Weights that read the input, by their names in [`Profile::weights`].
    pub readers: Vec<String>,
    /// Channels.
    pub cols: usize,
    /// `[rows, cols]` in bf16, by ascending hash of the row.
    bits: Vec<u16>,
}

/// Number of rows to keep of each of several inputs, by their channels.
pub fn most(cols: impl Iterator<Item = usize>) -> usize {
    let bytes = cols.fold(0_usize, |sum, n| sum.saturating_add(n.saturating_mul(2)));
    (MOST_BYTES / bytes.max(1)).clamp(LEAST, ROWS)
}

/// FNV-1a over a row: an order of rows independent of their contents.
fn hash(row: &[u16]) -> u64 {
    let mix = |h: u64, x: &u16| (h ^ u64::from(*x)).wrapping_mul(0x0100_0000_01b3);
    row.iter().fold(0xcbf2_9ce4_8422_2325, mix)
}

/// Collects rows: those with the smallest hashes are kept.
#[derive(Clone, Debug, Default, Encode, Decode)]
pub struct RowSample {
    rows: BTreeSet<(u64, Vec<u16>)>,
}

impl RowSample {
    /// Adds a row, of which at most `most` are kept.
    pub fn add(&mut self, row: &[f32], most: usize) {
        self.add_bits(row.iter().map(|x| bf16::from_f32(*x).to_bits()).collect(), most);
    }

    fn add_bits(&mut self, row: Vec<u16>, most: usize) {
        self.rows.insert((hash(&row), row));
        while self.rows.len() > most {
            self.rows.pop_last();
        }
    }

    /// Adds the rows of another sample, of which at most `most` are kept in all.
    pub fn merge(&mut self, other: Self, most: usize) {
        self.rows.extend(other.rows);
        while self.rows.len() > most {
            self.rows.pop_last();
        }
    }

    /// The rows, as an input of these readers.
    pub fn finish(self, readers: Vec<String>, cols: usize) -> Sample {
        Sample { readers, cols, bits: self.rows.into_iter().flat_map(|(_, row)| row).collect() }
    }
}

impl Sample {
    /// Number of rows.
    pub fn len(&self) -> usize {
        self.bits.len() / self.cols.max(1)
    }

    /// True if there are no rows.
    pub fn is_empty(&self) -> bool {
        self.bits.is_empty()
    }

    /// The rows, `[len, cols]`.
    pub fn rows(&self) -> Vec<f32> {
        self.bits.iter().map(|b| bf16::from_bits(*b).to_f32()).collect()
    }

    fn check(&self) -> std::result::Result<(), ProfileFault> {
        if !(1..=MOST).contains(&self.cols) || !self.bits.len().is_multiple_of(self.cols) || self.len() > ROWS
        {
            return Err(format!("{} numbers in rows of {} channels", self.bits.len(), self.cols));
        }
        if self.bits.iter().any(|b| !bf16::from_bits(*b).is_finite()) {
            return Err("a number that is not finite".to_owned());
        }
        let in_order = |a: &&[u16], b: &&[u16]| (hash(a), *a) < (hash(b), *b);
        let rows: Vec<&[u16]> = self.bits.chunks_exact(self.cols).collect();
        if rows.is_sorted_by(in_order) { Ok(()) } else { Err("rows that are not in order".to_owned()) }
    }
}

/// Checks the rows of a profile.
pub(super) fn check(profile: &Profile) -> std::result::Result<(), ProfileFault> {
    let known = |s: &Sample| {
        let cols = |name: &String| profile.weights.get(name).is_some_and(|m| m.cols == s.cols);
        !s.readers.is_empty() && s.readers.iter().all(cols)
    };
    if profile.samples.len() > profile.weights.len() || !profile.samples.iter().all(known) {
        return Err("rows of an input that no weight has".to_owned());
    }
    profile.samples.iter().try_for_each(|s| {
        s.check().map_err(|e| format!("rows of `{}`: {e}", s.readers.first().map_or("", |name| name)))
    })
}

/// Merges the rows of both, as if one run had read both texts. Inputs that one profile lacks are left out.
pub(super) fn merge(a: &[Sample], b: &[Sample]) -> Vec<Sample> {
    let most = most(a.iter().map(|s| s.cols));
    let both = |s: &Sample| {
        let other = b.iter().find(|o| o.readers == s.readers && o.cols == s.cols)?;
        let mut merged = RowSample::default();
        let rows = s.bits.chunks_exact(s.cols.max(1)).chain(other.bits.chunks_exact(s.cols.max(1)));
        rows.for_each(|row| merged.add_bits(row.to_vec(), most));
        Some(merged.finish(s.readers.clone(), s.cols))
    };
    a.iter().filter_map(both).collect()
}

/// Rows that a weight of the compiled Graph is multiplied by, `[n, cols]`; `None` if the profile has none of
/// them.
///
/// # Errors
/// Fails if `source` fails, from which the factors of scaled weights are read.
pub fn rows(
    profile: &Profile,
    lowered: &Module,
    weight: &Weight,
    source: &dyn Source,
) -> Result<Option<Vec<f32>>> {
    let found = of(profile, lowered, &weight.expr, source)?;
    Ok(found.filter(|rows| !rows.is_empty() && rows.len().is_multiple_of(weight.cols().max(1))))
}

/// The same rows for an expression: rewriting joins matrices of one input, and folds factors of its channels
/// into them.
fn of(
    profile: &Profile,
    lowered: &Module,
    expr: &WeightExpr,
    source: &dyn Source,
) -> Result<Option<Vec<f32>>> {
    if let Some(weight) = lowered.weights.iter().find(|w| w.expr == *expr) {
        return Ok(profile.samples.iter().find(|s| s.readers.contains(&weight.name)).map(Sample::rows));
    }
    match expr {
        WeightExpr::Concat { axis: Axis::Rows, of: parts } => {
            parts.first().map_or(Ok(None), |first| of(profile, lowered, first, source))
        }
        WeightExpr::Slice { axis: Axis::Rows, of: inner, .. } => of(profile, lowered, inner, source),
        // (x · s) Wᵀ = x (W · s)ᵀ: the stored matrix reads x, which is the recorded input divided by s.
        WeightExpr::ScaleCols { of: inner, by } => {
            let Some(mut rows) = of(profile, lowered, inner, source)? else { return Ok(None) };
            let cols = by.shape().ok().and_then(|s| s.last().copied()).unwrap_or(0);
            let mut factors = vec![0.0; cols];
            by.read(0, 0..1, 0..cols, source, &mut factors).map_err(|e| Error::input(e.to_string()))?;
            for row in rows.chunks_exact_mut(cols.max(1)) {
                row.iter_mut().zip(&factors).for_each(|(x, f)| *x = if *f == 0.0 { 0.0 } else { *x / f });
            }
            Ok(Some(rows))
        }
        _ => Ok(None),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample_of(rows: impl Iterator<Item = usize>, most: usize) -> Sample {
        let mut sample = RowSample::default();
        rows.for_each(|i| sample.add(&[i as f32, -1.0, 0.5], most));
        sample.finish(vec!["w".to_owned()], 3)
    }

    #[test]
    fn samples_do_not_depend_on_row_order_and_merge() {
        let all = sample_of(0..200, ROWS);
        assert_eq!((all.len(), all.clone()), (200, sample_of((0..200).rev(), ROWS)));
        let (a, b) = (sample_of(0..120, ROWS), sample_of(80..200, ROWS));
        let (a, b) = ([a], [b]);
        assert_eq!(merge(&a, &b), [all]);
        assert_eq!(merge(&a, &b), merge(&b, &a));
        let few = sample_of(0..200, 8);
        assert_eq!(few.rows().chunks(3).filter(|r| r[1..] == [-1.0, 0.5]).count(), 8);
    }

    #[test]
    fn large_models_keep_fewer_rows() {
        assert_eq!(most([192; 4].into_iter()), ROWS);
        assert_eq!(most([7168; 61].into_iter()), MOST_BYTES / (7168 * 61 * 2));
        assert_eq!(most([1 << 20; 99].into_iter()), LEAST);
    }

    #[test]
    fn invalid_samples_are_refused() {
        type Change = fn(&mut Sample);
        let cases: [(&str, Change); 4] = [
            ("rows of 4 channels", |s| s.cols = 4),
            ("rows of 0 channels", |s| s.cols = 0),
            ("not finite", |s| s.bits[0] = bf16::INFINITY.to_bits()),
            ("not in order", |s| s.bits.rotate_left(3)),
        ];
        for (words, change) in cases {
            let mut sample = sample_of(0..7, ROWS);
            sample.check().unwrap();
            change(&mut sample);
            let e = sample.check().unwrap_err();
            assert!(e.contains(words), "`{words}` is not in `{e}`");
        }
        let mut long = sample_of(0..ROWS, ROWS);
        long.bits.extend_from_within(..3);
        assert!(long.check().is_err());
    }
}
