//! Gates as a product of two small matrices.
//!
//! Of all `L R` of a rank that stand for gates `G` the one that errs least on inputs with second moments `C`, in the mean over
//! squares, is `L = U`, `R = Uᵀ G`, where `U` are the first eigenvectors of `G C Gᵀ`: it is the singular value decomposition of
//! `G C^½` (activation-aware, as in ASVD and SVD-LLM; arXiv 2312.05821, 2403.07378).

/// Vectors beyond those that are asked for: what is near the border converges slowly.
const SPARE: usize = 8;
/// Turns of the iteration.
const TURNS: usize = 12;
/// Sweeps over all pairs; each makes what is left much smaller.
const SWEEPS: usize = 12;

/// First eigenvectors of a symmetric matrix `[n, n]` without negative eigenvalues, the largest first, as rows of `n`. By orthogonal
/// iteration, and the method of Rayleigh and Ritz in what that spans (Golub and Van Loan, Matrix Computations, §8.2).
pub(super) fn leading(matrix: &[f64], n: usize, count: usize) -> Vec<Vec<f64>> {
    let wide = (count + SPARE).min(n);
    let mut basis = start(n, wide);
    orthonormal(&mut basis);
    // All of the space needs no search.
    for _ in 0..if wide < n { TURNS } else { 0 } {
        basis = basis.iter().map(|v| product(matrix, v)).collect();
        orthonormal(&mut basis);
    }
    let images: Vec<Vec<f64>> = basis.iter().map(|v| product(matrix, v)).collect();
    let mut small: Vec<f64> = basis.iter().flat_map(|a| images.iter().map(|b| dot(a, b))).collect();
    let turned = rotate(&mut small, wide);
    let mut order: Vec<usize> = (0..wide).collect();
    order.sort_by(|&a, &b| small[b * wide + b].total_cmp(&small[a * wide + a]));
    let vector = |which: usize| {
        let mut sum = vec![0.0; n];
        for (i, v) in basis.iter().enumerate() {
            sum.iter_mut().zip(v).for_each(|(s, x)| *s += turned[i * wide + which] * x);
        }
        sum
    };
    order.into_iter().take(count).map(vector).collect()
}

/// Vectors to begin with, which have nothing to do with the matrix, and are the same every time.
fn start(n: usize, count: usize) -> Vec<Vec<f64>> {
    let mut state = 0x9e37_79b9_7f4a_7c15_u64;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 11) as f64 / (1_u64 << 53) as f64 - 0.5
    };
    (0..count).map(|_| (0..n).map(|_| next()).collect()).collect()
}

fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

fn product(matrix: &[f64], v: &[f64]) -> Vec<f64> {
    matrix.chunks_exact(v.len()).map(|row| dot(row, v)).collect()
}

/// Makes vectors orthonormal, each against those before it, twice; one that these span becomes 0.
fn orthonormal(vectors: &mut [Vec<f64>]) {
    for i in 0..vectors.len() {
        let (before, rest) = vectors.split_at_mut(i);
        let Some(v) = rest.first_mut() else { return };
        let length = dot(v, v).sqrt();
        for _ in 0..2 {
            for u in before.iter() {
                let along = dot(u, v);
                v.iter_mut().zip(u).for_each(|(x, u)| *x -= along * u);
            }
        }
        let left = dot(v, v).sqrt();
        let by = if left > 1e-10 * length { left.recip() } else { 0.0 };
        for x in v.iter_mut() {
            *x *= by;
        }
    }
}

/// Turns a symmetric matrix `[n, n]` until it is diagonal (Jacobi); the columns of what comes back are its eigenvectors.
fn rotate(a: &mut [f64], n: usize) -> Vec<f64> {
    let mut turned: Vec<f64> = (0..n * n).map(|i| if i / n == i % n { 1.0 } else { 0.0 }).collect();
    for _ in 0..SWEEPS {
        for p in 0..n {
            for q in p + 1..n {
                let off = a[p * n + q];
                if off.abs() <= 1e-14 * (a[p * n + p] * a[q * n + q]).abs().sqrt() {
                    continue;
                }
                let theta = (a[q * n + q] - a[p * n + p]) / (2.0 * off);
                let t = theta.signum() / (theta.abs() + (theta * theta + 1.0).sqrt());
                let t = if theta == 0.0 { 1.0 } else { t };
                let c = (t * t + 1.0).sqrt().recip();
                let s = t * c;
                for i in 0..n {
                    let (x, y) = (a[i * n + p], a[i * n + q]);
                    (a[i * n + p], a[i * n + q]) = (c * x - s * y, s * x + c * y);
                    let (x, y) = (turned[i * n + p], turned[i * n + q]);
                    (turned[i * n + p], turned[i * n + q]) = (c * x - s * y, s * x + c * y);
                }
                for i in 0..n {
                    let (x, y) = (a[p * n + i], a[q * n + i]);
                    (a[p * n + i], a[q * n + i]) = (c * x - s * y, s * x + c * y);
                }
            }
        }
    }
    turned
}

#[cfg(test)]
mod tests {
    use super::*;

    /// `Σ λᵢ vᵢ vᵢᵀ` of orthonormal vectors.
    fn of(vectors: &[Vec<f64>], values: &[f64]) -> Vec<f64> {
        let n = vectors[0].len();
        let mut matrix = vec![0.0; n * n];
        for (v, value) in vectors.iter().zip(values) {
            for i in 0..n {
                (0..n).for_each(|j| matrix[i * n + j] += value * v[i] * v[j]);
            }
        }
        matrix
    }

    #[test]
    fn the_largest_come_first_and_are_those_that_were_put_in() {
        // In a space that is searched, and in one that is taken whole.
        for (n, count) in [(40, 5), (10, 6)] {
            let mut vectors = start(n, n);
            vectors.reverse();
            orthonormal(&mut vectors);
            let values: Vec<f64> = (0..n).map(|i| 0.6_f64.powi(i as i32)).collect();
            let found = leading(&of(&vectors, &values), n, count);
            assert_eq!(found.len(), count);
            for (found, put) in found.iter().zip(&vectors) {
                assert!((dot(found, put).abs() - 1.0).abs() < 1e-6, "{n}: {}", dot(found, put));
            }
        }
    }

    #[test]
    fn fewer_dimensions_than_vectors_are_no_fault() {
        let mut one = start(12, 1);
        orthonormal(&mut one);
        let found = leading(&of(&one, &[3.0]), 12, 4);
        assert!((dot(&found[0], &one[0]).abs() - 1.0).abs() < 1e-9);
        assert!(found.iter().flatten().all(|x| x.is_finite()));
    }
}
