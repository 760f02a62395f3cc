//! Matrix products in f32 over rows that are stored in fp16.
//!
//! Rows are widened a few at a time, so weights stay in the file that they are mapped from. Every element of
//! the product is one sum in the order of the inner dimension, multiplied and added separately. So the result
//! depends neither on the number of threads nor on fused operations of the CPU.

use crate::package::{Constant, Weights};
use half::f16;
use half::slice::HalfFloatSliceExt;
use std::thread;

/// Rows of a tile.
const MR: usize = 4;
/// Columns of a tile. Four rows of eight sums are half of the registers of the least x86-64 machine.
const NR: usize = 8;
/// Multiplications below which one thread does all.
const SMALL: usize = 1 << 22;

/// A matrix that is read row by row.
#[derive(Clone, Copy)]
pub(super) enum GemmRows<'a> {
    /// A constant of the package.
    Stored(&'a Constant, &'a Weights),
    /// Numbers in memory, fp16.
    Half(&'a [f16]),
    /// Numbers in memory, fp32.
    Single(&'a [f32]),
}

impl GemmRows<'_> {
    /// Reads elements from `start` on; false if there are not as many.
    fn read(&self, start: usize, out: &mut [f32]) -> bool {
        let end = start.saturating_add(out.len());
        match self {
            Self::Stored(constant, weights) => constant.floats(weights, start, out),
            Self::Half(v) => v.get(start..end).map(|v| v.convert_to_f32_slice(out)).is_some(),
            Self::Single(v) => v.get(start..end).map(|v| out.copy_from_slice(v)).is_some(),
        }
    }
}

/// The right-hand matrix `[k, n]`, in panels of [`NR`] columns.
pub(super) struct Panels {
    k: usize,
    n: usize,
    data: Vec<f32>,
}

impl Panels {
    /// Packs a matrix: `at(i, j)` is the element of row `i` and column `j`.
    pub(super) fn pack(k: usize, n: usize, at: impl Fn(usize, usize) -> f32) -> Self {
        let mut data = vec![0.0; n.div_ceil(NR) * k * NR];
        for (p, panel) in data.chunks_mut((k * NR).max(1)).enumerate() {
            for (i, row) in panel.chunks_mut(NR).enumerate() {
                let columns = p * NR..n.min(p * NR + NR);
                row.iter_mut().zip(columns).for_each(|(x, j)| *x = at(i, j));
            }
        }
        Self { k, n, data }
    }
}

/// Four rows times one panel.
fn tile(rows: [&[f32]; MR], panel: &[f32]) -> [[f32; NR]; MR] {
    let mut sums = [[0.0; NR]; MR];
    let [a, b, c, d] = rows;
    for ((((x, &a), &b), &c), &d) in panel.as_chunks::<NR>().0.iter().zip(a).zip(b).zip(c).zip(d) {
        for (sums, w) in sums.iter_mut().zip([a, b, c, d]) {
            for (sum, x) in sums.iter_mut().zip(x) {
                *sum += w * x;
            }
        }
    }
    sums
}

/// Some rows of the product: `out` is `[rows, n]`, the first of them is row `row` of a matrix that starts at
/// element `first`.
fn some(rows: GemmRows<'_>, first: usize, row: usize, panels: &Panels, out: &mut [f32]) -> bool {
    let Panels { k, n, data } = panels;
    let mut wide = vec![0.0; MR * k];
    for (block, out) in out.chunks_mut(MR * n).enumerate() {
        let count = out.len() / n;
        let start = first + (row + block * MR) * k;
        if !rows.read(start, &mut wide[..count * k]) {
            return false;
        }
        let (ab, cd) = wide.split_at(2 * k);
        let ((a, b), (c, d)) = (ab.split_at(*k), cd.split_at(*k));
        for (p, panel) in data.chunks((k * NR).max(1)).enumerate() {
            let sums = tile([a, b, c, d], panel);
            let columns = p * NR..(*n).min(p * NR + NR);
            for (out, sums) in out.chunks_mut(*n).zip(&sums) {
                out[columns.clone()].iter_mut().zip(sums).for_each(|(o, s)| *o = *s);
            }
        }
    }
    true
}

/// `out[m, n] = rows[m, k] · panels[k, n]`, where the matrix starts at element `first` of `rows`.
///
/// False if there are not as many rows; `out` is then unspecified.
pub(super) fn gemm(
    rows: GemmRows<'_>,
    first: usize,
    panels: &Panels,
    out: &mut [f32],
    threads: usize,
) -> bool {
    let n = panels.n;
    let m = out.len() / n.max(1);
    if m * panels.k * n < SMALL || threads < 2 {
        return some(rows, first, 0, panels, out);
    }
    let share = m.div_ceil(threads).next_multiple_of(MR);
    thread::scope(|scope| {
        let workers: Vec<_> = (out.chunks_mut(share * n).enumerate())
            .map(|(i, out)| scope.spawn(move || some(rows, first, i * share, panels, out)))
            .collect();
        workers.into_iter().all(|w| w.join().unwrap_or(false))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn number(i: usize) -> f32 {
        ((i * 2_654_435_761) % 61) as f32 / 8.0 - 3.0
    }

    #[test]
    fn gemm_matches_the_definition_at_any_size_and_threads() {
        for (m, k, n, threads) in
            [(1, 1, 1, 1), (3, 5, 2, 1), (4, 8, 8, 1), (5, 33, 17, 2), (67, 512, 131, 3)]
        {
            let a: Vec<f32> = (0..2 + m * k).map(number).collect();
            let b: Vec<f32> = (0..k * n).map(|i| number(i + 7)).collect();
            let panels = Panels::pack(k, n, |i, j| b[i * n + j]);
            let half: Vec<f16> = a.iter().map(|&x| f16::from_f32(x)).collect();
            for rows in [GemmRows::Single(&a), GemmRows::Half(&half)] {
                let mut out = vec![f32::NAN; m * n];
                assert!(gemm(rows, 2, &panels, &mut out, threads));
                for (at, &x) in out.iter().enumerate() {
                    let (i, j) = (at / n, at % n);
                    let exact: f64 =
                        (0..k).map(|l| f64::from(a[2 + i * k + l]) * f64::from(b[l * n + j])).sum();
                    assert!((f64::from(x) - exact).abs() < 1e-3, "{m}×{k}×{n}, [{i}, {j}]: {x}, {exact}");
                }
            }
            let mut out = vec![0.0; m * n];
            assert!(!gemm(GemmRows::Single(&a), 3, &panels, &mut out, threads), "past the end");
        }
    }
}
