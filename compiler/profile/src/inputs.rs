//! The recorded input of a weight of the compiled Graph: rows, and correlations of its channels.
#![expect(clippy::cast_possible_truncation, reason = "statistics: floats are clamped and rounded")]

use super::{Correlations, Moments, Profile, Sample};
use crate::importance::ENOUGH;
use moec_base::error::{Error, Result};
use moec_ir::{Axis, Module, Source, WeightExpr};
use std::ops::Range;

/// Recorded input of a weight.
#[derive(Debug)]
pub struct Input<'a> {
    /// Channels.
    pub cols: usize,
    /// Recorded rows, `[n, cols]`, in an order independent of their contents.
    pub rows: Vec<f32>,
    moments: &'a Moments,
    correlations: Option<&'a Correlations>,
    /// Factor of every channel between the input and the weight.
    by: Option<Vec<f32>>,
}

/// Second moments `E[x xᵀ]` of an input, in blocks on the diagonal, each row-major and complete.
#[derive(Debug)]
pub struct SecondMoments {
    blocks: Vec<(Range<usize>, Vec<f32>)>,
}

impl<'a> Input<'a> {
    /// The input of a weight by its expression; `None` if the profile has no rows of it.
    ///
    /// # Errors
    /// Fails if `source` fails, from which the factors of scaled weights are read.
    pub fn of(
        profile: &'a Profile,
        lowered: &Module,
        expr: &WeightExpr,
        source: &dyn Source,
    ) -> Result<Option<Self>> {
        let Some((name, by)) = name_of(lowered, expr, source)? else { return Ok(None) };
        let reads = |readers: &[String]| readers.contains(&name);
        let sample = profile.samples.iter().find(|s| reads(&s.readers));
        let Some((sample, moments)) = sample.zip(profile.weights.get(&name)) else { return Ok(None) };
        let mut rows = Sample::rows(sample);
        if let Some(by) = &by {
            for row in rows.chunks_exact_mut(sample.cols.max(1)) {
                row.iter_mut().zip(by).for_each(|(x, by)| *x *= by);
            }
        }
        let correlations = profile.correlations.iter().find(|c| reads(&c.readers) && c.cols == sample.cols);
        Ok(Some(Self { cols: sample.cols, rows, moments, correlations, by }))
    }

    /// Number of rows.
    pub fn len(&self) -> usize {
        self.rows.len() / self.cols.max(1)
    }

    /// True if there are no rows.
    pub fn is_empty(&self) -> bool {
        self.rows.is_empty()
    }

    /// Second moments of the input of matrix `matrix`: of its own tokens if there are enough, else of all.
    /// Without correlations the moments are diagonal.
    pub fn moments(&self, matrix: usize) -> SecondMoments {
        let own = self.moments.tokens.get(matrix).is_some_and(|&n| n >= ENOUGH);
        let squares = if own { self.moments.of(matrix).to_vec() } else { self.moments.mean() };
        let roots: Vec<f32> = (0..self.cols)
            .map(|c| {
                let root = squares.get(c).map_or(0.0, |x| x.sqrt());
                self.by.as_ref().and_then(|by| by.get(c)).map_or(root, |by| root * by.abs())
            })
            .collect();
        let signs: Vec<f32> = (0..self.cols)
            .map(|c| self.by.as_ref().and_then(|by| by.get(c)).map_or(1.0, |by| by.signum()))
            .collect();
        let Some(correlations) = self.correlations else {
            return SecondMoments::diagonal(&roots.iter().map(|x| x * x).collect::<Vec<f32>>());
        };
        // One matrix for all experts, or one for each.
        let matrix = matrix.min(correlations.matrices().saturating_sub(1));
        let blocks = correlations.of(matrix).map(|(range, mut below)| {
            let n = range.len();
            let mut block = vec![0.0; n * n];
            for i in 0..n {
                let (a, root) = (range.start + i, roots[range.start + i]);
                block[i * n + i] = root * root;
                for (j, r) in below.by_ref().take(i).enumerate() {
                    let b = range.start + j;
                    let x = r as f32 * root * roots[b] * signs[a] * signs[b];
                    (block[i * n + j], block[j * n + i]) = (x, x);
                }
            }
            (range, block)
        });
        SecondMoments { blocks: blocks.collect() }
    }
}

impl SecondMoments {
    /// Moments of uncorrelated channels, from their mean squares.
    pub fn diagonal(squares: &[f32]) -> Self {
        Self { blocks: squares.iter().enumerate().map(|(c, x)| (c..c + 1, vec![*x])).collect() }
    }

    /// The blocks: the channels of each, and its numbers row by row.
    pub fn blocks(&self) -> impl Iterator<Item = (Range<usize>, &[f32])> {
        self.blocks.iter().map(|(range, block)| (range.clone(), block.as_slice()))
    }
}

/// The weight of the lowered Graph that reads the channels of an expression, and the factors in between.
/// Rewriting joins matrices of one input, and folds factors of its channels into them.
fn name_of(
    lowered: &Module,
    expr: &WeightExpr,
    source: &dyn Source,
) -> Result<Option<(String, Option<Vec<f32>>)>> {
    if let Some(weight) = lowered.weights.iter().find(|w| w.expr == *expr) {
        return Ok(Some((weight.name.clone(), None)));
    }
    match expr {
        WeightExpr::Concat { of, .. } => match of.first() {
            // A join by columns begins with the requested channels.
            Some(first) => name_of(lowered, first, source),
            None => Ok(None),
        },
        WeightExpr::Slice { axis: Axis::Rows, of, .. }
        | WeightExpr::Arrange { of, .. }
        | WeightExpr::Split { of, .. }
        | WeightExpr::ScaleMatrices { of, .. }
        | WeightExpr::Join(of) => name_of(lowered, of, source),
        // (x · s) Wᵀ = x (W · s)ᵀ: the stored matrix reads x, which is the recorded input divided by s.
        WeightExpr::ScaleCols { of, by } => {
            let Some((name, inner)) = name_of(lowered, of, source)? else { return Ok(None) };
            let cols = by.shape().ok().and_then(|s| s.last().copied()).unwrap_or(0);
            let mut factors = vec![0.0; cols];
            by.read(0, 0..1, 0..cols, source, &mut factors).map_err(|e| Error::input(e.to_string()))?;
            for f in &mut factors {
                *f = if *f == 0.0 { 0.0 } else { f.recip() };
            }
            if let Some(inner) = inner {
                factors.iter_mut().zip(inner).for_each(|(f, g)| *f *= g);
            }
            Ok(Some((name, Some(factors))))
        }
        _ => Ok(None),
    }
}
