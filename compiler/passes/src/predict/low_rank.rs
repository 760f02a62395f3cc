//! Gates as a product of two small matrices.
//!
//! Among all products `L R` of a given rank, one has the least mean square error from the gates `G` on inputs
//! with second moments `C`. It is `L = U`, `R = Uᵀ G`, where `U` are the first eigenvectors of `G C Gᵀ`. This
//! is the singular value decomposition of `G C^½` (activation-aware, as in ASVD and SVD-LLM; arXiv
//! 2312.05821, 2403.07378).
//!
//! The eigenvectors are found by orthogonal iteration of `C Gᵀ G`, a few vectors of `hidden` numbers at a
//! time (Halko, Martinsson and Tropp, arXiv 0909.4061). The Rayleigh-Ritz method follows on the images of
//! these under `G`. No matrix of `inter²` or `hidden²` numbers is ever formed; [`bytes`] is the memory that
//! the search takes.

use super::product::{product, product_bytes};
use moec_profile::inputs::SecondMoments;
use nalgebra::{DMatrix, SymmetricEigen};

/// Vectors beyond those that are requested: vectors near the last one converge slowly.
const OVERSAMPLING: usize = 8;
/// Number of iterations.
const ITERATIONS: usize = 12;
/// Limit of the steps for the eigenvalues of the small matrix, for each of its rows.
const STEPS: usize = 100;

/// Matrices of low rank that approximate gates.
pub struct Factors {
    /// `U`, column after column of `inter` numbers.
    pub left: Vec<f64>,
    /// `Uᵀ G`, row after row of `hidden` numbers.
    pub right: Vec<f64>,
}

/// Number of vectors in the iteration for a result of `rank`.
fn wide(inter: usize, hidden: usize, rank: usize) -> usize {
    (rank + OVERSAMPLING).min(inter).min(hidden)
}

/// Largest number of bytes that [`factors`] takes, without the gates: it grows with the sides of the matrix,
/// not their squares.
pub fn bytes(inter: usize, hidden: usize, rank: usize) -> usize {
    let wide = wide(inter, hidden, rank);
    // The vectors of the larger side, before and after orthonormalisation, and the memory of a product for
    // them.
    let most = inter.max(hidden);
    3 * size_of::<f64>() * wide * (most + hidden + wide) + product_bytes(most, most, wide)
}

/// The factors of gates `[inter, hidden]` for inputs with these moments, by descending eigenvalues. `None` if
/// numbers are not finite.
pub fn factors(gates: &[f32], hidden: usize, moments: &SecondMoments, rank: usize) -> Option<Factors> {
    let inter = gates.len() / hidden;
    let wide = wide(inter, hidden, rank);
    let gate = |i: usize, k: usize| f64::from(gates[i * hidden + k]);
    // G · v, Gᵀ · v and C · v of some vectors.
    let by_gates = |v: &[f64]| product(inter, hidden, gate, v, wide);
    let back = |v: &[f64]| product(hidden, inter, |i, k| gate(k, i), v, wide);
    let by_moments = |v: &[f64]| {
        let blocks = moments.blocks().map(|(range, block)| {
            let (n, rows) = (range.len(), &v[range.start * wide..range.end * wide]);
            product(n, n, |i, k| f64::from(block[i * n + k]), rows, wide)
        });
        blocks.flatten().collect::<Vec<f64>>()
    };
    let mut basis = orthonormal(&start(hidden, wide), wide);
    // No search is needed if the vectors span the whole space.
    for _ in 0..if wide < inter.min(hidden) { ITERATIONS } else { 0 } {
        let image = by_gates(&basis);
        let image = back(&image);
        basis = orthonormal(&by_moments(&image), wide);
    }
    let found = orthonormal(&by_gates(&basis), wide);
    let right = back(&found);
    let small = {
        let image = by_moments(&right);
        let rows = |v: &[f64]| DMatrix::from_row_slice(hidden, wide, v);
        rows(&right).tr_mul(&rows(&image))
    };
    let eigen = SymmetricEigen::try_new(small, f64::EPSILON, STEPS * wide)?;
    let mut order: Vec<usize> = (0..wide).collect();
    order.sort_by(|&a, &b| eigen.eigenvalues[b].total_cmp(&eigen.eigenvalues[a]));
    let chosen = eigen.eigenvectors.select_columns(order.iter().take(rank));
    let left = DMatrix::from_row_slice(inter, wide, &found) * &chosen;
    let right = DMatrix::from_row_slice(hidden, wide, &right) * &chosen;
    let all = left.iter().chain(right.iter());
    all.into_iter()
        .all(|x| x.is_finite())
        .then(|| Factors { left: left.as_slice().to_vec(), right: right.as_slice().to_vec() })
}

/// Initial vectors, `[n, count]`: independent of the matrix, and the same every time.
fn start(n: usize, count: usize) -> Vec<f64> {
    let mut state = 0x9e37_79b9_7f4a_7c15_u64;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 11) as f64 / (1_u64 << 53) as f64 - 0.5
    };
    (0..n * count).map(|_| next()).collect()
}

/// An orthonormal basis of the span of the columns of `[n, wide]`.
fn orthonormal(vectors: &[f64], wide: usize) -> Vec<f64> {
    let basis = DMatrix::from_row_slice(vectors.len() / wide, wide, vectors).qr().q();
    basis.transpose().as_slice().to_vec()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Gates `Σ σᵢ uᵢ vᵢᵀ` of orthonormal vectors; with moments of 1 these are their factors.
    fn of(left: &[f64], right: &[f64], hidden: usize, values: &[f64]) -> Vec<f32> {
        let wide = values.len();
        let number = |i: usize, k: usize| -> f64 {
            (0..wide).map(|w| values[w] * left[i * wide + w] * right[k * wide + w]).sum()
        };
        let inter = left.len() / wide;
        (0..inter).flat_map(|i| (0..hidden).map(move |k| (i, k))).map(|(i, k)| number(i, k) as f32).collect()
    }

    #[test]
    fn factors_recover_the_largest_singular_vectors() {
        // Both methods (a searched subspace and the whole space), with either side as the longer one.
        for (inter, hidden, rank) in [(60, 40, 5), (40, 60, 5), (12, 10, 6)] {
            let wide = inter.min(hidden);
            let values: Vec<f64> = (0..wide).map(|i| 0.75_f64.powi(i as i32)).collect();
            let left = orthonormal(&start(inter, wide), wide);
            let right = orthonormal(&start(hidden, wide), wide);
            let gates = of(&left, &right, hidden, &values);
            let found = factors(&gates, hidden, &SecondMoments::diagonal(&vec![1.0; hidden]), rank).unwrap();
            assert_eq!((found.left.len(), found.right.len()), (rank * inter, rank * hidden));
            for w in 0..rank {
                let along: f64 = (0..inter).map(|i| found.left[w * inter + i] * left[i * wide + w]).sum();
                assert!((along.abs() - 1.0).abs() < 1e-4, "{inter} × {hidden}, {w}: {along}");
                let along: f64 = (0..hidden).map(|k| found.right[w * hidden + k] * right[k * wide + w]).sum();
                assert!((along.abs() - values[w]).abs() < 1e-4, "{inter} × {hidden}, {w}: {along}");
            }
        }
    }

    #[test]
    fn channels_with_more_energy_are_first_factors() {
        // Two neurons that read one channel each; the second one's channel is larger.
        let gates = [1.0, 0.0, 0.0, 1.0];
        let found = factors(&gates, 2, &SecondMoments::diagonal(&[1.0, 9.0]), 1).unwrap();
        assert!(found.left[0].abs() < 1e-6 && (found.left[1].abs() - 1.0).abs() < 1e-6, "{:?}", found.left);
    }

    #[test]
    fn low_rank_gates_are_factored_exactly() {
        let gates: Vec<f32> = (0..12 * 20).map(|i| ((i / 20 + 1) * (i % 20 + 1)) as f32).collect();
        let found = factors(&gates, 20, &SecondMoments::diagonal(&[1.0; 20]), 4).unwrap();
        // The first factor alone reproduces the gates.
        for (i, gate) in gates.iter().enumerate() {
            let product = found.left[i / 20] * found.right[i % 20];
            assert!((product - f64::from(*gate)).abs() < 1e-3, "{product} for {gate}");
        }
    }

    #[test]
    fn gates_that_are_not_finite_have_no_factors() {
        let mut gates = vec![1.0_f32; 30 * 30];
        gates[17] = f32::NAN;
        assert!(factors(&gates, 30, &SecondMoments::diagonal(&[1.0; 30]), 2).is_none());
    }
}
