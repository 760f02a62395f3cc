//! Sums of products of channels, which are the second moments of inputs: a profile keeps them as
//! [`Correlations`]. Rows of some of these inputs are kept, too.

use super::piece;
use bincode::{Decode, Encode};
use moec_profile::Correlations;
use moec_profile::correlations::blocks;
use moec_profile::samples::{RowSample, Sample};
use std::mem;
use std::ops::Range;
use std::thread;

/// Number of multiply-adds that is worth an additional thread.
const SHARE: usize = 1 << 23;

/// Sums of one input; weights that read the same input share them.
#[derive(Encode, Decode)]
pub(super) struct Products {
    /// Weights that read it.
    pub(super) readers: Vec<String>,
    cols: usize,
    block: usize,
    /// Number of tokens that each matrix has seen.
    tokens: Vec<u64>,
    /// `[matrices, pairs and squares]`: of each block, row by row, up to the diagonal.
    sums: Vec<f32>,
    /// Rows of a chunk, `[rows, cols]`.
    rows: Vec<f32>,
    /// Sample of rows for the profile, if it keeps some.
    sample: Option<RowSample>,
}

/// Number of sums in a block of `n` channels.
const fn triangle(n: usize) -> usize {
    n * (n + 1) / 2
}

impl Products {
    /// Creates sums for `matrices` matrices that read `cols` channels, in blocks of `block`.
    pub(super) fn new(reader: String, matrices: usize, cols: usize, block: usize) -> Self {
        let of_one: usize = blocks(cols, block).map(|b| triangle(b.len())).sum();
        let (readers, tokens, sums) = (vec![reader], vec![0; matrices], vec![0.0; matrices * of_one]);
        Self { readers, cols, block, tokens, sums, rows: Vec::new(), sample: None }
    }

    /// Keeps a sample of rows, too.
    pub(super) fn with_sample(self) -> Self {
        Self { sample: Some(RowSample::default()), ..self }
    }

    /// Channels of the sampled rows.
    pub(super) fn sample_cols(&self) -> Option<usize> {
        self.sample.as_ref().map(|_| self.cols)
    }

    /// Samples the rows that were added last, `most` in all.
    pub(super) fn keep(&mut self, most: usize) {
        let Some(sample) = &mut self.sample else { return };
        self.rows.chunks_exact(self.cols.max(1)).for_each(|row| sample.add(row, most));
    }

    /// Returns the sampled rows.
    pub(super) fn sample(&mut self) -> Option<Sample> {
        Some(self.sample.take()?.finish(self.readers.clone(), self.cols))
    }

    /// Takes the sums out; the next ones begin at zero.
    pub(super) fn take(&mut self) -> Self {
        let next = Self {
            readers: self.readers.clone(),
            tokens: vec![0; self.tokens.len()],
            sums: vec![0.0; self.sums.len()],
            rows: mem::take(&mut self.rows),
            sample: self.sample.as_ref().map(|_| RowSample::default()),
            ..*self
        };
        mem::replace(self, next)
    }

    /// Adds the sums of a later piece, of whose rows at most `most` are kept with these; `None` if shapes differ.
    pub(super) fn merge(&mut self, next: Self, most: usize) -> Option<()> {
        if let (Some(own), Some(next)) = (&mut self.sample, next.sample) {
            own.merge(next, most);
        }
        piece::add(&mut self.tokens, &next.tokens)?;
        piece::add(&mut self.sums, &next.sums)
    }

    /// Number of matrices.
    pub(super) fn matrices(&self) -> usize {
        self.tokens.len()
    }

    /// Channels of a row that matrix `matrix` reads, where a row has the inputs of all matrices side by side.
    pub(super) fn channels(&self, matrix: usize) -> Range<usize> {
        matrix * self.cols..(matrix + 1) * self.cols
    }

    /// Adds the rows that matrix `matrix` reads; each is `cols` numbers, little-endian. Returns `None` if a
    /// row is missing.
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
        // Blocks are cut into bands of similar size. Each sum is computed by one thread, in one order.
        let mut bands: Vec<Vec<Band<'_>>> = Vec::new();
        bands.resize_with(threads, Vec::new);
        let mut rest = sums;
        let mut done = 0;
        for block in blocks(cols, self.block) {
            for first in (0..block.len()).step_by(BAND) {
                let band = first..(first + BAND).min(block.len());
                let (own, tail) =
                    mem::take(&mut rest).split_at_mut_checked(triangle(band.end) - triangle(first))?;
                rest = tail;
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

    /// Returns the observations.
    pub(super) fn finish(self) -> Option<Correlations> {
        Correlations::from_sums(self.readers, self.cols, self.block, self.tokens, &self.sums)
    }
}

/// A block of channels, a band of it, and the sums of the block.
type Band<'a> = (Range<usize>, Range<usize>, &'a mut [f32]);

/// Number of channels whose products are summed together.
const BAND: usize = 32;

/// Adds the products of the channels `band` of a block with the earlier channels, and their squares. A chunk
/// is summed separately, so that small numbers are added to small ones first.
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
