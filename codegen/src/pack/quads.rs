//! Rounding with feedback where codes are chosen four at a time ([`Patterns`]): of a quad's columns `k`, with
//! what columns before the quad missed, `D[k] (w'[k] − ŵ[k])²` depends on the codes before `k` in the quad,
//! too, so that all four are chosen together.

use super::lanes::{LANES, Lanes};
use super::patterns::{Patterns, QUAD};

/// A matrix of a quad's columns.
type Square = [[f32; QUAD]; QUAD];

/// Choice of the codes of a block's quads.
pub(super) struct Quads {
    patterns: Patterns,
    columns: usize,
    /// Norms for feedback, quad by quad.
    fed: Vec<f32>,
    /// Norms for codes that are looked at again, quad by quad.
    swept: Vec<f32>,
}

/// The numbers of a `[n, n]` matrix for the quad from column `first` on; zero past its end.
fn square(of: &[f32], n: usize, first: usize) -> Square {
    std::array::from_fn(|i| {
        std::array::from_fn(|j| {
            let (row, column) = (first + i, first + j);
            if row < n && column < n { of[row * n + column] } else { 0.0 }
        })
    })
}

impl Quads {
    /// For a block of columns with these factors ([`super::Feedback`]) and second moments.
    pub(super) fn new(patterns: &Patterns, weights: &[f32], upper: &[f32], moments: &[f32]) -> Self {
        let n = weights.len();
        let (mut fed, mut swept) = (Vec::new(), Vec::new());
        for first in (0..n).step_by(QUAD) {
            let mut u = square(upper, n, first);
            (0..QUAD).for_each(|i| u[i][i] = 1.0);
            let weight = |k: usize| weights.get(first + k).copied().unwrap_or(0.0);
            let both = |i: usize, j: usize| (0..QUAD).map(|k| u[i][k] * weight(k) * u[j][k]).sum();
            let product: Square = std::array::from_fn(|i| std::array::from_fn(|j| both(i, j)));
            fed.extend(patterns.norms(&product));
            swept.extend(patterns.norms(&square(moments, n, first)));
        }
        Self { patterns: *patterns, columns: n, fed, swept }
    }

    /// The scales that are tried for the numbers of a group.
    #[allow(clippy::inline_always, reason = "the caller vectorises it only inline")]
    #[inline(always)]
    pub(super) fn scales(&self, numbers: &[Lanes]) -> impl Iterator<Item = Lanes> + use<> {
        let mut root = [0.0; LANES];
        for x in numbers {
            for l in 0..LANES {
                root[l] += x[l] * x[l];
            }
        }
        for x in &mut root {
            *x = (*x / numbers.len().max(1) as f32).sqrt();
        }
        self.patterns.scales(&root)
    }

    fn norms<'a>(&self, all: &'a [f32], first: usize) -> &'a [f32] {
        let each = self.patterns.norms_of_quad();
        all.get(first / QUAD * each..).and_then(|norms| norms.get(..each)).unwrap_or_default()
    }

    /// Codes of the quad from column `first` on, and the weighted error that they add. `exact` are the
    /// columns' numbers, `fed` the same with the errors of columns before the quad.
    #[allow(clippy::inline_always, reason = "the caller vectorises it only inline")]
    #[inline(always)]
    pub(super) fn choose(
        &self,
        [weights, upper]: [&[f32]; 2],
        first: usize,
        [exact, fed]: [&[Lanes]; 2],
        scale: &Lanes,
    ) -> ([Lanes; QUAD], Lanes) {
        let u = square(upper, self.columns, first);
        let weight = |k: usize| weights.get(first + k).copied().unwrap_or(0.0);
        // With nothing stored in the quad, all of its columns are missed.
        let mut open = [[0.0; LANES]; QUAD];
        for (k, open) in open.iter_mut().enumerate().take(exact.len()) {
            *open = fed[k];
            for (i, x) in exact.iter().enumerate().take(k) {
                for l in 0..LANES {
                    open[l] += x[l] * u[i][k];
                }
            }
        }
        let mut reach = [[0.0; LANES]; QUAD];
        for k in 0..QUAD {
            for i in 0..=k {
                let by = weight(k) * if i == k { 1.0 } else { u[i][k] };
                for l in 0..LANES {
                    reach[i][l] += open[k][l] * by;
                }
            }
        }
        let codes = self.patterns.choose(self.norms(&self.fed, first), &reach, scale);
        let mut error = [0.0; LANES];
        for k in 0..QUAD {
            for l in 0..LANES {
                let mut missed = open[k][l] - codes[k][l] * scale[l];
                for i in 0..k {
                    missed -= codes[i][l] * scale[l] * u[i][k];
                }
                error[l] += weight(k) * missed * missed;
            }
        }
        (codes, error)
    }

    /// The best codes of the quad from column `first` on, given all others. `gradient` is `(w − ŵ) H` of its
    /// columns, with `ŵ` of the codes until now.
    #[allow(clippy::inline_always, reason = "the caller vectorises it only inline")]
    #[inline(always)]
    pub(super) fn again(
        &self,
        moments: &[f32],
        first: usize,
        [gradient, codes]: [&[Lanes]; 2],
        scale: &Lanes,
    ) -> [Lanes; QUAD] {
        let h = square(moments, self.columns, first);
        let mut reach = [[0.0; LANES]; QUAD];
        for (i, reach) in reach.iter_mut().enumerate().take(gradient.len()) {
            *reach = gradient[i];
            for (code, h) in codes.iter().zip(h[i]) {
                for l in 0..LANES {
                    reach[l] += code[l] * scale[l] * h;
                }
            }
        }
        self.patterns.choose(self.norms(&self.swept, first), &reach, scale)
    }
}
