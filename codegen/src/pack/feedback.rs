//! Rounding with error feedback: what a column misses is made up for by the columns after it.
//!
//! A matrix `W` that is stored as `Ŵ` errs by `tr((W − Ŵ) H (W − Ŵ)ᵀ)`, where `H = E[x xᵀ]` are the second
//! moments of its inputs (QuIP, arXiv 2307.13304, §3.1). With `H = (U + I) D (U + I)ᵀ`, `U` strictly upper
//! triangular and `D` diagonal, the error is `Σ D[k] (w'[k] − ŵ[k])²`, where `w'[k] = w[k] + Σ_{i<k} (w[i] −
//! ŵ[i]) U[i, k]`: so columns are rounded in order, each after the errors of those before it were added
//! (LDLQ, §3.1 there). That is what GPTQ (arXiv 2210.17323, §3.3, algorithm 1) computes by the Cholesky
//! factor of `H⁻¹`, but nothing is inverted.
//!
//! A group's scale is the one that is tried with which that sum is least over the group: scales are judged by
//! the codes that they lead to, feedback included (`strip.rs`). Quads of codes are chosen together (`quads.rs`).
//! What was chosen is then looked at again, [`SWEEPS`] times (`descent.rs`).
//!
//! Rows do not depend on each other, and sixteen go side by side. All sums have one order and no multiply-add
//! is fused, so that bytes do not depend on threads or machines.

use super::lanes::LANES;
use super::patterns::Patterns;
use super::quads::Quads;
use super::quantise::{Codes, Group};
use super::strip::Strip;
use super::vectors;
use moec_ir::types::{Format, GROUP};
use std::ops::Range;

/// Times that codes are chosen again when all of them are known. On ferris's matrices two, with scales fitted
/// again, took a tenth of what rounding misses away; five took 13 %, and twenty no more.
pub const SWEEPS: usize = 3;

/// Error feedback between a matrix's columns: the factors of its second moments, which are blocks on the
/// diagonal.
#[derive(Clone, Debug, PartialEq)]
pub struct Feedback {
    cols: usize,
    blocks: Vec<Block>,
}

/// Factors of a block of `n` columns.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Block {
    pub(super) cols: Range<usize>,
    /// `D`, `[n]`.
    pub(super) weights: Vec<f32>,
    /// `U`, `[n, n]`; 0 on and below the diagonal.
    pub(super) upper: Vec<f32>,
    /// `H`, `[n, n]`.
    pub(super) moments: Vec<f32>,
}

/// Second moments of a block: its columns, and the lower triangle with the diagonal, row by row.
pub type Moments = (Range<usize>, Vec<f64>);

impl Feedback {
    /// Feedback for second moments that are blocks on the diagonal. Blocks begin at multiples of [`GROUP`],
    /// follow each other and cover all columns; `None` if they do not. A block that is not positive definite
    /// counts as its diagonal.
    pub fn new(blocks: impl IntoIterator<Item = Moments>) -> Option<Self> {
        let mut cols = 0;
        let mut all = Vec::new();
        for (range, moments) in blocks {
            if range.start != cols || range.is_empty() || !cols.is_multiple_of(GROUP) {
                return None;
            }
            cols = range.end;
            all.push(Block::new(range, moments)?);
        }
        Some(Self { cols, blocks: all })
    }

    /// Feedback between the other columns, where those of `columns`, ascending, err by nothing: that of their
    /// own second moments. `None` if none are left.
    pub fn without(&self, columns: &[u32]) -> Option<Self> {
        let mut out = Self { cols: 0, blocks: Vec::new() };
        for Block { cols, moments, .. } in &self.blocks {
            let left = |c: &usize| columns.binary_search(&(*c as u32)).is_err();
            let left: Vec<usize> = cols.clone().filter(left).map(|c| c - cols.start).collect();
            let lower = left.iter().enumerate().flat_map(|(i, row)| {
                left.iter().take(i + 1).map(move |col| f64::from(moments[row * cols.len() + col]))
            });
            if !left.is_empty() {
                let range = out.cols..out.cols + left.len();
                out.cols = range.end;
                out.blocks.push(Block::new(range, lower.collect())?);
            }
        }
        (out.cols > 0).then_some(out)
    }

    /// Input channels.
    pub fn cols(&self) -> usize {
        self.cols
    }

    /// Bytes that the factors take.
    pub fn bytes(&self) -> usize {
        self.blocks
            .iter()
            .map(|b| (b.upper.len() + b.moments.len() + b.weights.len()) * size_of::<f32>())
            .sum()
    }

    /// `tr(X H Xᵀ)` of whole rows: the energy that they have after the matrix, up to the damping of `H`.
    pub fn energy(&self, rows: &[f32]) -> f64 {
        let of = |row: &[f32], block: &Block| -> f64 {
            let n = block.cols.len();
            let Some(x) = row.get(block.cols.clone()) else { return 0.0 };
            let mut sums: Vec<f64> = x.iter().map(|&x| f64::from(x)).collect();
            for (i, &x) in x.iter().enumerate() {
                let upper = block.upper[i * n + i + 1..(i + 1) * n].iter();
                sums[i + 1..].iter_mut().zip(upper).for_each(|(sum, &u)| *sum += f64::from(x) * f64::from(u));
            }
            sums.iter().zip(&block.weights).map(|(x, &d)| f64::from(d) * x * x).sum()
        };
        let rows = rows.chunks_exact(self.cols.max(1));
        rows.map(|row| self.blocks.iter().map(|block| of(row, block)).sum::<f64>()).sum()
    }

    /// Rounds whole rows to a format for which [`uses_feedback`] is true: groups `[rows, cols / GROUP]`, the
    /// last one of a row filled up with zeros.
    pub fn round(&self, format: Format, rows: &[f32]) -> Vec<Group> {
        self.round_in(format, rows, SWEEPS)
    }

    /// As [`Feedback::round`], with this many sweeps after feedback: with none, its codes unchanged.
    pub fn round_in(&self, format: Format, rows: &[f32], sweeps: usize) -> Vec<Group> {
        vectors::widest(Round { by: self, format, rows, sweeps })
    }

    /// Rounds whole rows to codes in −8 ..= 7 at scales that are given, one for each row: codes `[rows,
    /// cols]`.
    pub fn round_at(&self, rows: &[f32], scales: &[f32]) -> Vec<i8> {
        vectors::widest(RoundAt { by: self, rows, scales })
    }
}

/// Rounds rows.
struct Round<'a> {
    by: &'a Feedback,
    format: Format,
    rows: &'a [f32],
    sweeps: usize,
}

impl vectors::Work for Round<'_> {
    type Output = Vec<Group>;

    #[allow(clippy::inline_always, reason = "the caller vectorises it only inline")]
    #[inline(always)]
    fn run(self) -> Vec<Group> {
        let Self { by: Feedback { cols, blocks }, format, rows, sweeps } = self;
        let per_row = cols.div_ceil(GROUP);
        let width = (*cols).max(1);
        let mut groups = vec![Group::ZERO; rows.len() / width * per_row];
        let codebooks: Vec<Codebook> = blocks.iter().map(|block| block.codebook(format)).collect();
        let strips = rows.chunks(LANES * width);
        for (rows, groups) in strips.zip(groups.chunks_mut((LANES * per_row).max(1))) {
            let mut strip = Strip::new(rows, *cols);
            for (block, codebook) in blocks.iter().zip(&codebooks) {
                strip.round(block, (format, codebook), sweeps, &mut |lane, g, group| {
                    if let Some(to) = groups.get_mut(lane * per_row + g) {
                        *to = group;
                    }
                });
            }
        }
        groups
    }
}

/// Rounds rows at scales that are given.
struct RoundAt<'a> {
    by: &'a Feedback,
    rows: &'a [f32],
    scales: &'a [f32],
}

impl vectors::Work for RoundAt<'_> {
    type Output = Vec<i8>;

    #[allow(clippy::inline_always, reason = "the caller vectorises it only inline")]
    #[inline(always)]
    fn run(self) -> Vec<i8> {
        let Self { by: Feedback { cols, blocks }, rows, scales } = self;
        let width = (*cols).max(1);
        let mut all = vec![0; rows.len() / width * width];
        let strips = rows.chunks(LANES * width).zip(scales.chunks(LANES));
        for ((rows, scales), all) in strips.zip(all.chunks_mut(LANES * width)) {
            let mut strip = Strip::new(rows, *cols);
            for block in blocks {
                for (i, codes) in block.cols.clone().zip(strip.round_at(block, scales)) {
                    for (row, code) in all.chunks_mut(width).zip(codes) {
                        row[i] = code as i8;
                    }
                }
            }
        }
        all
    }
}

/// Codes of a format, for a block of columns.
pub(super) enum Codebook {
    /// A code for each number.
    Each(Codes),
    /// Codes of four numbers at a time.
    Quads(Box<Quads>),
}

impl Block {
    fn codebook(&self, format: Format) -> Codebook {
        let quads = |patterns| Quads::new(&patterns, &self.weights, &self.upper, &self.moments);
        let by_patterns = Patterns::of(format).map(|patterns| Codebook::Quads(Box::new(quads(patterns))));
        by_patterns.unwrap_or(Codebook::Each(Codes::of(format)))
    }

    fn new(cols: Range<usize>, mut h: Vec<f64>) -> Option<Self> {
        let n = cols.len();
        let row = |i: usize| i * (i + 1) / 2;
        if h.len() != row(n) || !h.iter().all(|x| x.is_finite()) {
            return None;
        }
        let diagonal: Vec<f64> = (0..n).map(|i| h[row(i) + i]).collect();
        let least = 1e-6 * diagonal.iter().sum::<f64>() / n as f64;
        let (mut weights, mut upper) = (vec![0.0; n], vec![0.0; n * n]);
        let mut moments = vec![0.0; n * n];
        for i in 0..n {
            for j in 0..=i {
                (moments[i * n + j], moments[j * n + i]) = (h[row(i) + j] as f32, h[row(i) + j] as f32);
            }
        }
        // From the last column on: what it explains of those before it is taken out of their moments.
        for k in (0..n).rev() {
            let (before, own) = h.split_at_mut(row(k));
            let d = own[k];
            if d.is_nan() || d <= least {
                let weights: Vec<f32> = diagonal.iter().map(|&x| x.max(0.0) as f32).collect();
                moments.fill(0.0);
                moments.iter_mut().step_by(n + 1).zip(&weights).for_each(|(h, x)| *h = *x);
                return Some(Self { cols, weights, upper: vec![0.0; n * n], moments });
            }
            weights[k] = d as f32;
            for i in 0..k {
                let u = own[i] / d;
                upper[i * n + k] = u as f32;
                before[row(i)..=row(i) + i].iter_mut().zip(&*own).for_each(|(x, y)| *x -= u * y);
            }
        }
        Some(Self { cols, weights, upper, moments })
    }
}

/// Whether numbers may have become `stored`. A row that feedback rounded has other codes than the nearest
/// ones, but its error is at most that share of its energy.
pub(super) fn is_plausible(exact: &[f32], stored: &[f32], share: f64) -> bool {
    let energy = |x: f32| f64::from(x) * f64::from(x);
    let missed: f64 = exact.iter().zip(stored).map(|(x, y)| energy(x - y)).sum();
    missed <= exact.iter().map(|&x| energy(x)).sum::<f64>() * share
}

/// The largest share of a row's energy that rounding to a format may err by. With the fewest bits errors are
/// large where inputs are small. Another row would err by all of its energy and more.
pub(super) const fn share(format: Format) -> f64 {
    if format.is_by_patterns() { 0.5 } else { 0.125 }
}

/// Whether a format is rounded with feedback, apart from outliers. The error of q8 is three hundred times
/// smaller than that of q4: there is nothing to gain. Formats for published codes are seldom rounded to.
pub const fn uses_feedback(format: Format) -> bool {
    let spec = format.spec();
    spec.bits < 8 && !spec.published
}
