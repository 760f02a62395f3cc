//! Sums of products. Codes are summed as whole numbers: no sum is rounded before its scale is applied.

use super::Values;

/// Products of 17 by 8 bits that a sum of 32 bits holds: 2¹⁶ · 2⁷ · 128 = 2³⁰.
const BLOCK: usize = 128;

/// `x[T, K] · w[N, K] + bias`, as reals.
pub(super) fn fully_connected(x: &Values, w: &Values, bias: Option<&Values>, k: usize) -> Vec<f64> {
    match (x, w) {
        (Values::Codes(x, scale), Values::Weights(w, scales)) => {
            let centred: Vec<i32> = x.iter().map(|q| i32::from(*q) + scale.offset).collect();
            let bias = |n: usize| match bias {
                Some(Values::Whole(b)) => i64::from(b[n]),
                _ => 0,
            };
            let each = |row: &[i32], (n, w): (usize, &[i8])| {
                let real = f64::from(scale.scale) * f64::from(scales[n]);
                (whole(row, w) + bias(n)) as f64 * real
            };
            rows(&centred, k, w, each)
        }
        (Values::Reals(x), Values::Weights(w, scales)) => {
            let each =
                |row: &[f32], (n, w): (usize, &[i8])| mixed(row, w) * f64::from(scales[n]) + real(bias, n);
            rows(x, k, w, each)
        }
        (Values::Reals(x), Values::Reals(w)) => {
            let each = |row: &[f32], (n, w): (usize, &[f32])| reals(row, w) + real(bias, n);
            rows(x, k, w, each)
        }
        // A verified network has no other operands.
        _ => Vec::new(),
    }
}

fn rows<X, W>(x: &[X], k: usize, w: &[W], each: impl Fn(&[X], (usize, &[W])) -> f64) -> Vec<f64> {
    let k = k.max(1);
    x.chunks_exact(k)
        .flat_map(|row| w.chunks_exact(k).enumerate().map(|w| each(row, w)).collect::<Vec<_>>())
        .collect()
}

fn real(bias: Option<&Values>, n: usize) -> f64 {
    match bias {
        Some(Values::Reals(b)) => f64::from(b[n]),
        _ => 0.0,
    }
}

/// A sum of products of whole numbers.
fn whole(x: &[i32], w: &[i8]) -> i64 {
    let blocks = x.chunks(BLOCK).zip(w.chunks(BLOCK));
    let sum = |(x, w): (&[i32], &[i8])| x.iter().zip(w).map(|(x, w)| x * i32::from(*w)).sum::<i32>();
    blocks.map(|b| i64::from(sum(b))).sum()
}

fn mixed(x: &[f32], w: &[i8]) -> f64 {
    let blocks = x.chunks(BLOCK).zip(w.chunks(BLOCK));
    blocks.map(|(x, w)| f64::from(vector_sum(x.iter().zip(w).map(|(x, w)| x * f32::from(*w))))).sum()
}

fn reals(x: &[f32], w: &[f32]) -> f64 {
    let blocks = x.chunks(BLOCK).zip(w.chunks(BLOCK));
    blocks.map(|(x, w)| f64::from(vector_sum(x.iter().zip(w).map(|(x, w)| x * w)))).sum()
}

/// A sum in sixteen parts, so that it is computed in vectors.
fn vector_sum(products: impl Iterator<Item = f32>) -> f32 {
    let mut parts = [0.0_f32; 16];
    products.enumerate().for_each(|(i, p)| parts[i % 16] += p);
    parts.iter().sum()
}

/// `a[…, M, K] · b[…, K, N]`, as reals; `places` gives for every matrix of the result where those of the
/// operands begin.
pub(super) fn matmul(a: &Values, b: &Values, [m, k, n]: [usize; 3], places: &[(usize, usize)]) -> Vec<f64> {
    let mut out = Vec::with_capacity(places.len() * m * n);
    if let (Values::Codes(a, sa), Values::Codes(b, sb)) = (a, b) {
        let centred = |x: &[u16], offset: i32| x.iter().map(|q| i64::from(*q) + i64::from(offset)).collect();
        let (a, b): (Vec<i64>, Vec<i64>) = (centred(a, sa.offset), centred(b, sb.offset));
        let real = f64::from(sa.scale) * f64::from(sb.scale);
        for &(i, j) in places {
            products(&a[i..i + m * k], &b[j..j + k * n], k, n, |sum: i64| out.push(sum as f64 * real));
        }
    } else {
        let (a, b) = (a.reals(), b.reals());
        for &(i, j) in places {
            products(&a[i..i + m * k], &b[j..j + k * n], k, n, |sum: f64| out.push(sum));
        }
    }
    out
}

fn products<X>(a: &[X], b: &[X], k: usize, n: usize, mut each: impl FnMut(X))
where
    X: Copy + Default + std::ops::Mul<Output = X> + std::ops::AddAssign,
{
    let mut sums = vec![X::default(); n];
    for row in a.chunks_exact(k.max(1)) {
        sums.fill(X::default());
        for (x, b) in row.iter().zip(b.chunks_exact(n.max(1))) {
            sums.iter_mut().zip(b).for_each(|(sum, b)| *sum += *x * *b);
        }
        sums.iter().copied().for_each(&mut each);
    }
}
