//! Sums of products of channels: the second moments of inputs, of which a profile keeps [`Correlations`]; and rows of some
//! of these inputs.

use moec_profile::Correlations;
use moec_profile::correlations::blocks;
use moec_profile::samples::{RowSample, Sample};
use std::ops::Range;
use std::thread;

/// Multiply-adds that are worth a thread of their own.
const SHARE: usize = 1 << 23;

/// Sums of one input, which weights share that read it.
pub(super) struct Products {
    /// Weights that read it.
    pub(super) readers: Vec<String>,
    cols: usize,
    block: usize,
    /// Tokens that each matrix has seen.
    tokens: Vec<u64>,
    /// `[matrices, pairs and squares]`: of each block row by row, up to the diagonal.
    sums: Vec<f32>,
    /// Rows of a chunk, `[rows, cols]`.
    rows: Vec<f32>,
    /// Rows that the profile keeps, where it keeps some.
    kept: Option<RowSample>,
}

/// Numbers of a block of `n` channels.
const fn triangle(n: usize) -> usize {
    n * (n + 1) / 2
}

impl Products {
    /// Of `matrices` matrices that read `cols` channels, in blocks of `block`.
    pub(super) fn new(reader: String, matrices: usize, cols: usize, block: usize) -> Self {
        let of_one: usize = blocks(cols, block).map(|b| triangle(b.len())).sum();
        let (readers, tokens, sums) = (vec![reader], vec![0; matrices], vec![0.0; matrices * of_one]);
        Self { readers, cols, block, tokens, sums, rows: Vec::new(), kept: None }
    }

    /// Also keeps rows.
    pub(super) fn keeping(self) -> Self {
        Self { kept: Some(RowSample::default()), ..self }
    }

    /// Channels of the rows that it keeps.
    pub(super) fn kept(&self) -> Option<usize> {
        self.kept.as_ref().map(|_| self.cols)
    }

    /// Keeps some of the rows that were added last, `most` in all.
    pub(super) fn keep(&mut self, most: usize) {
        let Some(kept) = &mut self.kept else { return };
        self.rows.chunks_exact(self.cols.max(1)).for_each(|row| kept.add(row, most));
    }

    /// Rows that were kept.
    pub(super) fn sample(&mut self) -> Option<Sample> {
        Some(self.kept.take()?.finish(self.readers.clone(), self.cols))
    }

    /// Matrices.
    pub(super) fn matrices(&self) -> usize {
        self.tokens.len()
    }

    /// Channels of a row that matrix `matrix` reads, where the rows of all matrices lie side by side.
    pub(super) fn channels(&self, matrix: usize) -> Range<usize> {
        matrix * self.cols..(matrix + 1) * self.cols
    }

    /// Adds the rows that matrix `matrix` reads; each is `cols` numbers, little-endian. `None` if one is missing.
    pub(super) fn add<'v>(
        &mut self,
        matrix: usize,
        rows: impl Iterator<Item = Option<&'v [u8]>>,
    ) -> Option<()> {
        self.rows.clear();
        for row in rows {
            self.rows.extend(row?.chunks_exact(4).map(super::rows::number));
        }
        *self.tokens.get_mut(matrix)? += (self.rows.len() / self.cols.max(1)) as u64;
        let of_one = self.sums.len() / self.tokens.len().max(1);
        let sums = self.sums.get_mut(matrix * of_one..(matrix + 1) * of_one)?;
        let (cols, rows) = (self.cols, self.rows.as_slice());
        let work = (rows.len() / cols.max(1)) * of_one;
        let threads = thread::available_parallelism().map_or(1, usize::from).min(work / SHARE + 1);
        // Blocks, cut into bands of about as many numbers: each number is summed by one thread, in one order.
        let mut bands: Vec<Vec<Band<'_>>> = Vec::new();
        bands.resize_with(threads, Vec::new);
        let mut rest = sums;
        let mut done = 0;
        for block in blocks(cols, self.block) {
            for first in (0..block.len()).step_by(BAND) {
                let band = first..(first + BAND).min(block.len());
                let (own, behind) =
                    std::mem::take(&mut rest).split_at_mut_checked(triangle(band.end) - triangle(first))?;
                rest = behind;
                let thread = done * threads / of_one.max(1);
                done += own.len();
                bands.get_mut(thread.min(threads - 1))?.push((block.clone(), band, own));
            }
        }
        let mine = bands.pop()?;
        thread::scope(|scope| {
            for theirs in bands {
                scope.spawn(move || {
                    for band in theirs {
                        add(rows, cols, band);
                    }
                });
            }
            for band in mine {
                add(rows, cols, band);
            }
        });
        Some(())
    }

    /// Observations.
    pub(super) fn finish(self) -> Option<Correlations> {
        Correlations::from_sums(self.readers, self.cols, self.block, self.tokens, &self.sums)
    }
}

/// A block of channels, some of these, and their sums.
type Band<'a> = (Range<usize>, Range<usize>, &'a mut [f32]);

/// Channels whose products are summed together.
const BAND: usize = 32;

/// Adds the products of the channels `band` of a block with those before them, and their squares. Those of a chunk are
/// summed apart: small numbers are added to small ones first.
fn add(rows: &[f32], cols: usize, (block, band, sums): Band<'_>) {
    let mut rest = sums;
    let mut part = vec![0.0; block.len()];
    for i in band {
        let Some((own, behind)) = rest.split_at_mut_checked(i + 1) else { return };
        rest = behind;
        let part = &mut part[..=i];
        part.fill(0.0);
        for row in rows.chunks_exact(cols) {
            let x = row[block.start + i];
            for (sum, &y) in part.iter_mut().zip(&row[block.start..]) {
                *sum += x * y;
            }
        }
        own.iter_mut().zip(&*part).for_each(|(s, p)| *s += p);
    }
}
