//! Matrix products whose sums have the same order on every host.
//!
//! Linear algebra crates choose instructions at run time. On another CPU they round differently, and a build
//! would write different bytes. These products take most of the training time, so they are tiled by hand; a
//! crate computes the small ones.

/// Rows and columns whose sums are in registers at once.
const TILE: usize = 4;

/// Product of a matrix `[rows, cols]` and `right` `[cols, wide]`, both row-major: `[rows, wide]`. `left`
/// returns the number at a row and column.
pub(crate) fn product(
    rows: usize,
    cols: usize,
    left: impl Fn(usize, usize) -> f64,
    right: &[f64],
    wide: usize,
) -> Vec<f64> {
    // One tile of columns after the other; the last is padded with 0.
    let tile = |at: usize| {
        let cells = right.chunks_exact(wide.max(1)).map(move |row| {
            let mut cell = [0.0; TILE];
            cell.iter_mut().zip(&row[at..]).for_each(|(to, from)| *to = *from);
            cell
        });
        cells.collect::<Vec<[f64; TILE]>>()
    };
    let tiles: Vec<Vec<[f64; TILE]>> = (0..wide).step_by(TILE).map(tile).collect();
    let mut out = vec![0.0; rows * wide];
    let mut strip = vec![[0.0; TILE]; cols];
    for first in (0..rows).step_by(TILE) {
        let last = rows - 1;
        for (col, cell) in strip.iter_mut().enumerate() {
            *cell = std::array::from_fn(|i| left((first + i).min(last), col));
        }
        for (tile, at) in tiles.iter().zip((0..wide).step_by(TILE)) {
            let mut sums = [[0.0; TILE]; TILE];
            for (a, b) in strip.iter().zip(tile) {
                for (sums, a) in sums.iter_mut().zip(a) {
                    sums.iter_mut().zip(b).for_each(|(sum, b)| *sum += a * b);
                }
            }
            for (row, sums) in (first..rows).zip(&sums) {
                let to = &mut out[row * wide + at..(row + 1) * wide];
                to.iter_mut().zip(sums).for_each(|(to, sum)| *to = *sum);
            }
        }
    }
    out
}

/// Bytes that [`product`] takes besides its arguments.
pub(crate) const fn product_bytes(rows: usize, cols: usize, wide: usize) -> usize {
    let number = size_of::<f64>();
    number * (cols * wide.next_multiple_of(TILE) + rows * wide + cols * TILE)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_number_is_the_sum_of_its_row_and_column() {
        for (rows, cols, wide) in [(1, 1, 1), (4, 8, 4), (7, 5, 9), (3, 2, 6)] {
            let left = |i: usize, k: usize| (i * 31 + k * 7) as f64 - 40.0;
            let right: Vec<f64> = (0..cols * wide).map(|i| (i * 13 % 17) as f64 - 8.0).collect();
            let found = product(rows, cols, left, &right, wide);
            for i in 0..rows {
                for j in 0..wide {
                    let want: f64 = (0..cols).map(|k| left(i, k) * right[k * wide + j]).sum();
                    assert_eq!(found[i * wide + j], want, "[{i}, {j}] of {rows} × {cols} × {wide}");
                }
            }
        }
    }
}
